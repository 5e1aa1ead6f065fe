import asyncio
from pathlib import Path

from builders import within
from live_run import leased, play, small_run
from wire_peers import play_well

from agentgym.protocol import (
    BatchHeader,
    BatchRequest,
    Drain,
    Hello,
    Lease,
    Ready,
    Servers,
    Welcome,
)


def test_a_run_warms_up_learns_and_tells_everyone_to_end(tmp_path: Path) -> None:
    async def scene() -> None:
        config = small_run(warmup={"steps": 2, "episodes": 3, "policy": "expert"})
        async with play(config, tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            exchange = cast.run.places.exchange
            cast.start(
                worker.work(play=lambda lease: play_well(lease, server.version)),
                server.serve(),
                trainer.train(exchange),
            )
            await cast.everyone_is_done()
            assert [(b.step, b.loss, b.publish, b.checkpoint) for b in trainer.batches] == [
                (1, "sft", False, False),
                (2, "sft", True, True),
                (3, "dppo_tv", True, False),
                (4, "dppo_tv", True, False),
                (5, "dppo_tv", True, True),
            ]
            assert [len(b.lengths) for b in trainer.batches] == [3, 3, 4, 4, 4]
            assert [order.version for order in server.loaded][:3] == [2, 3, 4]
            taught = [lease for lease in worker.played if lease.teacher]
            assert len(taught) == 2 * 3
            assert worker.acknowledged >= 2 * 3 + 3 * 4 - 1
            assert len({(lease.group_id, lease.member) for lease in worker.played}) == len(worker.played)
            # Versions before the one in use are removed.
            assert weights_left(exchange) <= {4, 5}
            assert "reinforcement learning" in cast.run.terminal.getvalue()
            assert "3/3" in cast.run.terminal.getvalue()

    within(30, scene())


def weights_left(exchange: Path) -> set[int]:
    return {int(path.stem.removeprefix("weights-")) for path in exchange.iterdir()}


def test_a_warm_up_alone_needs_no_server(tmp_path: Path) -> None:
    async def scene() -> None:
        config = small_run(warmup={"steps": 2, "episodes": 3}, run={"steps": 0})
        async with play(config, tmp_path) as cast:
            worker, trainer = cast.worker(), cast.trainer()
            cast.start(worker.work(), trainer.train(cast.run.places.exchange))
            await cast.everyone_is_done()
            assert len(worker.played) == 6

    within(30, scene())


def test_a_resumed_run_goes_on_where_its_checkpoint_was(tmp_path: Path) -> None:
    async def scene() -> None:
        state = {
            "next_task": 40,
            "next_group": 50,
            "next_lease": 60,
            "pending": [(9, 7)],
            "counts": {"ok": 5},
            "baselines": {"agent": 8.0},
        }
        config = small_run(algorithm={"advantage": "rae", "baseline_decay": 0.5})
        async with play(config, tmp_path, first_step=3, state=state) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            weights = str(cast.run.places.exchange / "weights-2.safetensors")

            async def train() -> None:
                trainer.send(
                    Hello(
                        role="trainer",
                        name="trainer",
                        policy="learner",
                        protocol=1,
                        pid=1,
                        version=2,
                        weights=weights,
                    )
                )
                await trainer.next(Welcome)
                trainer.send(BatchRequest(step=3))
                batch = await trainer.next(BatchHeader)
                assert batch.state["step"] == 3
                # From 8 over the rewards 0, 1, 0, 1, half of the way each time.
                assert batch.state["baselines"] == {"agent": 1.125}
                trainer.done(batch, cast.run.places.exchange)
                await trainer.next(Drain)

            cast.start(
                worker.work(play=lambda lease: play_well(lease, server.version)), server.serve(), train()
            )
            await cast.everyone_is_done()
            assert [lease.task_index for lease in worker.played] == [7, 7, 40, 40]
            assert [lease.lease_id for lease in worker.played] == [60, 61, 62, 63]
            # The server starts with the model folder's weights; nobody may be asked before it has the trainer's.
            assert (server.loaded[0].version, server.loaded[0].path) == (2, weights)

    within(30, scene())


def test_without_staleness_nothing_is_leased_between_a_batch_and_the_publication_of_its_weights(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        config = small_run(run={"steps": 2}, rollout={"max_staleness": 0})
        async with play(config, tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            may_load = asyncio.Event()
            cast.start(server.serve(may_load=may_load))
            await trainer.hello("trainer", "trainer")
            trainer.send(BatchRequest(step=1))
            await worker.hello("worker", "worker-0")
            worker.send(Ready(credits=100))
            for _ in range(4):
                lease = await leased(worker)
                worker.answer(lease, play_well(lease))
            batch = await trainer.next(BatchHeader)
            assert [h for h in await worker.probe() if isinstance(h, Lease)] == []
            trainer.done(batch, cast.run.places.exchange)
            trainer.send(BatchRequest(step=2))
            await trainer.probe()  # the coordinator has read all of this
            assert [h for h in await worker.probe() if isinstance(h, Lease)] == []
            may_load.set()
            for _ in range(4):
                lease = await leased(worker)
                worker.answer(lease, play_well(lease, version=1))
            trainer.done(await trainer.next(BatchHeader), cast.run.places.exchange)
            await cast.everyone_is_done()

    within(30, scene())


def test_with_staleness_the_next_step_is_played_while_one_is_trained_and_no_more(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(), tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            cast.start(server.serve())
            await trainer.hello("trainer", "trainer")
            trainer.send(BatchRequest(step=1))
            await worker.hello("worker", "worker-0")
            worker.send(Ready(credits=100))
            leases = [await leased(worker) for _ in range(2 * 4)]
            assert [h for h in await worker.probe() if isinstance(h, Lease)] == []
            for lease in leases:
                worker.answer(lease, play_well(lease))
            await trainer.next(BatchHeader)
            assert [h for h in await worker.probe() if isinstance(h, Lease)] == []

    within(30, scene())


def test_a_run_that_is_asked_to_stop_ends_after_the_next_step_with_a_checkpoint(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(run={"steps": 50}), tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            cast.start(worker.work(), server.serve())
            await trainer.hello("trainer", "trainer")
            trainer.send(BatchRequest(step=1))
            batch = await trainer.next(BatchHeader)
            cast.run.coordinator.stop_soon()
            trainer.done(batch, cast.run.places.exchange)
            trainer.send(BatchRequest(step=2))
            last = await trainer.next(BatchHeader)
            assert (batch.checkpoint, last.step, last.checkpoint) == (False, 2, True)
            trainer.done(last, cast.run.places.exchange)
            await cast.everyone_is_done()
            assert "stopping after step 2" in cast.run.terminal.getvalue()

    within(30, scene())


def test_workers_hear_only_of_servers_with_weights_in_use(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(), tmp_path) as cast:
            worker, server, late, trainer = cast.worker(), cast.server(), cast.server(), cast.trainer()
            await worker.hello("worker", "worker-0")
            assert (await worker.next(Servers)).addresses == {"learner": []}
            may_load = asyncio.Event()
            cast.start(server.serve("server-0"))
            await trainer.hello("trainer", "trainer", version=4, weights="w4")
            assert (await worker.next(Servers)).addresses == {"learner": ["ipc://server-0"]}
            assert [order.version for order in server.loaded] == [4]
            cast.start(late.serve("server-1", may_load=may_load))
            assert await worker.probe() == []
            may_load.set()
            assert (await worker.next(Servers)).addresses["learner"] == ["ipc://server-0", "ipc://server-1"]
            replaced = cast.server()
            await replaced.hello("server", "server-0", address="ipc://server-0b", max_model_len=32)
            assert (await worker.next(Servers)).addresses["learner"] == ["ipc://server-1"]

    within(30, scene())
