from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.advantages.menu import ADVANTAGES, PLAYS, TURNS, estimate
from agentgym.advantages.plays import dr_mas, group_mean, group_mean_std, leave_one_out
from agentgym.advantages.returns import Joint, Nested, reward_to_go
from agentgym.advantages.running import rae
from agentgym.advantages.shaping import overlong
from agentgym.advantages.teams import at_grpo, magrpo
from agentgym.advantages.turns import turn_batch_mean, turn_group_mean, turn_group_mean_std
from agentgym.algorithm_config import ACROSS_GROUPS, AlgorithmConfig

ALONE: dict[str, Callable[[Nested], Nested]] = {
    **PLAYS,
    **{name: partial(lambda f, nested: f(nested, 1.0), function) for name, function in TURNS.items()},
}
"""The advantages that look at one agent, with discount 1."""


def plays(*groups: list[list[float]]) -> Nested:
    """Rewards by group, play and turn."""
    return [[np.array(play, float) for play in group] for group in groups]


def team(*groups: list[dict[str, list[float]]]) -> Joint:
    """Rewards by group, play, agent and turn."""
    return [[{a: np.array(r, float) for a, r in play.items()} for play in group] for group in groups]


def listed(nested: Any) -> Any:
    if isinstance(nested, dict):
        return {key: listed(value) for key, value in nested.items()}
    return (
        np.round(nested, 6).tolist() if isinstance(nested, np.ndarray) else [listed(part) for part in nested]
    )


def settings_of(**fields: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(fields)


TWO_GROUPS = plays([[1, 0], [0], [0, 0, 2]], [[4], [0, 0]])
"""Returns 1, 0, 2 in the first group and 4, 0 in the second."""

rewards = st.lists(
    st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=4), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
).map(lambda groups: plays(*groups))
some_turns = st.lists(st.floats(-10, 10), min_size=1, max_size=4)
joint_rewards = st.lists(
    st.lists(st.dictionaries(st.sampled_from("abc"), some_turns, max_size=3), min_size=1, max_size=4),
    max_size=3,
).map(lambda groups: team(*groups))


def test_every_name_of_the_configuration_is_a_function() -> None:
    names = get_args(AlgorithmConfig.model_fields["advantage"].annotation)
    assert sorted(names) == sorted(ADVANTAGES)
    assert set(ACROSS_GROUPS) < set(names)


def test_reward_to_go_sums_what_comes_after() -> None:
    assert reward_to_go(np.array([1.0, 0.0, 4.0]), 1.0).tolist() == [5.0, 4.0, 4.0]
    assert reward_to_go(np.array([1.0, 0.0, 4.0]), 0.5).tolist() == [2.0, 2.0, 4.0]
    assert reward_to_go(np.array([1.0, 0.0, 4.0]), 0.0).tolist() == [1.0, 0.0, 4.0]
    assert reward_to_go(np.array([]), 1.0).tolist() == []


def test_group_mean_gives_every_turn_the_distance_of_its_play_from_the_mean() -> None:
    assert listed(group_mean(TWO_GROUPS)) == [[[0, 0], [-1], [1, 1, 1]], [[2], [-2, -2]]]


