"""What a step learns from members that share their first answers."""

from typing import Any

import numpy as np
import pytest
from assembling import assembled, total_weight, turn_values
from builders import ANSWER, PROMPT, episode_of, group_of, trajectory_of
from hypothesis import given
from hypothesis import strategies as st

from agentgym.algorithm_config import AlgorithmConfig
from agentgym.batch import Sample
from agentgym.coordinator.assemble import teaches
from agentgym.coordinator.groups import Group


def forked(*rewards: list[float], turn: int = 1, **fields: Any) -> Group:
    """A group whose plays have the first answers of another episode."""
    return group_of(*(episode_of(mine, replayed=turn, **fields) for mine in rewards), group=1)


def own_values(sample: Sample) -> list[float]:
    """The advantage of each turn, the common ones included."""
    answers = sample.advantages[sample.sampled].reshape(-1, ANSWER)
    assert (answers == answers[:, :1]).all()
    return [round(float(value), 5) for value in answers[:, 0]]


def test_forks_are_compared_by_what_they_earned_on_their_own_and_what_they_share_is_not_trained() -> None:
    # The common answer earned 5. After it: 2 + 0 = 2, 1 and 0, of which the mean is 1.
    found = assembled(forked([5.0, 2.0, 0.0], [5.0, 1.0], [5.0, 0.0]), entropy_coefficient=0.1)
    assert [own_values(sample) for sample in found.samples] == [[0, 1.0, 1.0], [0, 0], [0, -1.0]]
    for sample in found.samples:
        assert not sample.loss_mask[: PROMPT + ANSWER].any()
        assert not sample.weights[: PROMPT + ANSWER].any()
        assert sample.sampled[PROMPT : PROMPT + ANSWER].all()
        sample.verify()
    trained = [int(sample.loss_mask.sum()) for sample in found.samples]
    assert trained == [2 * ANSWER, ANSWER, ANSWER]
    assert total_weight(found) == pytest.approx(1.0)
    assert len(found.ages) == sum(trained)
    assert found.metrics["stale_share"] == 0.0


def test_the_advantages_of_forks_are_those_of_plays_that_begin_at_the_fork() -> None:
    rewards = [[2.0, 0.0], [1.0], [0.0, 3.0, 1.0]]
    for advantage in (
        "group_mean",
        "group_mean_std",
        "leave_one_out",
        "dr_mas",
        "turn_group_mean",
        "at_grpo",
        "magrpo",
    ):
        settings = {"advantage": advantage, "entropy_coefficient": 0.1}
        there = assembled(forked(*([9.0, -4.0, *mine] for mine in rewards), turn=2), **settings)
        alone = assembled(group_of(*map(episode_of, rewards)), **settings)
        assert [own_values(sample)[2:] for sample in there.samples] == [turn_values(s) for s in alone.samples]


def test_members_whose_environment_did_not_repeat_itself_are_compared_with_each_other() -> None:
    # From the turn: returns 1 and 0. From the beginning: 8 and 4.
    members = [
        episode_of([5.0, 1.0], replayed=1),
        episode_of([8.0]),
        episode_of([5.0, 0.0], replayed=1),
        episode_of([4.0]),
    ]
    found = assembled(group_of(*members))
    assert sorted(own_values(sample) for sample in found.samples) == [[-2.0], [0, -0.5], [0, 0.5], [2.0]]
    settings = AlgorithmConfig.model_validate({"advantage": "group_mean"})
    assert not teaches(group_of(*members[:2]), settings, max_tokens=4)
    assert teaches(group_of(*members[:3]), settings, max_tokens=4)


def test_an_agent_without_an_answer_after_the_fork_is_no_part_of_it() -> None:
    plays = [
        episode_of(
            trajectories=[
                trajectory_of([0.0, r], agent="a", replayed=1),
                trajectory_of([7.0 * r], agent="b", replayed=1),
            ]
        )
        for r in (1.0, 0.0)
    ]
    found = assembled(group_of(*plays))
    assert [own_values(sample) for sample in found.samples] == [[0, 0.5], [0, -0.5]]


def test_the_age_limit_holds_for_the_answers_after_a_fork() -> None:
    found = assembled(
        group_of(
            episode_of([0.0, 1.0, 0.0], replayed=1, versions=[0, 3, 5]),
            episode_of([0.0, 0.0], replayed=1, versions=5),
        ),
        version=6,
        max_staleness=1,
    )
    assert [np.flatnonzero(sample.loss_mask).tolist() for sample in found.samples] == [
        [3 * PROMPT + 2 * ANSWER, 3 * PROMPT + 2 * ANSWER + 1],
        [2 * PROMPT + ANSWER, 2 * PROMPT + ANSWER + 1],
    ]
    assert found.metrics["stale_share"] == pytest.approx(1 / 3)


@given(
    plays=st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(-3, 3), min_size=1, max_size=3)),
        min_size=2,
        max_size=6,
    ),
    advantage=st.sampled_from(
        ["group_mean", "leave_one_out", "dr_mas", "turn_group_mean", "at_grpo", "magrpo"]
    ),
)
def test_nothing_that_forks_share_is_ever_trained_and_their_advantages_sum_to_zero(
    plays: list[tuple[int, list[int]]], advantage: str
) -> None:
    episodes = [episode_of([1.0] * turn + [float(r) for r in own], replayed=turn) for turn, own in plays]
    found = assembled(group_of(*episodes), advantage=advantage, entropy_coefficient=0.1)
    sums: dict[int, float] = {}
    by_tokens = {e.trajectories[0].checksum(): e.trajectories[0] for e in episodes}
    for sample in found.samples:
        sample.verify()
        turns = by_tokens[sample.checksum].turns
        own = [turn for turn in turns if turn.finish_reason == "stop"]
        assert sample.loss_mask.sum() == len(own) * ANSWER
        assert not sample.advantages[: own[0].start].any()
        shared = len(turns) - len(own)
        per_turn = [float(sample.advantages[turn.start]) for turn in own]
        sums[shared] = sums.get(shared, 0.0) + (
            per_turn[0] if advantage in ("group_mean", "leave_one_out") else sum(per_turn)
        )
    assert all(abs(total) < 1e-4 for total in sums.values())
    assert total_weight(found) == pytest.approx(1.0, abs=1e-5)
