import asyncio
import io
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from builders import config_of, episode_of, within
from rich.console import Console
from wire_peers import FakeServer, FakeTrainer, FakeWorker, Peer, open_context, play_well

from agentgym.config import Config
from agentgym.coordinator.launch import Places
from agentgym.coordinator.process import Coordinator
from agentgym.coordinator.report import Reporter
from agentgym.coordinator.schedule import Schedule
from agentgym.coordinator.supervisor import Supervisor
from agentgym.episode import EndReason, Episode
from agentgym.errors import RunError
from agentgym.protocol import (
    Ack,
    BatchHeader,
    BatchRequest,
    Drain,
    EpisodeDone,
    Error,
    Heartbeat,
    Hello,
    Lease,
    Ready,
    Servers,
    StepDone,
    Welcome,
)
from agentgym.tensorboard import TensorBoard


def small_run(**sections: Any) -> Config:
    """Two groups of two a step, quick heartbeats."""
    base: dict[str, Any] = {
        "run": {"steps": 3},
        "rollout": {"tasks_per_step": 2, "group_size": 2, "max_staleness": 1},
        "coordinator": {"heartbeat_interval": 0.1, "heartbeat_timeout": 5.0, "step_timeout": 20.0},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return config_of(**base)


class Run:
    """A coordinator that runs as a task, and the terminal that it writes to."""

    def __init__(self, config: Config, folder: Path, **resumed: Any) -> None:
        for name in ("run", "sockets", "exchange"):
            (folder / name).mkdir()
        self.places = Places(folder / "run", folder / "sockets", folder / "exchange")
        self.terminal = io.StringIO()
        self.board = TensorBoard(self.places.tensorboard)
        supervisor = Supervisor(
            logs=self.places.logs, start_timeout=60.0, silence_timeout=60.0, max_restarts=0
        )
        reporter = Reporter(
            Schedule(config),
            self.board,
            config.tensorboard,
            console=Console(file=self.terminal, width=200),
            decode=str,
        )
        self.coordinator = Coordinator(
            config, self.places, supervisor=supervisor, reporter=reporter, **resumed
        )
        self.task = asyncio.create_task(self.coordinator.run())

    async def failure(self) -> str:
        """Wait for the run to end by a RunError and return its text."""
        with pytest.raises(RunError) as caught:
            await self.task
        return str(caught.value)


class Cast:
    """Who plays in a test: peers that are connected to one run, and tasks that must not fail."""

    def __init__(self, run: Run, context: Any) -> None:
        self.run, self._context = run, context
        self._tasks: list[asyncio.Task[None]] = []

    def peer(self) -> Peer:
        return Peer(self._context, self.run.places.coordinator)

    def worker(self) -> FakeWorker:
        return FakeWorker(self._context, self.run.places.coordinator)

    def server(self) -> FakeServer:
        return FakeServer(self._context, self.run.places.coordinator)

    def trainer(self) -> FakeTrainer:
        return FakeTrainer(self._context, self.run.places.coordinator)

    def start(self, *parts: Coroutine[Any, Any, None]) -> None:
        self._tasks += [asyncio.create_task(part) for part in parts]

    async def everyone_is_done(self) -> None:
        await asyncio.gather(self.run.task, *self._tasks)


@asynccontextmanager
async def play(config: Config, folder: Path, **resumed: Any) -> AsyncIterator[Cast]:
    with open_context() as context:
        run = Run(config, folder, **resumed)
        try:
            yield Cast(run, context)
        finally:
            run.task.cancel()
            await asyncio.gather(run.task, return_exceptions=True)
            run.board.close()


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
            taught = [lease for lease in worker.played if lease.policies]
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
            "pending_tasks": [7],
            "counts": {"ok": 5},
        }
        async with play(small_run(), tmp_path, first_step=3, state=state) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            weights = str(cast.run.places.exchange / "weights-2.safetensors")

            async def train() -> None:
                trainer.send(
                    Hello(role="trainer", name="trainer", protocol=1, pid=1, version=2, weights=weights)
                )
                await trainer.next(Welcome)
                trainer.send(BatchRequest(step=3))
                batch = await trainer.next(BatchHeader)
                assert batch.state["step"] == 3
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


def test_a_worker_that_vanishes_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(run={"steps": 1}), tmp_path) as cast:
            first, second, server, trainer = cast.worker(), cast.worker(), cast.server(), cast.trainer()
            cast.start(server.serve(), trainer.train(cast.run.places.exchange))
            await first.hello("worker", "worker-0")
            first.send(Ready(credits=3))
            await first.next(Servers)
            held = [await leased(first) for _ in range(3)]
            first.answer(held[0], play_well(held[0]))
            assert (await acknowledged(first)).lease_id == held[0].lease_id
            # Its successor says hello before anybody noticed; what the first one still sends is not used.
            cast.start(second.work("worker-0"))
            await cast.everyone_is_done()
            again = {(lease.group_id, lease.member) for lease in second.played}
            assert {(lease.group_id, lease.member) for lease in held[1:]} <= again
            assert (held[0].group_id, held[0].member) not in again
            assert {lease.lease_id for lease in second.played}.isdisjoint(lease.lease_id for lease in held)
            (batch,) = trainer.batches
            assert len(batch.lengths) == 4

    within(30, scene())


