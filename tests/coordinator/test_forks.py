"""Which groups are forks, and what they begin from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import config_of, episode_of, group_of, trajectory_of
from simulated import broken, cluster_of, simulated

from agentgym.config import Config
from agentgym.coordinator.dispatcher import Dispatcher
from agentgym.coordinator.forks import Forks, fork_at, fork_like
from agentgym.coordinator.groups import Group
from agentgym.coordinator.schedule import Schedule
from agentgym.coordinator.store import StoredGroup
from agentgym.episode import Episode
from agentgym.episode_codec import encode_episode
from agentgym.prefix import prefix_of
from agentgym.protocol import Lease, Recorded
from agentgym.simulation.ledger import Entry, Ledger

WORKER = b"worker"
EVERYBODY = {"*": "learner"}


def forking(share: float = 0.5, **sections: Any) -> Config:
    rollout = {"tasks_per_step": 4, "group_size": 2, "max_staleness": 1, "fork_share": share}
    return config_of(rollout=rollout, **sections)


def answer(lease: Lease, *, repeats: bool = True) -> Episode:
    """Three turns; members of a group earn different rewards."""
    again = max((len(mine) - 1 for mine in lease.prefix.values()), default=0) if repeats else 0
    return episode_of(
        [0.0, 0.0, float(lease.member)],
        group=lease.group_id,
        member=lease.member,
        task_index=lease.task_index,
        sampling_seed=lease.sampling_seed,
        replayed=again,
    )


def played(dispatcher: Dispatcher, config: Config, steps: int, **how: bool) -> list[Lease]:
    """Play some steps and return all leases."""
    leases = []
    for number in range(1, steps + 1):
        step = Schedule(config).step(number)
        while True:
            dispatcher.top_up(step, steps_left=100, in_training=0)
            while (lease := dispatcher.issue(WORKER, 0.0)) is not None:
                leases.append(lease)
                dispatcher.take_in(lease.lease_id, WORKER, answer(lease, **how), 0.0)
            if dispatcher.take(step) is not None:
                break
    return leases


def test_no_group_is_a_fork_by_default() -> None:
    config = forking(share=0.0)
    assert not any(lease.prefix for lease in played(Dispatcher(config), config, 5))


def test_about_the_share_of_the_groups_are_forks_whose_members_begin_alike() -> None:
    config = forking()
    dispatcher = Dispatcher(config)
    leases = played(dispatcher, config, 20)
    groups: dict[int, list[Lease]] = {}
    for lease in leases:
        groups.setdefault(lease.group_id, []).append(lease)
    forks = [members for members in groups.values() if members[0].prefix]
    assert 0.35 < len(forks) / len(groups) < 0.6
    first_of = {lease.task_index: lease for lease in reversed(leases) if not lease.prefix}
    for one, other in forks:
        assert (one.prefix, one.seed, one.sampling_seed) == (other.prefix, other.seed, other.sampling_seed)
        source = first_of[one.task_index]
        assert source.group_id < one.group_id
        assert one.seed == source.seed
        (recorded,) = one.prefix.values()
        assert len(recorded) in (2, 3)  # one or two answers, and what is read after them
        assert [bool(said["tokens"]) for said in recorded] == [True] * (len(recorded) - 1) + [False]
    assert len({len(one.prefix["agent"]) for one, _ in forks}) == 2
    assert dispatcher.counts["forked"] == 2 * len(forks)
    # Each task is played from its beginning once, in order.
    assert [m[0].task_index for m in groups.values() if not m[0].prefix] == list(
        range(len(groups) - len(forks))
    )


def test_scripted_players_have_the_seed_that_they_had_in_the_record() -> None:
    config = forking()
    leases = played(Dispatcher(config), config, 10)
    seeds = {(lease.task_index, lease.sampling_seed) for lease in leases if not lease.prefix}
    assert {(lease.task_index, lease.sampling_seed) for lease in leases if lease.prefix} <= seeds


def test_forks_whose_environment_was_not_the_same_again_are_counted() -> None:
    config = forking()
    dispatcher = Dispatcher(config)
    leases = played(dispatcher, config, 5, repeats=False)
    assert dispatcher.counts["diverged"] == sum(bool(lease.prefix) for lease in leases) > 0
    assert dispatcher.counts["forked"] == 0


def test_what_a_fork_comes_to_is_no_match_to_rate() -> None:
    config = forking(policies={"foe": {"scripted": "random"}}, policy_mapping={"b": "foe"})
    dispatcher = Dispatcher(config)
    dispatcher.top_up(Schedule(config).step(1), steps_left=1, in_training=0)
    lease = dispatcher.issue(WORKER, 0.0)
    assert lease is not None
    match = [trajectory_of([1.0, 0.0], agent="a", replayed=1), trajectory_of([0.0], agent="b", policy="foe")]
    ticket = dispatcher.leases.finish(lease.lease_id, WORKER)
    assert ticket is not None
    recorded: dict[str, list[Recorded]] = {"a": [{"prompt": 1, "tokens": [2], "message": {}}]}
    dispatcher.leases.add(replace(ticket, prefix=recorded))
    for fork in iter(lambda: dispatcher.issue(WORKER, 0.0), None):
        if fork.prefix:
            episode = episode_of(trajectories=match, group=fork.group_id, member=fork.member)
            dispatcher.take_in(fork.lease_id, WORKER, episode, 0.0)
    assert (dispatcher.counts["forked"], dispatcher.ratings.matrix()) == (1, {})


def group(number: int, *rewards: list[float], **fields: Any) -> Group:
    members = [episode_of(mine, group=number, task_index=number, **fields) for mine in rewards]
    return group_of(*members, group=number)


def drawn(*groups: Group, share: float = 0.999, teaches: bool = True) -> list[int]:
    """The tasks of the forks that some groups lead to, in the order in which they are drawn."""
    forks = Forks(forking(share))
    forks.offer(groups, lambda _: teaches)
    found = iter(lambda: forks.draw(7, lambda _: EVERYBODY), None)
    return [fork.task_index for fork in found]


def test_the_newest_episodes_are_drawn_first_and_each_once() -> None:
    turns = [0.0, 0.0]
    assert drawn(group(1, turns, turns), group(2, turns, turns)) == [2, 1]


def test_only_as_many_as_a_step_has_groups_are_remembered() -> None:
    assert drawn(*(group(number, [0.0, 0.0]) for number in range(9))) == [8, 7, 6, 5]


def test_groups_that_teach_nothing_single_answers_and_forks_lead_to_no_forks() -> None:
    assert drawn(group(1, [0.0, 0.0]), teaches=False) == []
    assert drawn(group(1, [0.0], [1.0])) == []
    fork = group(1, [0.0, 0.0])
    fork.forked = True
    assert drawn(fork) == []
    frozen = group_of(episode_of(trajectories=[trajectory_of([0.0, 0.0], trainable=False)]))
    assert drawn(frozen) == []


def test_a_fork_goes_to_a_group_in_which_the_same_policies_play() -> None:
    match = episode_of(
        trajectories=[
            trajectory_of([0.0, 0.0], agent="a"),
            trajectory_of([0.0], agent="b", policy="past@40", trainable=False),
        ]
    )
    forks = Forks(forking(0.999))
    forks.offer([group_of(match)], lambda _: True)
    assert forks.draw(7, lambda _: {"a": "past", "b": "learner", "*": "learner"}) is None
    fork = forks.draw(7, lambda _: {"b": "past", "*": "learner"})
    assert fork is not None
    assert fork.policies == {"a": "learner", "b": "past"}


def test_what_a_fork_began_from_is_read_off_its_members() -> None:
    began = fork_at(episode_of([0.0, 0.0, 1.0], sampling_seed=5), 2)
    members = [episode_of([0.0]), episode_of([0.0, 0.0, 3.0, 4.0], replayed=2, sampling_seed=5)]
    assert fork_like(members) == began
    assert fork_like(members[:1]) is None


def test_a_fork_that_was_cut_off_is_taken_up_where_its_members_began() -> None:
    config, ledger = forking(), Ledger()
    there = episode_of([0.0, 0.0, 1.0], group=5, task_index=2, replayed=2, sampling_seed=9)
    ledger.entries[5] = Entry(StoredGroup(5, 2, 2), leases={0: 7}, episodes={0: encode_episode(there)})
    dispatcher = Dispatcher(config, {"step": 3, "next_task": 4, "next_group": 4}, store=ledger)
    dispatcher.top_up(Schedule(config).step(4), steps_left=100, in_training=0)
    missing = dispatcher.issue(WORKER, 0.0)
    assert missing is not None
    assert (missing.group_id, missing.member, missing.task_index, missing.sampling_seed) == (5, 1, 2, 9)
    assert missing.prefix == prefix_of(there, 2)
    assert 2 not in dict(dispatcher.state()["pending"]).values()  # the task is another group's
    dispatcher.take_in(missing.lease_id, WORKER, answer(missing), 0.0)
    assert (dispatcher.counts["forked"], dispatcher.groups.ready) == (1, 1)


@pytest.mark.parametrize("advantage", ["rae", "turn_batch_mean"])
def test_advantages_that_compare_with_other_groups_are_refused(advantage: str) -> None:
    with pytest.raises(
        ValueError, match=r"compares them with plays from the beginning; set rollout\.fork_share = 0"
    ):
        forking(algorithm={"advantage": advantage})


def test_a_simulated_run_whose_trainer_dies_takes_its_forks_up_again(tmp_path: Path) -> None:
    config = cluster_of(
        run={"steps": 15},
        rollout={"fork_share": 0.5},
        simulation={"trainer_crashes": 100.0, "worker_crashes": 50.0},
    )
    run = simulated(config, tmp_path)
    counts = run.cluster.coordinator._dispatcher.counts
    assert run.cluster.resumed > 0
    assert counts["forked"] > 20
    assert counts["diverged"] == 0
    assert broken(run, max_staleness=config.rollout.max_staleness) == set()
