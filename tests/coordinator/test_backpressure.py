"""Whoever stops is waited for within bounds: no queue grows while a trainer or a worker stands still.

What is counted is what leaves the coordinator: leases, batches, and bytes on the disk.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from builders import within
from live_run import Cast, leased, play, small_run
from wire_peers import FakeWorker, play_well

from agentgym.config import Config
from agentgym.coordinator.store import FOLDER
from agentgym.episode import Episode
from agentgym.protocol import Ack, BatchHeader, BatchRequest, Lease, Ready, Servers

CAPACITY = 2 * 2 * 2
"""Episodes of a small run: tasks, members, steps (`max_staleness` 1) that may be under way."""


def patient(**sections: Any) -> Config:
    """A small run for peers that send no heartbeats."""
    return small_run(coordinator={"heartbeat_timeout": 60.0}, **sections)


async def until(cast: Cast, condition: Callable[[], bool]) -> None:
    """Wait, a round trip to the coordinator after another."""
    peer = cast.peer()
    while not condition():
        await peer.probe()


async def round_trips(cast: Cast, count: int) -> None:
    peer = cast.peer()
    for _ in range(count):
        await peer.probe()


def stored_bytes(cast: Cast) -> int:
    folder = cast.run.places.run / FOLDER
    return sum(path.stat().st_size for path in folder.glob("segment-*"))


def test_a_fleet_of_fast_workers_stops_at_the_capacity_while_the_trainer_stands_still(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(patient(run={"steps": 6}), tmp_path) as cast:
            workers, server, trainer = [cast.worker() for _ in range(5)], cast.server(), cast.trainer()
            played = 0

            def count(lease: Lease) -> Episode:
                nonlocal played
                played += 1
                return play_well(lease, server.version)

            fleet = [worker.work(f"worker-{i}", credits=1000, play=count) for i, worker in enumerate(workers)]
            cast.start(server.serve(), *fleet)
            await trainer.hello("trainer", "trainer")
            for step in range(1, 7):
                # The trainer is there and asks for nothing: all that may be played is played, and no more.
                # What it took for the step before counts until its weights are published.
                expected = min(CAPACITY + (step - 1) * 4, 6 * 4)
                await until(cast, lambda expected=expected: played >= expected)
                await until(cast, lambda: sum(worker.acknowledged for worker in workers) == played)
                size = stored_bytes(cast)
                await round_trips(cast, 20)
                assert (played, stored_bytes(cast)) == (expected, size)
                trainer.send(BatchRequest(step=step))
                trainer.done(await trainer.next(BatchHeader), cast.run.places.exchange)
            await cast.everyone_is_done()

    within(60, scene())


def test_a_fast_trainer_waits_for_a_slow_worker_and_takes_a_fast_one_at_once(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(patient(run={"steps": 4}), tmp_path) as cast:
            slow, fast, server, trainer = cast.worker(), cast.worker(), cast.server(), cast.trainer()
            cast.start(server.serve(), trainer.train(cast.run.places.exchange))
            await slow.hello("worker", "slow")
            slow.send(Ready(credits=1))
            for _ in range(4):
                lease = await next_lease(slow)
                await round_trips(cast, 5)
                waiting = [slow.inbox.get_nowait().header for _ in range(slow.inbox.qsize())]
                assert not any(isinstance(header, Lease) for header in waiting)  # a credit is a lease
                assert trainer.batches == []
                slow.answer(lease, play_well(lease, server.version))
            held = await next_lease(slow)
            await until(cast, lambda: len(trainer.batches) == 1)
            # Now it does not answer any more; everything but its lease is played by another one.
            cast.start(fast.work("fast", play=lambda lease: play_well(lease, server.version)))
            await until(cast, lambda: len(trainer.batches) >= 2)
            slow.answer(held, play_well(held, server.version))
            await cast.run.task
            assert [batch.step for batch in trainer.batches] == [1, 2, 3, 4]

    within(60, scene())


async def next_lease(worker: FakeWorker) -> Lease:
    while not isinstance(header := (await worker.packet()).header, Lease):
        assert isinstance(header, Servers | Ack)
    return header


def test_no_more_is_in_play_than_the_configuration_allows(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(patient(rollout={"max_playing": 3}), tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            cast.start(server.serve(), trainer.train(cast.run.places.exchange))
            await worker.hello("worker", "worker-0")
            worker.send(Ready(credits=100))
            held = [await leased(worker) for _ in range(3)]
            assert not [header for header in await worker.probe() if isinstance(header, Lease)]
            worker.answer(held[0], play_well(held[0]))
            await next_lease(worker)
            assert not [header for header in await worker.probe() if isinstance(header, Lease)]

    within(30, scene())