async def leased(worker: FakeWorker) -> Lease:
    """Wait for a lease; news about servers are passed over."""
    while not isinstance(header := (await worker.packet()).header, Lease):
        assert isinstance(header, Servers)
    return header


async def acknowledged(worker: FakeWorker) -> Ack:
    while not isinstance(header := (await worker.packet()).header, Ack):
        assert isinstance(header, Lease | Servers)
    return header


def test_answers_of_a_replaced_worker_are_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(), tmp_path) as cast:
            first, second, server, trainer = cast.worker(), cast.worker(), cast.server(), cast.trainer()
            cast.start(server.serve(), trainer.train(cast.run.places.exchange))
            await first.hello("worker", "worker-0")
            first.send(Ready(credits=1))
            lease = await leased(first)
            await second.hello("worker", "worker-0")
            first.answer(lease, play_well(lease))
            while not isinstance(header := (await first.packet()).header, Error):
                pass
            assert header.text == "'episode' before hello"

    within(30, scene())


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([b"nonsense"], "a message has at least 3 frames"),
        ([b"nonsense", b"", b"\x80"], "unknown message kind 'nonsense'"),
        ([b"ready", b"", b"\xc1"], "is not msgpack"),
        ([b"ready", b"", b"\x81\xa7credits\xff"], "wrong at 'credits'"),
        ([b"batch_request", b"", b"\x81\xa4step\x01"], "'batch_request' from worker-0 is not a message for"),
        ([b"lease", b"", b"\x80"], "wrong at 'lease_id'"),
    ],
)
def test_garbage_is_answered_and_the_run_goes_on(tmp_path: Path, frames: list[bytes], message: str) -> None:
    async def scene() -> None:
        async with play(small_run(run={"steps": 1}), tmp_path) as cast:
            peer, worker, server, trainer = cast.peer(), cast.worker(), cast.server(), cast.trainer()
            await peer.hello("worker", "worker-0")
            await peer.next(Servers)
            peer.raw.send_multipart(frames)
            answer = await peer.next(Error)
            assert message in answer.text
            assert not answer.fatal
            cast.start(worker.work("worker-1"), server.serve(), trainer.train(cast.run.places.exchange))
            await cast.everyone_is_done()
            assert numbers_of(cast.run)["system/messages_dropped"] == 1.0

    within(30, scene())


