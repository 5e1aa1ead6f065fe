"""The mean of the gradients that advantages lead to, over everything that can happen, is that of the expected return.

A play is two answers, each one of two; its reward may depend on both. The policy has a probability for each answer. All
ways in which the members of a group can play are gone through, so that nothing is left to chance.
"""

from collections.abc import Callable, Iterator
from itertools import product
from math import prod

import numpy as np
import pytest
from assembling import assembled
from builders import episode_of, group_of
from numpy.typing import NDArray

from agentgym.advantages.menu import estimate
from agentgym.advantages.returns import Floats, Joint
from agentgym.algorithm_config import AlgorithmConfig

MEMBERS = 3
FIRST, SECOND = 0.3, (0.6, 0.2)
"""The probability of answer 1: first, and after each first answer."""
REWARDS = {(0, 0): (0.5, 1.0), (0, 1): (0.5, 0.0), (1, 0): (-1.0, 3.0), (1, 1): (-1.0, 1.0)}
"""Of each turn; that of the first is paid before the second."""
Play = tuple[int, int]
Values = Callable[[tuple[Play, ...]], list[Floats]]
"""The advantages of the turns of each member."""


def chance(play: Play, given: int | None = None) -> float:
    """The probability of a play, or of its second answer where the first one is `given`."""
    one, two = play
    second = SECOND[one] if two else 1 - SECOND[one]
    return second if given is not None else second * (FIRST if one else 1 - FIRST)


def scores(play: Play) -> NDArray[np.float64]:
    """The gradient of the log-probability of each answer, by the logits of the three decisions: [T, 3]."""
    one, two = play
    out = np.zeros((2, 3))
    out[0, 0] = one - FIRST
    out[1, 1 + one] = two - SECOND[one]
    return out


def groups(given: int | None = None) -> Iterator[tuple[tuple[Play, ...], float]]:
    """All that a group can do, and how likely it is."""
    plays = [(one, two) for one in ((0, 1) if given is None else (given,)) for two in (0, 1)]
    for members in product(plays, repeat=MEMBERS):
        yield members, prod(chance(play, given) for play in members)


def expected(values: Values, given: int | None = None) -> NDArray[np.float64]:
    """The mean over all groups of the mean over the members of advantage times score."""
    total = np.zeros(3)
    for members, probability in groups(given):
        for play, advantages_T in zip(members, values(members), strict=True):
            total += probability * advantages_T @ scores(play) / MEMBERS
    return total


def of_expected_return() -> NDArray[np.float64]:
    """The gradient of the expected return, from its definition."""
    return np.sum([chance(play) * sum(REWARDS[play]) * scores(play).sum(axis=0) for play in REWARDS], axis=0)


def by_name(advantage: str, baseline: float = 0.0) -> Values:
    settings = AlgorithmConfig.model_validate({"advantage": advantage})

    def values(members: tuple[Play, ...]) -> list[Floats]:
        rewards: Joint = [[{"agent": np.array(REWARDS[play])} for play in members]]
        found, _ = estimate(rewards, settings, {"agent": baseline})
        return [play["agent"] for play in found[0]]

    return values


def test_leaving_oneself_out_of_the_mean_is_unbiased() -> None:
    np.testing.assert_allclose(expected(by_name("leave_one_out")), of_expected_return(), atol=1e-12)


@pytest.mark.parametrize("advantage", ["group_mean", "turn_group_mean", "turn_batch_mean", "magrpo"])
def test_a_mean_with_oneself_in_it_shrinks_the_gradient_by_one_member(advantage: str) -> None:
    share = (MEMBERS - 1) / MEMBERS
    np.testing.assert_allclose(expected(by_name(advantage)), share * of_expected_return(), atol=1e-12)


def test_a_running_mean_of_the_past_is_unbiased_whatever_it_is() -> None:
    np.testing.assert_allclose(expected(by_name("rae", baseline=7.0)), of_expected_return(), atol=1e-12)


def test_dividing_by_the_deviation_is_not_unbiased() -> None:
    found, right = expected(by_name("group_mean_std")), of_expected_return()
    assert np.abs(found / np.linalg.norm(found) - right / np.linalg.norm(right)).max() > 0.01


@pytest.mark.parametrize("given", [0, 1])
@pytest.mark.parametrize(
    ("advantage", "share"), [("leave_one_out", 1.0), ("group_mean", (MEMBERS - 1) / MEMBERS)]
)
def test_forks_have_the_gradient_of_what_is_expected_from_their_turn_on(
    given: int, advantage: str, share: float
) -> None:
    def values(members: tuple[Play, ...]) -> list[Floats]:
        episodes = [episode_of(REWARDS[play], replayed=1) for play in members]
        found = assembled(group_of(*episodes), advantage=advantage, entropy_coefficient=0.1)
        out = []
        for episode, sample in zip(episodes, found.samples, strict=True):
            turns = episode.trajectories[0].turns
            out.append(np.array([sample.advantages[turn.start] for turn in turns], float))
            assert [bool(sample.loss_mask[turn.start]) for turn in turns] == [False, True]
        return out

    second = SECOND[given]
    right = np.zeros(3)
    for two, probability in ((0, 1 - second), (1, second)):
        right += probability * REWARDS[given, two][1] * scores((given, two))[1]
    np.testing.assert_allclose(expected(values, given), share * right, atol=1e-6)
