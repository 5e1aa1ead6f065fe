import math
from itertools import combinations

import pytest
from builders import episode_of
from hypothesis import given
from hypothesis import strategies as st

from agentgym.episode import EndReason
from agentgym.evaluation.stats import pass_at_k, standard_error, wilson
from agentgym.evaluation.summary import scores


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_right_answer(ncK: tuple[int, int, int]) -> None:
    n, c, k = ncK
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert math.isclose(pass_at_k(n, c, k), sum(map(any, draws)) / len(draws), abs_tol=1e-12)


def test_pass_at_k_does_not_overflow() -> None:
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("share", "n", "low", "high"),
    # Wilson's interval by its definition, solved for the two roots: (p - p_hat)^2 = z^2 p (1 - p) / n.
    [(0.5, 10, 0.2366, 0.7634), (0.0, 10, 0.0, 0.2775), (1.0, 20, 0.8389, 1.0), (0.9, 100, 0.8256, 0.9448)],
)
def test_wilsons_interval(share: float, n: int, low: float, high: float) -> None:
    assert wilson(share, n) == pytest.approx((low, high), abs=1e-4)
    for bound in wilson(share, n):
        if 0.0 < bound < 1.0:
            assert (bound - share) ** 2 == pytest.approx(1.959963984540054**2 * bound * (1 - bound) / n)


def test_the_standard_error_is_that_of_the_mean() -> None:
    assert standard_error([1.0, 2.0, 3.0, 4.0]) == pytest.approx(0.6454972)
    assert standard_error([3.0]) == 0.0


def test_scores_are_by_policy_and_seat_and_failures_count_for_nothing() -> None:
    episodes = [
        episode_of({"a": [1.0], "b": [0.0]}, task_index=1, agent_metrics={"a": {"success": 1.0}}),
        episode_of({"a": [0.0], "b": [0.5]}, task_index=1, agent_metrics={"a": {"success": 0.0}}),
        episode_of({"a": [0.0, 2.0]}, task_index=2, trainable=False),
        episode_of(end=EndReason.ENV_FAILED, error="gone"),
    ]
    found = scores(episodes)
    assert found.keys() == {("learner", "a"), ("learner", "b"), ("other", "a")}
    a = found["learner", "a"]
    assert (a.rewards, a.successes, a.turns, a.tokens) == ([1.0, 0.0], [1.0, 0.0], [1, 1], [2, 2])
    assert (a.pass_at(1), a.pass_at(2), a.pass_at(3)) == (0.5, 1.0, None)
    assert found["other", "a"].successes == []
    assert found["other", "a"].rewards == [2.0]
