"""Runs that are cut off at any moment and go on: no acknowledged episode is lost, none is trained twice."""

from collections import Counter, deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from builders import within
from live_run import Cast, leased, play, small_run
from wire_peers import FakeTrainer, FakeWorker, play_well

from agentgym.config import Config
from agentgym.coordinator.store import StoredEpisode, stored_episodes
from agentgym.protocol import Ack, BatchHeader, BatchRequest, Lease, Ready

STEPS, GROUPS, MEMBERS = 4, 2, 2


def durable_run(**sections: Any) -> Config:
    return small_run(run={"steps": STEPS}, trainer={"checkpoint_every": 2}, **sections)


class Actors:
    """The peers of a run that a test plays by hand, until it cuts the run off."""

    def __init__(self, cast: Cast) -> None:
        self.cast = cast
        self.worker, self.server, self.trainer = cast.worker(), cast.server(), cast.trainer()
        self.batches: list[BatchHeader] = []
        self.leases: deque[Lease] = deque()
        self._acks = 0

    async def enter(self) -> None:
        self.cast.start(self.server.serve())
        await self.trainer.hello("trainer", "trainer")
        self.trainer.send(BatchRequest(step=1))
        await self.worker.hello("worker", "worker-0")
        self.worker.send(Ready(credits=100))

    async def play(self, count: int) -> None:
        """Answer the next leases, and wait until the episodes are acknowledged."""
        for _ in range(count):
            while not self.leases:
                await self._take()
            lease = self.leases.popleft()
            self.worker.answer(lease, play_well(lease, self.server.version))
        await self.acknowledged(count)

    async def acknowledged(self, count: int) -> None:
        """Wait until episodes that were sent are acknowledged."""
        while self._acks < count:
            await self._take()
        self._acks -= count

    async def _take(self) -> None:
        header = (await self.worker.packet()).header
        if isinstance(header, Lease):
            self.leases.append(header)
        self._acks += isinstance(header, Ack)

    async def batch(self) -> BatchHeader:
        self.batches.append(await self.trainer.next(BatchHeader))
        return self.batches[-1]

    async def learn(self) -> None:
        """Take a step and ask for the next."""
        batch = await self.batch()
        self.trainer.done(batch, self.cast.run.places.exchange)
        self.trainer.send(BatchRequest(step=batch.step + 1))


async def leases_are_out(actors: Actors) -> None:
    await leased(actors.worker)


async def some_are_acknowledged(actors: Actors) -> None:
    await actors.play(3)


async def the_batch_is_sent(actors: Actors) -> None:
    await actors.play(GROUPS * MEMBERS)
    await actors.batch()


async def a_step_is_done(actors: Actors) -> None:
    await actors.play(GROUPS * MEMBERS)
    await actors.learn()
    await actors.play(GROUPS * MEMBERS)


async def the_checkpoint_is_written_and_nobody_knows(actors: Actors) -> None:
    await a_step_is_done(actors)
    assert (await actors.batch()).checkpoint


async def a_step_after_the_checkpoint_is_trained(actors: Actors) -> None:
    await a_step_is_done(actors)
    await actors.learn()
    await actors.play(GROUPS * MEMBERS)
    await actors.batch()
    await actors.play(1)


PHASES = (
    leases_are_out,
    some_are_acknowledged,
    the_batch_is_sent,
    a_step_is_done,
    the_checkpoint_is_written_and_nobody_knows,
    a_step_after_the_checkpoint_is_trained,
)


async def cut_off(
    folder: Path, config: Config, phase: Callable[[Actors], Coroutine[Any, Any, None]]
) -> Actors:
    """Run until a moment, then end without another word."""
    async with play(config, folder) as cast:
        actors = Actors(cast)
        await actors.enter()
        await phase(actors)
        return actors


async def go_on(folder: Path, config: Config, state: dict[str, Any] | None) -> tuple[FakeWorker, FakeTrainer]:
    """Resume from a checkpoint with this state, or from the start, and run to the end."""
    step = int(state["step"]) if state else 0
    async with play(config, folder, first_step=step + 1, state=state) as cast:
        worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
        cast.start(
            worker.work(play=lambda lease: play_well(lease, server.version)),
            server.serve(),
            train(trainer, cast, step),
        )
        await cast.everyone_is_done()
        return worker, trainer


async def train(trainer: FakeTrainer, cast: Cast, step: int) -> None:
    """Go on from a step whose weights the policy servers have not."""
    weights = cast.run.places.exchange / f"weights-{step}.safetensors"
    await trainer.train(cast.run.places.exchange, first_step=step + 1, weights=str(weights) if step else "")


