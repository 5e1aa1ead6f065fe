"""Weights reach every live policy server before they count as published, and before it is asked."""

import asyncio
from pathlib import Path

from builders import within
from live_run import Cast, leased, play, small_run
from wire_peers import FakeServer, FakeTrainer, FakeWorker, play_well

from agentgym.config import Config
from agentgym.protocol import BatchHeader, BatchRequest, Header, Lease, Loaded, LoadWeights, Ready, Servers


def patient() -> Config:
    """A small run for peers that send no heartbeats."""
    return small_run(coordinator={"heartbeat_timeout": 60.0})


async def first_step(cast: Cast, worker: FakeWorker, trainer: FakeTrainer) -> None:
    """Play and train step 1; its weights are on their way to the servers then."""
    await trainer.hello("trainer", "trainer")
    trainer.send(BatchRequest(step=1))
    await worker.hello("worker", "worker-0")
    worker.send(Ready(credits=100))
    for _ in range(4):
        lease = await leased(worker)
        worker.answer(lease, play_well(lease))
    trainer.done(await trainer.next(BatchHeader), cast.run.places.exchange)
    trainer.send(BatchRequest(step=2))


def named(headers: list[Header]) -> list[list[str]]:
    return [header.addresses["learner"] for header in headers if isinstance(header, Servers)]


async def said_hello(server: FakeServer, name: str) -> None:
    await server.hello("server", name, address=f"ipc://{name}", max_model_len=64)


def test_a_server_that_starts_late_is_brought_to_the_current_version_before_it_is_asked(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        async with play(patient(), tmp_path) as cast:
            worker, server, late, trainer = cast.worker(), cast.server(), cast.server(), cast.trainer()
            cast.start(server.serve())
            await first_step(cast, worker, trainer)
            await trainer.probe()
            await worker.probe()
            await said_hello(late, "late")  # with the model folder's weights
            order = await late.next(LoadWeights)
            assert order.version == 1
            assert not any("ipc://late" in addresses for addresses in named(await worker.probe()))
            late.send(Loaded(version=1, seconds=0.1))
            await late.probe()
            assert named(await worker.probe())[-1] == ["ipc://late", "ipc://server-0"]

    within(30, scene())


def test_a_server_that_comes_back_from_the_dead_is_not_asked_with_its_old_weights(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(patient(), tmp_path) as cast:
            worker, first, again, trainer = cast.worker(), cast.server(), cast.server(), cast.trainer()
            cast.start(first.serve("server-0"))
            await first_step(cast, worker, trainer)
            await trainer.probe()
            await worker.probe()
            await said_hello(again, "server-0")  # the coordinator had not noticed that it was gone
            assert (await again.next(LoadWeights)).version == 1
            assert named(await worker.probe())[-1] == []
            again.send(Loaded(version=1, seconds=0.1))
            await again.probe()
            assert named(await worker.probe())[-1] == ["ipc://server-0"]

    within(30, scene())


def test_weights_are_published_when_the_last_live_server_has_them(tmp_path: Path) -> None:
    async def scene() -> None:
        config = small_run(rollout={"max_staleness": 0}, coordinator={"heartbeat_timeout": 1.0})
        async with play(config, tmp_path) as cast:
            worker, quick, slow, trainer = cast.worker(), cast.server(), cast.server(), cast.trainer()
            cast.start(quick.serve("quick"), quick.beat(0.1), worker.beat(0.1))
            await said_hello(slow, "slow")
            alive = asyncio.create_task(slow.beat(0.1))
            await first_step(cast, worker, trainer)
            assert (await slow.next(LoadWeights)).version == 1
            peer = cast.peer()
            while not quick.loaded:
                await peer.probe()
            # `quick` has them; nothing is begun with them, since `slow` would still answer with the old ones.
            assert not [header for header in await worker.probe() if isinstance(header, Lease)]
            # It never answers again. When it is given up, all that live have the weights.
            alive.cancel()
            await leased(worker)
            assert "slow was silent for 1 s" in cast.run.terminal.getvalue()

    within(30, scene())