def test_group_mean_std_divides_by_the_deviation_of_the_group() -> None:
    std = np.sqrt(2 / 3)
    expected = [[[0, 0], [-1 / std], [1 / std] * 3], [[1], [-1, -1]]]
    for mine, theirs in zip(group_mean_std(TWO_GROUPS), expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_leave_one_out_compares_with_the_others() -> None:
    # 1 - (0 + 2) / 2, 0 - (1 + 2) / 2, 2 - (1 + 0) / 2; 4 - 0, 0 - 4
    assert listed(leave_one_out(TWO_GROUPS)) == [[[0, 0], [-1.5], [1.5, 1.5, 1.5]], [[4], [-4, -4]]]


def test_dr_mas_has_the_statistics_of_an_agents_turns() -> None:
    # Returns by turn: 4 and 0, 0, 0: mean 1, deviation sqrt((9 + 3) / 4) = sqrt(3).
    ((one, other),) = dr_mas(plays([[4], [0, 0, 0]]))
    np.testing.assert_allclose(one, [np.sqrt(3)], atol=1e-5)
    np.testing.assert_allclose(other, [-1 / np.sqrt(3)] * 3, atol=1e-5)


def test_dr_mas_gives_agents_of_different_rewards_one_scale() -> None:
    rewards = team([{"a": [1], "b": [100]}, {"a": [0], "b": [0]}])
    (plays_G,), _ = estimate(rewards, settings_of(advantage="dr_mas"), {})
    for play, sign in zip(plays_G, (1, -1), strict=True):
        np.testing.assert_allclose([play["a"][0], play["b"][0]], [sign, sign], atol=1e-4)


def test_turn_group_mean_compares_a_turn_with_the_same_turn_of_the_group() -> None:
    # Rewards-to-go [1, 0], [0], [2, 2, 2]: means 1 over three plays, 1 over two, 2 over one.
    found = turn_group_mean(TWO_GROUPS, 1.0)
    assert listed(found) == [[[0, -1], [-1], [1, 1, 0]], [[2], [-2, 0]]]


def test_turn_group_mean_std_divides_each_turn_by_its_deviation() -> None:
    # First turns 1, 0, 2: deviation sqrt(2/3); second turns 0, 2: 1; the third is one alone: 0.
    first, second, third = turn_group_mean_std(TWO_GROUPS, 1.0)[0]
    np.testing.assert_allclose(first, [0, -1], atol=1e-5)
    np.testing.assert_allclose(second, [-np.sqrt(1.5)], atol=1e-5)
    np.testing.assert_allclose(third, [np.sqrt(1.5), 1, 0], atol=1e-5)


def test_turn_batch_mean_compares_a_turn_with_the_same_turn_of_the_step() -> None:
    # First turns 1, 0, 2, 4, 0: mean 1.4; second turns 0, 2, 0: mean 2/3; third: one alone.
    found = listed(turn_batch_mean(TWO_GROUPS, 1.0))
    third = 0.666667
    assert found == [[[-0.4, -third], [-1.4], [0.6, 1.333333, 0.0]], [[2.6], [-1.4, -third]]]


def test_turn_batch_mean_compares_plays_against_the_same_players_only() -> None:
    # Against "weak" 4 and 2, against "strong" 0 and -2 in one group and -1 in another: whom one meets is no merit.
    rewards = team([{"a": [4]}, {"a": [2]}], [{"a": [0]}, {"a": [-2]}], [{"a": [-1]}])
    settings = settings_of(advantage="turn_batch_mean")
    found, _ = estimate(rewards, settings, {}, ["weak", "strong", "strong"])
    assert listed(found) == [[{"a": [1]}, {"a": [-1]}], [{"a": [1]}, {"a": [-1]}], [{"a": [0]}]]
    together, _ = estimate(rewards, settings, {})
    assert listed(together)[0] == [{"a": [3.4]}, {"a": [1.4]}]


@given(data=st.data(), name=st.sampled_from(sorted(set(ADVANTAGES) - set(ACROSS_GROUPS))))
def test_whom_other_groups_meet_does_not_matter_where_groups_are_compared_by_themselves(
    data: st.DataObject, name: str
) -> None:
    groups = data.draw(joint_rewards)
    lineups = data.draw(st.lists(st.sampled_from("xy"), min_size=len(groups), max_size=len(groups)))
    alone, _ = estimate(groups, settings_of(advantage=name), {})
    assert listed(estimate(groups, settings_of(advantage=name), {}, lineups)[0]) == listed(alone)


def test_the_discount_counts_what_comes_later_less() -> None:
    late = plays([[0, 0, 1], [0, 0, 0]])
    assert listed(turn_group_mean(late, 0.5)) == [[[0.125, 0.25, 0.5], [-0.125, -0.25, -0.5]]]
    joint = team([{"a": [0, 0, 1]}, {"a": [0, 0, 0]}])
    assert listed(magrpo(joint, 0.5)[0][0]["a"]) == [0.125, 0.25, 0.5]


def test_at_grpo_mixes_the_teams_reward_with_an_agents_own() -> None:
    # Discount 0 and weight 1: V of a is 1 + (1 + 3) / 2 = 3 against 0, of b 3 + 2 = 5 against 0.
    rewards = team([{"a": [1], "b": [3]}, {"a": [0], "b": [0]}])
    for weight in (0.0, 1.0):
        ((one, other),) = at_grpo(rewards, 0.0, weight)
        np.testing.assert_allclose([one["a"][0], one["b"][0]], [1, 1], atol=1e-5)
        np.testing.assert_allclose([other["a"][0], other["b"][0]], [-1, -1], atol=1e-5)
    # Weight 2: b loses 1 and the team gains (5 - 1) / 2 * 2 = 4, so that b is better off too.
    ((one, _),) = at_grpo(team([{"a": [5], "b": [-1]}, {"a": [0], "b": [0]}]), 0.0, 2.0)
    assert one["b"][0] == pytest.approx(1, abs=1e-5)
    ((one, _),) = at_grpo(team([{"a": [5], "b": [-1]}, {"a": [0], "b": [0]}]), 0.0, 0.0)
    assert one["b"][0] == pytest.approx(-1, abs=1e-5)


def test_at_grpo_without_a_team_is_the_turns_of_each_agent_by_itself() -> None:
    rewards = team(
        [{"a": [1, 0], "b": [2]}, {"a": [0]}, {"a": [0, 0, 2], "b": [0, 1]}], [{"b": [4]}, {"b": [0]}]
    )
    alone, _ = estimate(rewards, settings_of(advantage="turn_group_mean_std", discount=0.9), {})
    assert listed(at_grpo(rewards, 0.9, 0.0)) == listed(alone)


def test_magrpo_gives_all_agents_the_joint_return() -> None:
    # Joint rewards [3, 1] and [1, 0]: to go [4, 1] and [1, 0]; b speaks once in the first play, twice in the second.
    found = magrpo(team([{"a": [1, 1], "b": [2]}, {"a": [1, 0], "b": [0, 0]}]), 1.0)
    assert listed(found) == [[{"a": [1.5, 0.5], "b": [1.5]}, {"a": [-1.5, -0.5], "b": [-1.5, -0.5]}]]


def test_magrpo_of_one_agent_is_its_turns_in_the_group() -> None:
    alone = [[{"a": play} for play in group] for group in TWO_GROUPS]
    expected = [[{"a": play} for play in group] for group in turn_group_mean(TWO_GROUPS, 0.5)]
    assert listed(magrpo(alone, 0.5)) == listed(expected)


def test_rae_compares_with_the_plays_before_and_remembers_them() -> None:
    # b: 0, then 0.5 * 0 + 0.5 * 4 = 2, then 0.5 * 2 + 0.5 * 2 = 2, then 0.5 * 2 + 0 = 1.
    found, baseline = rae(plays([[4], [1, 1]], [[0]]), 0.0, 0.5)
    assert listed(found) == [[[4], [0, 0]], [[-2]]]
    assert baseline == 1.0


def test_rae_goes_on_from_step_to_step_for_each_agent() -> None:
    settings = settings_of(advantage="rae", baseline_decay=0.5)
    first, after = estimate(team([{"a": [4], "b": [-4]}]), settings, {})
    assert listed(first) == [[{"a": [4], "b": [-4]}]]
    second, last = estimate(team([{"a": [4]}]), settings, after)
    assert listed(second) == [[{"a": [2]}]]
    assert (after, last) == ({"a": 2, "b": -2}, {"a": 3, "b": -2})


@given(
    returns=st.lists(st.floats(-10, 10), min_size=1, max_size=12),
    cut=st.integers(0, 12),
    decay=st.floats(0, 1),
)
def test_rae_does_not_care_where_steps_end(returns: list[float], cut: int, decay: float) -> None:
    whole, end = rae(plays([[r] for r in returns]), 0.0, decay)
    (head,), middle = rae(plays([[r] for r in returns[:cut]]), 0.0, decay)
    (tail,), last = rae(plays([[r] for r in returns[cut:]]), middle, decay)
    assert [listed([*head, *tail])] == listed(whole)
    assert last == end


def test_an_answer_that_is_too_long_loses_more_and_more() -> None:
    tokens = np.array([1.0, 16.0, 18.0, 20.0, 25.0])
    found = overlong(tokens, longest=20, buffer=4, penalty=0.5)
    assert found.tolist() == [0, 0, -0.25, -0.5, -0.5]


@pytest.mark.parametrize("name", ALONE)
def test_a_play_that_is_alone_has_no_advantage(name: str) -> None:
    assert listed(ALONE[name](plays([[3, 1]]))) == [[[0, 0]]]
    assert ALONE[name]([]) == []


@given(groups=joint_rewards, name=st.sampled_from(ADVANTAGES), discount=st.floats(0, 1))
def test_advantages_have_the_shape_of_the_rewards_and_leave_them_alone(
    groups: Joint, name: str, discount: float
) -> None:
    before = listed(groups)
    found, _ = estimate(groups, settings_of(advantage=name, discount=discount), {})
    shape = [[{agent: len(r_T) for agent, r_T in play.items()} for play in group] for group in groups]
    assert [[{agent: len(a_T) for agent, a_T in play.items()} for play in group] for group in found] == shape
    assert all(np.isfinite(a_T).all() for group in found for play in group for a_T in play.values())
    assert listed(groups) == before


@given(groups=rewards, name=st.sampled_from(["group_mean", "group_mean_std", "leave_one_out"]))
def test_advantages_of_a_group_sum_to_zero_over_its_plays(groups: Nested, name: str) -> None:
    for group in PLAYS[name](groups):
        assert abs(sum(play[0] for play in group)) < 1e-6
        assert all((play == play[0]).all() for play in group)


@given(groups=rewards)
def test_dr_mas_sums_to_zero_over_the_turns_of_a_group(groups: Nested) -> None:
    for group in dr_mas(groups):
        assert abs(sum(play.sum() for play in group)) < 1e-5


@given(
    groups=rewards, discount=st.floats(0, 1), name=st.sampled_from(["turn_group_mean", "turn_group_mean_std"])
)
def test_turn_advantages_sum_to_zero_over_the_plays_that_reached_the_turn(
    groups: Nested, discount: float, name: str
) -> None:
    for group in TURNS[name](groups, discount):
        for turn in range(max(map(len, group))):
            assert abs(sum(play[turn] for play in group if len(play) > turn)) < 1e-5


@given(groups=rewards, name=st.sampled_from(sorted({*PLAYS, *TURNS} - {"dr_mas"})), shift=st.floats(-5, 5))
def test_a_reward_that_all_plays_get_in_their_last_turn_changes_nothing_for_whole_plays(
    groups: Nested, name: str, shift: float
) -> None:
    if name.startswith("turn_"):
        groups = [[play[:1] for play in group] for group in groups]
    moved = [[np.append(play[:-1], play[-1] + shift) for play in group] for group in groups]
    for mine, theirs in zip(ALONE[name](groups), ALONE[name](moved), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-2 if name.endswith("std") else 1e-9)
