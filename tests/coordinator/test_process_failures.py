import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import episode_of, within
from live_run import leased, numbers_of, play, small_run
from wire_peers import FakeWorker, play_well

from agentgym.episode import EndReason, Episode
from agentgym.episode_codec import encode_episode
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
    Leaving,
    Ready,
    Servers,
    StepDone,
)


def test_a_worker_that_vanishes_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        config = small_run(run={"steps": 1}, coordinator={"heartbeat_timeout": 0.5})
        async with play(config, tmp_path) as cast:
            first, second, server, trainer = cast.worker(), cast.worker(), cast.server(), cast.trainer()
            cast.start(server.serve(), server.beat(0.1), trainer.train(cast.run.places.exchange))
            await first.hello("worker", "worker-0")
            first.send(Ready(credits=3))
            await first.next(Servers)
            held = [await leased(first) for _ in range(3)]
            first.answer(held[0], play_well(held[0]))
            assert (await acknowledged(first)).lease_id == held[0].lease_id
            # Its successor says hello before anybody noticed.
            cast.start(second.work("worker-0"), second.beat(0.1))
            await cast.run.task
            again = {(lease.group_id, lease.member) for lease in second.played}
            assert {(lease.group_id, lease.member) for lease in held[1:]} <= again
            assert (held[0].group_id, held[0].member) not in again
            assert {lease.lease_id for lease in second.played}.isdisjoint(lease.lease_id for lease in held)
            (batch,) = trainer.batches
            assert len(batch.lengths) == 4

    within(30, scene())


async def acknowledged(worker: FakeWorker) -> Ack:
    while not isinstance(header := (await worker.packet()).header, Ack):
        assert isinstance(header, Lease | Servers)
    return header


def test_two_workers_of_one_name_keep_their_own_leases(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(), tmp_path) as cast:
            first, second, server, trainer = cast.worker(), cast.worker(), cast.server(), cast.trainer()
            cast.start(server.serve(), trainer.train(cast.run.places.exchange))
            leases = []
            for worker in (first, second):
                await worker.hello("worker", "worker")
                worker.send(Ready(credits=1))
                leases.append(await leased(worker))
            assert leases[0].lease_id != leases[1].lease_id
            for worker, lease in zip((first, second), leases, strict=True):
                worker.answer(lease, play_well(lease))
                assert (await acknowledged(worker)).lease_id == lease.lease_id

    within(30, scene())


def test_a_worker_that_leaves_gets_no_more_leases_and_may_finish_those_it_has(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(run={"steps": 1}), tmp_path) as cast:
            first, second, server, trainer = cast.worker(), cast.worker(), cast.server(), cast.trainer()
            cast.start(server.serve(), trainer.train(cast.run.places.exchange))
            await first.hello("worker", "worker-0")
            first.send(Ready(credits=1))
            lease = await leased(first)
            first.send(Leaving())
            await first.next(Leaving)
            cast.start(second.work("worker-1"))
            fields, arrays = encode_episode(play_well(lease))
            first.send(EpisodeDone(lease_id=lease.lease_id, episode=fields), arrays)
            assert (await acknowledged(first)).lease_id == lease.lease_id
            await cast.everyone_is_done()
            assert len(second.played) >= 3

    within(30, scene())


def test_a_worker_that_leaves_gives_its_credits_back(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(run={"steps": 1}), tmp_path) as cast:
            first, second, server, trainer = cast.worker(), cast.worker(), cast.server(), cast.trainer()
            await first.hello("worker", "worker-0")
            first.send(Ready(credits=100))
            first.send(Leaving())
            while not isinstance((await first.packet()).header, Leaving):
                pass
            cast.start(second.work("worker-1"), server.serve(), trainer.train(cast.run.places.exchange))
            await cast.everyone_is_done()
            assert not [header for header in await drained(first) if isinstance(header, Lease)]

    within(30, scene())


async def drained(worker: FakeWorker) -> list[object]:
    """All that a worker was sent until it was told to end."""
    sent: list[object] = []
    while not isinstance(header := (await worker.packet()).header, Drain):
        sent.append(header)
    return sent


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
            peer.send(Heartbeat())  # which looks for what came meanwhile, as a raw send does not
            answer = await peer.next(Error)
            assert message in answer.text
            assert not answer.fatal
            cast.start(worker.work("worker-1"), server.serve(), trainer.train(cast.run.places.exchange))
            await cast.everyone_is_done()
            assert numbers_of(cast.run)["system/wire/dropped"] == 1.0

    within(30, scene())


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


class Dying:
    """A process that is found dead just when its last words are sent."""

    pid, returncode = 7, 1

    def __init__(self, last_words: Callable[[], None]) -> None:
        self.last_words = last_words

    def poll(self) -> int:
        self.last_words()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


@pytest.mark.parametrize("error", ["", "SafetensorError: no space is left"])
def test_the_last_words_of_a_trainer_are_the_cause_where_it_had_any(tmp_path: Path, error: str) -> None:
    async def scene() -> None:
        sent: list[Error] = []

        def last_words() -> None:
            if error and not sent:
                sent.append(Error(text=error, fatal=True))
                trainer.send(sent[0])

        async with play(small_run(), tmp_path, spawn=lambda child, log: Dying(last_words)) as cast:
            trainer = cast.trainer()
            await trainer.hello("trainer", "trainer")
            cast.run.supervisor.start("trainer", "trainer", list, {})
            text = await cast.run.failure()
            assert text.startswith(f"trainer: {error}" if error else "trainer (pid 7) ended with status 1")

    within(30, scene())


@pytest.mark.parametrize(
    ("present", "message"),
    [
        ("", "trainer has not said hello"),
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


def test_a_long_wait_is_said_once_and_goes_on(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(run={"steps": 1}, coordinator={"notice_after": 0.3}), tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            cast.start(worker.work(), trainer.train(cast.run.places.exchange))
            while "waiting for" not in cast.run.terminal.getvalue():
                await asyncio.sleep(0.05)
            cast.start(server.serve())
            await cast.everyone_is_done()
            assert cast.run.terminal.getvalue().count(
                "waiting for 0 s: no policy server is ready (none was started here)"
            ) == 1  # fmt: skip

    within(30, scene())


def test_a_server_that_never_samples_with_newer_weights_ends_the_run(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(run={"steps": 4}), tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            cast.start(
                worker.work(play=lambda lease: play_well(lease, version=0)),
                server.serve(),  # it says that it loads them
                trainer.train(cast.run.places.exchange),
            )
            assert await cast.run.failure() == (
                "nothing can be learned in step 3 from 8 batches one after another: the tokens of 'learner' in "
                "the last one are of version 0, the step trains versions 1 to 2. Do its policy servers answer with "
                "the weights that they say they have loaded?"
            )
            assert cast.run.terminal.getvalue().count("episodes of step 3 were too old; playing others") == 7

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

    assert within(30, late(loads=False)).startswith("no progress for 0.8 s: trainer works on step 1")
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

    assert within(30, scene(BatchRequest(step=4))) == (
        "the trainer of 'learner' asks for step 4 after step 0"
    )
    assert (
        within(30, scene(StepDone(step=1, metrics={})))
        == "the trainer of 'learner' finished step 1, which it was not given"
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
