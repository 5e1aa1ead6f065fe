"""A run whose learner plays against snapshots of itself, with stand-ins for its processes."""

import asyncio
from pathlib import Path

import pytest
from builders import episode_of, sent, trajectory_of, within
from live_run import play, small_run
from wire_peers import FakeServer

from agentgym.coordinator.dispatcher import Dispatcher
from agentgym.coordinator.schedule import Schedule
from agentgym.coordinator.store import EpisodeStore, StoredGroup
from agentgym.episode import Episode
from agentgym.protocol import Error, Hello, Lease
from agentgym.wire import PROTOCOL_VERSION

POLICIES = {"past": {"pool": "learner", "every": 1, "keep": 2, "sample": "latest"}}


def match(lease: Lease, learner: FakeServer, past: FakeServer) -> Episode:
    """The learner against the snapshot that the lease names, which its server must hold."""
    foe = lease.policies["player_2"]
    assert foe == f"past@{past.version}"
    return episode_of(
        trajectories=[
            trajectory_of([float(lease.member)], agent="player_1", versions=learner.version),
            trajectory_of([0.5], agent="player_2", policy=foe, versions=past.version, trainable=False),
        ],
        group=lease.group_id,
        member=lease.member,
        task_index=lease.task_index,
    )


def test_the_learner_meets_snapshots_of_itself_and_is_trained_alone(tmp_path: Path) -> None:
    async def scene() -> None:
        config = small_run(policies=POLICIES, policy_mapping={"player_2": "past"}, run={"steps": 6})
        async with play(config, tmp_path) as cast:
            worker, trainer = cast.worker(), cast.trainer()
            learner, past = cast.server(), cast.server()
            cast.start(
                worker.work(play=lambda lease: match(lease, learner, past)),
                learner.serve(),
                past.serve("server-past-0", policy="past"),
                trainer.train(cast.run.places.exchange),
            )
            await cast.everyone_is_done()
            assert [len(batch.lengths) for batch in trainer.batches] == [4] * 6, (
                "two groups of two, one agent"
            )
            # Every round of two groups met one snapshot, and the first one met the model folder itself.
            met = [lease.policies["player_2"] for lease in worker.played]
            rounds = [met[at : at + 4] for at in range(0, len(met), 4)]
            assert all(len(set(each)) == 1 for each in rounds)
            assert met[0] == "past@0"
            assert len(set(met)) >= 3
            # The snapshots are files of the run, no more than `keep` beside the one in use.
            snapshots = cast.run.places.snapshots / "past"
            assert all(Path(order.path).parent == snapshots for order in past.loaded)
            assert 2 <= len(list(snapshots.iterdir())) <= 3
            assert {order.version for order in learner.loaded} >= {1, 2, 3, 4, 5}
            state = trainer.batches[-1].state
            assert len(state["pools"]["past"]["snapshots"]) == 2
            assert state["ratings"]["elo"].keys() >= set(met)

    within(30, scene())


def test_a_server_of_another_policy_is_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(), tmp_path) as cast:
            peer = cast.peer()
            peer.send(hello_of("stranger"))
            error = await peer.next(Error)
            assert error.fatal
            assert error.text == "server-x serves 'stranger'; this run asks for learner"

    within(30, scene())


def hello_of(policy: str) -> Hello:
    return Hello(role="server", name="server-x", protocol=PROTOCOL_VERSION, pid=1, policy=policy)


@pytest.mark.parametrize(("version", "again"), [(0, [1]), (5, [0, 1])])
def test_a_group_that_a_crash_cut_in_two_meets_one_snapshot(
    tmp_path: Path, version: int, again: list[int]
) -> None:
    """Of two members one is on the disk; what it met is met again, or it is played again."""
    foe = trajectory_of([0.5], agent="player_2", policy=f"past@{version}", trainable=False)
    kept = episode_of(trajectories=[trajectory_of([1.0], agent="player_1"), foe], group=3, task_index=9)

    async def scene() -> None:
        config = small_run(policies=POLICIES, policy_mapping={"player_2": "past"})
        store = EpisodeStore(tmp_path, failed=pytest.fail)
        try:
            store.go_on(0)
            stored = asyncio.Event()
            store.add(StoredGroup(3, 9, 2), sent(kept), stored.set)
            await stored.wait()
        finally:
            store.close()
        store = EpisodeStore(tmp_path, failed=pytest.fail)
        try:
            dispatcher = Dispatcher(config, snapshots=tmp_path / "snapshots", store=store)
            dispatcher.pools.take_due("learner", 0, "")
            await dispatcher.pools.written()
            for pool in dispatcher.pools.by_name.values():
                pool.loaded = 0
            dispatcher.top_up(Schedule(config).step(1), steps_left=1, in_training=0)
            leases = iter(lambda: dispatcher.issue(b"worker", 0.0), None)
            mine = [lease for lease in leases if lease.group_id == 3]
            assert [lease.member for lease in mine] == again
            assert {lease.policies["player_2"] for lease in mine} == {"past@0"}
        finally:
            store.close()

    within(30, scene())