def trained(episodes: list[StoredEpisode]) -> dict[int, set[int]]:
    """The tasks that each step trained on, all of them with all their members."""
    tasks: dict[int, Counter[int]] = {}
    for stored in episodes:
        if stored.step is not None:
            tasks.setdefault(stored.step, Counter())[stored.episode.task_index] += 1
    assert all(count == MEMBERS for counts in tasks.values() for count in counts.values())
    return {step: set(counts) for step, counts in sorted(tasks.items())}


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_a_run_that_is_cut_off_trains_every_task_once_and_plays_nothing_again(
    tmp_path: Path, phase: Callable[[Actors], Coroutine[Any, Any, None]]
) -> None:
    config = durable_run()

    async def scene() -> None:
        actors = await cut_off(tmp_path, config, phase)
        before = {s.lease_id: s.episode for s in stored_episodes(tmp_path / "run")}
        tasks_before = trained(list(stored_episodes(tmp_path / "run")))
        checkpoint = next((batch.state for batch in reversed(actors.batches) if batch.checkpoint), None)
        worker, trainer = await go_on(tmp_path, config, checkpoint)
        after = list(stored_episodes(tmp_path / "run"))
        # Every acknowledged episode is still there, as it was, and has found its step.
        assert before.keys() <= {stored.lease_id for stored in after}
        steps = trained(after)
        assert list(steps) == [1, 2, 3, 4]
        assert all(len(tasks) == GROUPS for tasks in steps.values())
        assert sorted(task for tasks in steps.values() for task in tasks) == list(range(STEPS * GROUPS))
        # Only what was not on the disk is played, under leases of its own.
        had = {(episode.task_index, episode.member) for episode in before.values()}
        played = [(lease.task_index, lease.member) for lease in worker.played]
        assert len(played) == len(set(played))
        assert had.isdisjoint(played)
        assert before.keys().isdisjoint(lease.lease_id for lease in worker.played)
        # A step that was undone is done again on the same episodes in the same order.
        assert {step: steps[step] for step in tasks_before} == tasks_before
        undone = {batch.step: batch for batch in actors.batches}
        for batch in trainer.batches:
            if batch.step in undone:
                assert batch.checksums == undone[batch.step].checksums
        assert len(worker.played) + len(before) == STEPS * GROUPS * MEMBERS

    within(60, scene())


def test_an_episode_is_on_the_disk_before_its_worker_hears_of_it(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(durable_run(), tmp_path) as cast:
            actors = Actors(cast)
            await actors.enter()
            for count in range(1, 5):
                await actors.play(1)
                assert len(list(stored_episodes(tmp_path / "run"))) == count

    within(30, scene())


def test_groups_that_are_of_no_use_leave_the_disk(tmp_path: Path) -> None:
    async def scene() -> None:
        config = durable_run(rollout={"max_staleness": 0})
        async with play(config, tmp_path) as cast:
            actors = Actors(cast)
            await actors.enter()
            stale = [await leased(actors.worker) for _ in range(GROUPS * MEMBERS)]
            for lease in stale:
                actors.worker.answer(lease, play_well(lease, version=7))  # of weights that are not there yet
            await actors.acknowledged(len(stale))
            await actors.play(GROUPS * MEMBERS)
            await actors.learn()
            groups = {stored.episode.group_id for stored in stored_episodes(tmp_path / "run")}
            assert groups.isdisjoint(lease.group_id for lease in stale)
            assert len(groups) == GROUPS

    within(30, scene())


def test_when_the_disk_fills_a_checkpoint_comes_early_and_makes_room(tmp_path: Path) -> None:
    async def scene() -> None:
        config = small_run(
            run={"steps": 6},
            coordinator={"max_store_gib": 1e-6, "keep_episodes": 0},
            trainer={"checkpoint_every": 99},
        )
        async with play(config, tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            cast.start(
                worker.work(play=lambda lease: play_well(lease, server.version)),
                server.serve(),
                trainer.train(cast.run.places.exchange),
            )
            await cast.everyone_is_done()
            assert [batch.checkpoint for batch in trainer.batches][1:] == [True] * 5
        left = {stored.step for stored in stored_episodes(tmp_path / "run")}
        assert left <= {None}

    within(30, scene())


def test_a_run_that_is_cut_off_while_it_does_steps_again_keeps_their_order(tmp_path: Path) -> None:
    async def two_steps(actors: Actors) -> None:
        await a_step_is_done(actors)
        await actors.batch()

    async def scene() -> None:
        config = durable_run()
        await cut_off(tmp_path, config, two_steps)
        first = trained(list(stored_episodes(tmp_path / "run")))
        assert list(first) == [1, 2]
        await cut_off(tmp_path, config, Actors.batch)
        await go_on(tmp_path, config, None)
        steps = trained(list(stored_episodes(tmp_path / "run")))
        assert {1: steps[1], 2: steps[2]} == first

    within(60, scene())
