import logging

import pytest

from agentgym.coordinator.clock import AwakeClock


class Hands:
    """A clock that is moved by hand."""

    now = 5000.0

    def __call__(self) -> float:
        return self.now


def test_a_clock_that_is_read_often_shows_the_time() -> None:
    hands = Hands()
    clock = AwakeClock(clock=hands)
    shown = []
    for _ in range(8):
        hands.now += 0.25
        shown.append(clock())
    assert shown == [0.25 * n for n in range(1, 9)]


def test_the_time_that_its_process_slept_through_has_not_passed(caplog: pytest.LogCaptureFixture) -> None:
    hands = Hands()
    clock = AwakeClock(clock=hands)
    hands.now += 3600.0
    with caplog.at_level(logging.WARNING):
        assert clock() == 1.0
    assert caplog.messages == ["this process stood still for 3600 s"]
    hands.now += 0.5
    assert clock() == 1.5
