from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from agentgym.advantages import (
    ADVANTAGES,
    group_mean,
    group_mean_std,
    leave_one_out,
    reward_to_go,
    turn_batch_mean,
    turn_group_mean,
)
from agentgym.algorithm_config import AlgorithmConfig

Floats = NDArray[np.float64]


def plays(*groups: list[list[float]]) -> list[list[Floats]]:
    """Rewards by group, play and turn."""
    return [[np.array(play, float) for play in group] for group in groups]


def listed(nested: list[list[Floats]]) -> list[list[list[float]]]:
    return [[np.round(play, 6).tolist() for play in group] for group in nested]


TWO_GROUPS = plays([[1, 0], [0], [0, 0, 2]], [[4], [0, 0]])
"""Returns 1, 0, 2 in the first group and 4, 0 in the second."""


def test_every_name_of_the_configuration_is_a_function() -> None:
    names = AlgorithmConfig.model_fields["advantage"].annotation.__args__  # type: ignore[union-attr]
    assert set(names) == ADVANTAGES.keys()


def test_reward_to_go_sums_what_comes_after() -> None:
    assert reward_to_go(np.array([1.0, 0.0, 4.0]), 1.0).tolist() == [5.0, 4.0, 4.0]
    assert reward_to_go(np.array([1.0, 0.0, 4.0]), 0.5).tolist() == [2.0, 2.0, 4.0]
    assert reward_to_go(np.array([1.0, 0.0, 4.0]), 0.0).tolist() == [1.0, 0.0, 4.0]
    assert reward_to_go(np.array([]), 1.0).tolist() == []


def test_group_mean_gives_every_turn_the_distance_of_its_play_from_the_mean() -> None:
    assert listed(group_mean(TWO_GROUPS, 1.0)) == [[[0, 0], [-1], [1, 1, 1]], [[2], [-2, -2]]]


def test_group_mean_std_divides_by_the_deviation_of_the_group() -> None:
    std = np.sqrt(2 / 3)
    expected = [[[0, 0], [-1 / std], [1 / std] * 3], [[1], [-1, -1]]]
    for mine, theirs in zip(group_mean_std(TWO_GROUPS, 1.0), expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_leave_one_out_compares_with_the_others() -> None:
    # 1 - (0 + 2) / 2, 0 - (1 + 2) / 2, 2 - (1 + 0) / 2; 4 - 0, 0 - 4
    assert listed(leave_one_out(TWO_GROUPS, 1.0)) == [[[0, 0], [-1.5], [1.5, 1.5, 1.5]], [[4], [-4, -4]]]


def test_turn_group_mean_compares_a_turn_with_the_same_turn_of_the_group() -> None:
    # Rewards-to-go [1, 0], [0], [2, 2, 2]: means 1 over three plays, 1 over two, 2 over one.
    found = turn_group_mean(TWO_GROUPS, 1.0)
    assert listed(found) == [[[0, -1], [-1], [1, 1, 0]], [[2], [-2, 0]]]


def test_turn_batch_mean_compares_a_turn_with_the_same_turn_of_the_step() -> None:
    # First turns 1, 0, 2, 4, 0: mean 1.4; second turns 0, 2, 0: mean 2/3; third: one alone.
    found = listed(turn_batch_mean(TWO_GROUPS, 1.0))
    third = 0.666667
    assert found == [[[-0.4, -third], [-1.4], [0.6, 1.333333, 0.0]], [[2.6], [-1.4, -third]]]


def test_the_discount_counts_in_the_turn_functions_only() -> None:
    late = plays([[0, 0, 1], [0, 0, 0]])
    assert listed(turn_group_mean(late, 0.5)) == [[[0.125, 0.25, 0.5], [-0.125, -0.25, -0.5]]]
    assert listed(group_mean(late, 0.5)) == listed(group_mean(late, 1.0))


@pytest.mark.parametrize("function", ADVANTAGES.values())
def test_a_play_that_is_alone_has_no_advantage(function: Callable[..., list[list[Floats]]]) -> None:
    assert listed(function(plays([[3, 1]]), 1.0)) == [[[0, 0]]]
    assert function([], 1.0) == []


rewards = st.lists(
    st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=4), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
).map(lambda groups: plays(*groups))


@given(groups=rewards, name=st.sampled_from(sorted(ADVANTAGES)), discount=st.floats(0, 1))
def test_advantages_have_the_shape_of_the_rewards_and_leave_them_alone(
    groups: list[list[Floats]], name: str, discount: float
) -> None:
    before = [[play.copy() for play in group] for group in groups]
    found = ADVANTAGES[name](groups, discount)
    assert [[len(p) for p in g] for g in found] == [[len(p) for p in g] for g in groups]
    assert all(np.isfinite(play).all() for group in found for play in group)
    assert listed(before) == listed(groups)


@given(groups=rewards, name=st.sampled_from(["group_mean", "group_mean_std", "leave_one_out"]))
def test_advantages_of_a_group_sum_to_zero_over_its_plays(groups: list[list[Floats]], name: str) -> None:
    for group in ADVANTAGES[name](groups, 1.0):
        assert abs(sum(play[0] for play in group)) < 1e-6
        assert all((play == play[0]).all() for play in group)


@given(groups=rewards, discount=st.floats(0, 1))
def test_turn_advantages_sum_to_zero_over_the_plays_that_reached_the_turn(
    groups: list[list[Floats]], discount: float
) -> None:
    for group in turn_group_mean(groups, discount):
        for turn in range(max(map(len, group))):
            assert abs(sum(play[turn] for play in group if len(play) > turn)) < 1e-6


@given(groups=rewards, name=st.sampled_from(sorted(ADVANTAGES)), shift=st.floats(-5, 5))
def test_a_reward_that_all_plays_get_in_their_last_turn_changes_nothing_for_whole_plays(
    groups: list[list[Floats]], name: str, shift: float
) -> None:
    if name.startswith("turn_"):
        groups = [[play[:1] for play in group] for group in groups]
    moved = [[np.append(play[:-1], play[-1] + shift) for play in group] for group in groups]
    for mine, theirs in zip(ADVANTAGES[name](groups, 1.0), ADVANTAGES[name](moved, 1.0), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-2 if name == "group_mean_std" else 1e-9)