def numbers_of(run: Run) -> dict[str, float]:
    """The latest numbers in the event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run.board.flush()
    events = EventAccumulator(str(run.places.tensorboard))
    events.Reload()
    return {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}


def test_a_message_before_hello_is_answered(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(), tmp_path) as cast:
            peer = cast.peer()
            peer.send(Heartbeat())  # a process that loads its model
            peer.send(Ready(credits=1))
            assert (await peer.next(Error)).text == "'ready' before hello"

    within(30, scene())


def test_another_protocol_is_refused_for_good(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(), tmp_path) as cast:
            peer = cast.peer()
            peer.send(Hello(role="worker", name="old", protocol=99, pid=1))
            answer = await peer.next(Error)
            assert answer.fatal
            assert answer.text == "old speaks protocol 99, this run 1; install one version"

    within(30, scene())


def test_an_episode_that_cannot_be_read_is_played_again(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(run={"steps": 1}), tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            spoiled: list[Lease] = []

            def spoil(lease: Lease) -> Episode:
                if not spoiled:
                    spoiled.append(lease)
                    worker.send(EpisodeDone(lease_id=lease.lease_id, episode={"env_id": 3}))
                return play_well(lease)

            cast.start(worker.work(play=spoil), server.serve(), trainer.train(cast.run.places.exchange))
            await cast.everyone_is_done()
            tries = [(lease.group_id, lease.member) for lease in worker.played]
            assert tries.count((spoiled[0].group_id, spoiled[0].member)) == 2

    within(30, scene())


def test_an_environment_that_always_fails_ends_the_run_with_its_error(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(), tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()

            def fail(lease: Lease) -> Episode:
                return episode_of(
                    group=lease.group_id,
                    member=lease.member,
                    end=EndReason.ENV_FAILED,
                    error="test/Env-v0: step raised KeyError: 'moves'",
                )

            cast.start(worker.work(play=fail), server.serve(), trainer.train(cast.run.places.exchange))
            text = await cast.run.failure()
            assert text.startswith("16 episodes failed one after another, none succeeded")
            assert "step raised KeyError: 'moves'" in text

    within(30, scene())


def test_a_fatal_error_of_a_process_ends_the_run(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(), tmp_path) as cast:
            worker = cast.worker()
            await worker.hello("worker", "worker-0")
            worker.send(Error(text="just so you know"))
            worker.send(Error(text="ConfigError: there is no scripted policy", fatal=True))
            assert await cast.run.failure() == "worker-0: ConfigError: there is no scripted policy"

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


@pytest.mark.parametrize(
    ("present", "message"),
    [
        ("", "the trainer has not said hello"),
        ("t", "no worker is connected"),
        ("tw", "no policy server is ready"),
        ("tws", "4 episodes are being played and 4 wait, 4 groups are open, 0 ready; last failure: none"),
    ],
)
def test_a_run_that_waits_too_long_says_for_whom(tmp_path: Path, present: str, message: str) -> None:
    async def scene() -> None:
        async with play(small_run(coordinator={"step_timeout": 0.6}), tmp_path) as cast:
            for letter, role, credits in (("t", "trainer", 0), ("w", "worker", 4), ("s", "server", 0)):
                if letter in present:
                    peer = cast.peer()
                    await peer.hello(role, f"{role}-0", address="ipc://s")  # type: ignore[arg-type]
                    if credits:
                        peer.send(Ready(credits=credits))
            text = await cast.run.failure()
            assert text.startswith(f"no progress for 0.6 s: {message}")

    within(30, scene())


def test_a_late_trainer_and_a_late_server_are_named(tmp_path: Path) -> None:
    async def late(loads: bool) -> str:
        folder = tmp_path / str(loads)
        folder.mkdir()
        async with play(small_run(coordinator={"step_timeout": 0.8}), folder) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            cast.start(worker.work(), server.serve(may_load=asyncio.Event()))
            await trainer.hello("trainer", "trainer")
            trainer.send(BatchRequest(step=1))
            batch = await trainer.next(BatchHeader)
            if loads:
                trainer.done(batch, cast.run.places.exchange)
            return await cast.run.failure()

    assert within(30, late(loads=False)).startswith("no progress for 0.8 s: the trainer works on step 1")
    assert within(30, late(loads=True)).startswith("no progress for 0.8 s: server-0 is loading weights")


def test_a_trainer_that_is_out_of_step_ends_the_run(tmp_path: Path) -> None:
    async def scene(message: BatchRequest | StepDone) -> str:
        folder = tmp_path / message.kind
        folder.mkdir()
        async with play(small_run(), folder) as cast:
            trainer = cast.trainer()
            await trainer.hello("trainer", "trainer")
            trainer.send(message)
            return await cast.run.failure()

    assert within(30, scene(BatchRequest(step=4))) == "the trainer asks for step 4; step 1 is next"
    assert (
        within(30, scene(StepDone(step=1, metrics={})))
        == "the trainer finished step 1, which it was not given"
    )


def test_a_silent_worker_that_was_started_by_hand_is_given_up(tmp_path: Path) -> None:
    async def scene() -> None:
        config = small_run(run={"steps": 1}, coordinator={"heartbeat_timeout": 0.5})
        async with play(config, tmp_path) as cast:
            silent, worker, server, trainer = cast.worker(), cast.worker(), cast.server(), cast.trainer()
            cast.start(server.serve(), server.beat(0.1), trainer.train(cast.run.places.exchange))
            await silent.hello("worker", "by-hand")
            silent.send(Ready(credits=2))
            held = [await leased(silent) for _ in range(2)]
            cast.start(worker.work("worker-0"), worker.beat(0.1))
            await cast.run.task
            assert (
                "by-hand was silent for 0.5 s; its 2 episodes are played again"
                in cast.run.terminal.getvalue()
            )
            again = {(lease.group_id, lease.member) for lease in worker.played}
            assert {(lease.group_id, lease.member) for lease in held} <= again

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
            assert (await worker.next(Servers)).addresses == []
            may_load = asyncio.Event()
            cast.start(server.serve("server-0"))
            await trainer.hello("trainer", "trainer", version=4, weights="w4")
            assert (await worker.next(Servers)).addresses == ["ipc://server-0"]
            assert [order.version for order in server.loaded] == [4]
            cast.start(late.serve("server-1", may_load=may_load))
            assert await worker.probe() == []
            may_load.set()
            assert (await worker.next(Servers)).addresses == ["ipc://server-0", "ipc://server-1"]
            replaced = cast.server()
            await replaced.hello("server", "server-0", address="ipc://server-0b", max_model_len=32)
            assert (await worker.next(Servers)).addresses == ["ipc://server-1"]

    within(30, scene())
