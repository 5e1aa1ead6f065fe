"""A run in which two policies are trained, each by a trainer of its own."""

import asyncio
from pathlib import Path

from builders import episode_of, trajectory_of, within
from live_run import Cast, play, small_run
from wire_peers import FakeServer, FakeTrainer

from agentgym.config import Config
from agentgym.coordinator.store import stored_episodes
from agentgym.episode import Episode
from agentgym.protocol import Error, Hello, Lease
from agentgym.wire import PROTOCOL_VERSION

POLICIES = {"red": {"model": "a"}, "blue": {"model": "b"}}


def duel(**sections: object) -> Config:
    return small_run(
        policies=POLICIES,
        policies_to_train=["red", "blue"],
        policy_mapping={"player_1": "red", "player_2": "blue"},
        **sections,
    )


class Two:
    """Both policies' servers and trainers, and a worker that plays them against each other."""

    def __init__(self, cast: Cast) -> None:
        self.cast = cast
        self.worker = cast.worker()
        self.servers: dict[str, FakeServer] = {name: cast.server() for name in POLICIES}
        self.trainers: dict[str, FakeTrainer] = {name: cast.trainer() for name in POLICIES}
        self.may_finish = {name: asyncio.Event() for name in POLICIES}
        for event in self.may_finish.values():
            event.set()

    def start(self) -> None:
        self.cast.start(self.worker.work(play=self.play))
        for name, server in self.servers.items():
            self.cast.start(server.serve(f"server-{name}", policy=name))
        for name, trainer in self.trainers.items():
            exchange = self.cast.run.places.exchange / name
            exchange.mkdir()
            self.cast.start(
                trainer.train(exchange, name=f"trainer-{name}", policy=name, may_finish=self.may_finish[name])
            )

    def play(self, lease: Lease) -> Episode:
        assert (lease.policies["player_1"], lease.policies["player_2"]) == ("red", "blue")
        reward = float(lease.member)
        return episode_of(
            trajectories=[
                trajectory_of([reward], agent=agent, policy=policy, versions=self.servers[policy].version)
                for agent, policy, reward in (("player_1", "red", reward), ("player_2", "blue", -reward))
            ],
            group=lease.group_id,
            member=lease.member,
            task_index=lease.task_index,
        )


def test_each_trainer_gets_what_its_policy_said_and_both_weights_are_published(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(duel(), tmp_path) as cast:
            two = Two(cast)
            two.start()
            await cast.everyone_is_done()
            for name in POLICIES:
                assert [batch.step for batch in two.trainers[name].batches] == [1, 2, 3]
                assert [len(batch.lengths) for batch in two.trainers[name].batches] == [4, 4, 4]
                assert {order.version for order in two.servers[name].loaded} >= {1, 2}
                assert all(Path(order.path).parent.name == name for order in two.servers[name].loaded)
            # The last checkpoints are of one step and know of the same groups.
            red, blue = (two.trainers[name].batches[-1] for name in POLICIES)
            assert red.checkpoint
            assert blue.checkpoint
            assert red.state == blue.state
        steps = [stored.step for stored in stored_episodes(cast.run.places.run)]
        assert sorted(step for step in steps if step) == sorted([1, 2, 3] * 4)

    within(30, scene())


def test_a_step_is_done_when_all_trainers_are_and_the_others_wait_for_it(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(duel(), tmp_path) as cast:
            two = Two(cast)
            two.may_finish["blue"].clear()
            two.start()
            while two.servers["red"].version != 1:
                await asyncio.sleep(0.01)
            # Red has gone on to version 1, blue has not; no step is taken with red alone.
            assert [len(two.trainers[name].batches) for name in POLICIES] == [1, 1]
            assert two.servers["blue"].version == 0
            two.may_finish["blue"].set()
            await cast.everyone_is_done()
            assert [len(two.trainers[name].batches) for name in POLICIES] == [3, 3]

    within(30, scene())


def test_a_trainer_that_is_slow_is_named(tmp_path: Path) -> None:
    async def scene() -> str:
        async with play(duel(coordinator={"step_timeout": 0.8}), tmp_path) as cast:
            two = Two(cast)
            two.may_finish["blue"].clear()
            two.start()
            return await cast.run.failure()

    assert within(30, scene()).startswith("no progress for 0.8 s: trainer-blue works on step 1")


def test_a_policy_that_nobody_plays_ends_the_run(tmp_path: Path) -> None:
    async def scene() -> str:
        async with play(duel(), tmp_path) as cast:
            two = Two(cast)

            def alone(lease: Lease) -> Episode:
                whole = Two.play(two, lease)
                red = whole.trajectories[0]
                return episode_of(
                    trajectories=[red], group=lease.group_id, member=lease.member, task_index=lease.task_index
                )

            two.play = alone  # type: ignore[method-assign]
            two.start()
            return await cast.run.failure()

    assert "no agent of 'blue' gave an answer in the 4 episodes of step 1" in within(30, scene())


def test_a_trainer_of_a_policy_that_is_not_trained_is_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(duel(), tmp_path) as cast:
            peer = cast.peer()
            peer.send(
                Hello(role="trainer", name="trainer-x", policy="green", protocol=PROTOCOL_VERSION, pid=1)
            )
            error = await peer.next(Error)
            assert error.fatal
            assert error.text == "trainer-x trains 'green'; this run trains red, blue"

    within(30, scene())
