"""Group rewards: asked for once per group, beside the loop, and what becomes of groups that cannot be scored."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from builders import config_of, episode_of, group_of, within
from live_run import play, small_run
from toy_rewards import released
from wire_peers import play_well

from agentgym.coordinator.groups import Group, GroupBuffer
from agentgym.coordinator.scoring import GroupScorer, Scored
from agentgym.episode import Episode
from agentgym.errors import ConfigError, EnvError
from agentgym.protocol import Lease


def scored(*names: str, timeout: float = 10.0, weights: dict[str, float] | None = None) -> list[Scored]:
    """Score a group of a loser and a winner; return everything that is handed over until the deadline is past."""
    env = {"reward_timeout": timeout, "reward_weights": weights or {}}
    config = config_of(env=env, rollout={"group_rewards": [f"toy_rewards:{name}" for name in names]})
    found: list[Scored] = []

    async def scene() -> None:
        there = asyncio.Event()

        def done(group: Group, result: Scored) -> None:
            found.append(result)
            there.set()

        GroupScorer(config, done=done).start(group_of(episode_of([0.0]), episode_of([0.0, 1.0])))
        await there.wait()

    within(20, scene())
    return found


def test_the_members_of_a_group_are_compared_and_paid_by_a_function() -> None:
    ((loser, winner),) = scored("best", weights={"best": 0.5})
    assert isinstance(winner, Episode)
    assert [turn.reward for turn in winner.trajectories[0].turns] == [0.0, 1.5]
    assert winner.trajectories[0].turns[1].rewards == {"all": 1.0, "best": 1.0}
    assert isinstance(loser, Episode)
    assert loser.trajectories[0].turns[0].rewards == {"all": 0.0, "best": 0.0}


def test_a_function_that_fails_says_so() -> None:
    (error,) = scored("broken_group")
    assert isinstance(error, EnvError)
    assert str(error) == "reward 'broken_group' raised LookupError: no judge for 2 episodes"


def test_a_function_that_never_returns_is_left_behind() -> None:
    released.clear()
    (error,) = scored("best", "never_group", timeout=0.05)
    released.set()
    assert isinstance(error, EnvError)
    assert str(error) == "group rewards (best, never_group) did not return within 0.05 s"


def test_a_function_that_is_not_there_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="did you mean best"):
        GroupScorer(config_of(rollout={"group_rewards": ["toy_rewards:bets"]}), done=print)


def test_a_complete_group_is_ready_when_it_is_scored_and_counts_as_open_until_then() -> None:
    buffer = GroupBuffer(timeout=10.0, scored=True)
    buffer.start(0, 7, 2)
    first, second = episode_of(member=0), episode_of(member=1)
    buffer.add(second, 0.0)
    assert buffer.to_score() == []
    buffer.add(first, 0.0)
    (group,) = buffer.to_score()
    assert group.members == [first, second]
    assert (buffer.to_score(), buffer.open, buffer.ready, buffer.pending()) == ([], 1, 0, [(0, 7)])
    better = [episode_of([5.0], member=0), episode_of([6.0], member=1)]
    buffer.scored(0, better)
    assert (buffer.open, buffer.ready) == (0, 1)
    assert buffer.take(1)[0].members == better


def test_a_group_that_cannot_be_scored_is_dropped_and_counted() -> None:
    buffer = GroupBuffer(timeout=10.0, scored=True)
    buffer.start(0, 7, 2)
    for member in (0, 1):
        buffer.add(episode_of(member=member), 0.0)
    buffer.to_score()
    buffer.unscored(0, "no judge")
    assert (buffer.open, buffer.ready, buffer.counts["dropped"]) == (0, 0, 1)
    assert [(task.task_index, task.given_up, task.error) for task in buffer.take_dropped()] == [
        (7, 0, "no judge")
    ]


def test_a_group_of_one_has_nobody_to_be_compared_with() -> None:
    buffer = GroupBuffer(timeout=10.0, scored=True)
    buffer.start(0, 7, 1)
    buffer.add(episode_of(), 0.0)
    assert (buffer.to_score(), buffer.ready) == ([], 1)


def rewarded(name: str, **sections: Any) -> Any:
    return small_run(rollout={"group_rewards": [f"toy_rewards:{name}"]}, **sections)


def test_a_run_trains_on_group_rewards(tmp_path: Path) -> None:
    async def scene() -> None:
        def even(lease: Lease) -> Episode:
            """Both members earn the same, in one turn or in two: only the group reward tells them apart."""
            versions = -1 if lease.teacher else server.version
            return episode_of(
                [1.0] * (lease.member + 1),
                group=lease.group_id,
                member=lease.member,
                task_index=lease.task_index,
                versions=versions,
            )

        config = rewarded("best", algorithm={"loss_mean": "agent"})
        async with play(config, tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            cast.start(worker.work(play=even), server.serve(), trainer.train(cast.run.places.exchange))
            await cast.everyone_is_done()
            assert [batch.step for batch in trainer.batches] == [1, 2, 3]
            # The one that earned more has the prize too: 3 against 1.
            assert cast.run.reporter.last_episode_metrics["episode/reward"] == 2.0
            assert cast.run.reporter.last_episode_metrics["episode/reward/best"] == 0.5

    within(30, scene())


def test_groups_that_cannot_be_scored_are_replaced(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(rewarded("odd_groups_break"), tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            cast.start(
                worker.work(play=lambda lease: play_well(lease, server.version)),
                server.serve(),
                trainer.train(cast.run.places.exchange),
            )
            await cast.everyone_is_done()
            assert len(trainer.batches) == 3
            groups = {lease.group_id for lease in worker.played}
            assert len(groups) >= 2 * 3 * 2 - 1  # every second one was for nothing

    within(30, scene())


def test_a_function_that_always_fails_ends_the_run_with_its_error(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(rewarded("broken_group"), tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            cast.start(worker.work(), server.serve(), trainer.train(cast.run.places.exchange))
            assert await cast.run.failure() == (
                "4 groups could not be scored one after another; the last one: "
                "reward 'broken_group' raised LookupError: no judge for 2 episodes"
            )

    within(30, scene())
