"""Whatever comes to a coordinator's socket is refused or bounded, and counted, and the run goes on."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgpack
import pytest
from builders import within
from live_run import Cast, leased, numbers_of, play, small_run
from strangers import GREETING, READY, KeyRing, Stranger, dealer, frame, free_address
from wire_peers import FakeWorker, play_well

from agentgym.episode import Episode
from agentgym.episode_codec import encode_episode
from agentgym.protocol import Ack, EpisodeDone, Error, Hello, Lease, Ready, Welcome
from agentgym.wire import MAX_FRAME_BYTES, MAX_HEADER_BYTES, PROTOCOL_VERSION, pack

Act = Callable[[Cast, str], Awaitable[None]]


def numbers_with(
    folder: Path, act: Act, ring: KeyRing | None = None, *, silence: float = 1.0, local: bool = True
) -> dict[str, float]:
    """Let somebody do something at the coordinator's TCP address while a run goes on; return its last numbers.

    A handshake may take half of `silence` seconds. Without a `local` worker, `act` starts one.
    """

    async def scene() -> dict[str, float]:
        address = free_address()
        settings: dict[str, Any] = {"bind": address, "heartbeat_timeout": silence}
        if ring is not None:
            settings["keys"] = ring.folder
        config = small_run(run={"steps": 2}, coordinator=settings)
        async with play(config, folder, keys=ring.client if ring is not None else None) as cast:
            server, trainer = cast.server(), cast.trainer()
            cast.start(server.beat(0.1))
            if local:
                worker = cast.worker()
                cast.start(worker.beat(0.1))
            await asyncio.sleep(0)  # the run binds its addresses
            await act(cast, address)
            if local:
                cast.start(worker.work("worker-1"))
            cast.start(server.serve(), trainer.train(cast.run.places.exchange))
            await cast.run.task
            assert [len(batch.lengths) for batch in trainer.batches] == [4, 4]
            return {
                tag.removeprefix("system/"): number
                for tag, number in numbers_of(cast.run).items()
                if tag.startswith(("system/wire/", "system/leases/"))
            }

    return within(60, scene())


@pytest.mark.parametrize(
    ("whose", "counter"),
    [("unlisted", "key_refused"), ("foreign", "handshake_failed"), ("none", "handshake_failed")],
)
def test_a_wrong_key_and_no_key_are_refused_and_counted(tmp_path: Path, whose: str, counter: str) -> None:
    ring = KeyRing(tmp_path)
    keys = {"unlisted": ring.unlisted, "foreign": ring.of_another_server, "none": None}[whose]

    async def knock(cast: Cast, address: str) -> None:
        with dealer(address, keys) as peer:
            peer.send_multipart(pack(Hello(role="trainer", name="trainer", protocol=PROTOCOL_VERSION, pid=1)))
            assert not await asyncio.to_thread(peer.poll, 500)

    numbers = numbers_with(tmp_path, knock, ring)
    assert numbers[f"wire/{counter}"] >= 1
    assert numbers["wire/dropped"] == 0


def test_a_listed_client_of_another_machine_plays_over_tcp(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path)
    remote: list[FakeWorker] = []

    async def join(cast: Cast, address: str) -> None:
        remote.append(cast.worker(address))
        cast.start(remote[0].work("remote"), remote[0].beat(0.1))

    numbers = numbers_with(tmp_path, join, ring, local=False)
    assert remote[0].acknowledged == 8
    assert numbers["wire/connected"] == 3
    assert numbers["wire/handshake_failed"] == numbers["wire/key_refused"] == 0


def test_replayed_messages_change_nothing_and_are_counted(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(run={"steps": 2}), tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            first: list[Lease] = []

            def replay(lease: Lease) -> Episode:
                episode = play_well(lease, server.version)
                if not first:
                    first.append(lease)
                    worker.send(Hello(role="worker", name="worker-0", protocol=PROTOCOL_VERSION, pid=1))
                    worker.send(Ack(lease_id=lease.lease_id))
                    fields, arrays = encode_episode(episode)
                    for _ in range(2):
                        worker.send(EpisodeDone(lease_id=lease.lease_id, episode=fields), arrays)
                return episode

            cast.start(worker.work(play=replay), server.serve(), trainer.train(cast.run.places.exchange))
            await cast.everyone_is_done()
            assert [len(batch.lengths) for batch in trainer.batches] == [4, 4]
            assert len({lease.lease_id for lease in worker.played}) == len(worker.played) == 8
            numbers = numbers_of(cast.run)
            assert numbers["system/wire/repeated"] == 1
            assert numbers["system/leases/late"] == 2
            assert numbers["system/wire/dropped"] == 1

    within(30, scene())


def test_nobody_takes_the_name_of_a_process_of_the_run(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(), tmp_path) as cast:
            sleeps = ["timeit", "-n1", "-r1", "import time; time.sleep(60)"]
            cast.run.supervisor.start("trainer", "trainer", lambda: sleeps, {})
            try:
                impostor = cast.peer()
                impostor.send(Hello(role="trainer", name="trainer", protocol=PROTOCOL_VERSION, pid=1))
                answer = await impostor.next(Error)
                assert answer.fatal
                assert answer.text == "another process of this run is called trainer; choose another --name"
                trainer = cast.peer()
                pid = cast.run.supervisor.children["trainer"].pid
                trainer.send(
                    Hello(
                        role="trainer", name="trainer", policy="learner", protocol=PROTOCOL_VERSION, pid=pid
                    )
                )
                await trainer.next(Welcome)
            finally:
                cast.run.supervisor.stop(0.0)

    within(30, scene())


def test_a_header_that_is_too_large_is_answered_and_counted(tmp_path: Path) -> None:
    async def send(cast: Cast, address: str) -> None:
        with dealer(address) as peer:
            peer.send_multipart([b"ready", b"", msgpack.packb({"credits": 1, "x": b"0" * MAX_HEADER_BYTES})])
            assert await asyncio.to_thread(peer.poll, 10_000)

    assert numbers_with(tmp_path, send)["wire/dropped"] == 1


@pytest.mark.parametrize(
    ("says", "counters"),
    [
        (frame(b"a lot", claims=MAX_FRAME_BYTES + 1), ["disconnected"]),
        (frame(b"ready", more=True) + frame(b"", more=True) + frame(b"half", claims=1000), ["disconnected"]),
    ],
    ids=["a frame that is too large", "half a message"],
)
def test_a_message_that_cannot_end_ends_the_connection(
    tmp_path: Path, says: bytes, counters: list[str]
) -> None:
    async def send(cast: Cast, address: str) -> None:
        stranger = Stranger(address)
        await stranger.say(GREETING + READY)
        await stranger.heard(READY[:8])
        await stranger.say(says)
        await stranger.hung_up()
        stranger.close()

    numbers = numbers_with(tmp_path, send)
    for counter in counters:
        assert numbers[f"wire/{counter}"] == 1
    assert numbers["wire/dropped"] == numbers["wire/handshake_failed"] == 0


def test_a_handshake_that_drips_is_ended_and_counted(tmp_path: Path) -> None:
    async def drip(cast: Cast, address: str) -> None:
        stranger = Stranger(address)

        async def slowly() -> None:
            for byte in GREETING + READY:
                await stranger.say(bytes([byte]))
                await asyncio.sleep(0.1)

        dripping = asyncio.create_task(slowly())
        await stranger.hung_up()
        dripping.cancel()
        stranger.close()

    assert numbers_with(tmp_path, drip)["wire/handshake_failed"] == 1


@pytest.mark.parametrize("keyed", [False, True])
def test_a_thousand_connections_do_not_disturb_a_run(tmp_path: Path, keyed: bool) -> None:
    async def crowd(cast: Cast, address: str) -> None:
        with ExitStack() as everyone:
            for _ in range(1000):
                everyone.callback(Stranger(address).close)
            peer = cast.peer()
            await peer.hello("worker", "one-of-us")  # gets through the crowd

    # A peer of the run whose handshake takes too long in the crowd would come again, and be counted again.
    numbers = numbers_with(tmp_path, crowd, KeyRing(tmp_path) if keyed else None, silence=40.0)
    assert (numbers["wire/accepted"], numbers["wire/connected"]) == (1004, 4)


def test_a_worker_that_claims_more_than_its_slots_gets_no_more_than_these(tmp_path: Path) -> None:
    async def scene() -> None:
        async with play(small_run(run={"steps": 1}, workers={"slots": 3}), tmp_path) as cast:
            greedy, server, trainer = cast.worker(), cast.server(), cast.trainer()
            cast.start(server.serve(), trainer.train(cast.run.places.exchange))
            await greedy.hello("worker", "greedy")
            for _ in range(2):
                greedy.send(Ready(credits=10**9))
            held = [await leased(greedy) for _ in range(3)]
            for lease_id in (held[0].lease_id + 1000, held[0].lease_id + 2000):  # that it never had
                fields, arrays = encode_episode(play_well(held[0]))
                greedy.send(EpisodeDone(lease_id=lease_id, episode=fields), arrays)
            assert not [header for header in await greedy.probe() if isinstance(header, Lease)]
            for lease in held:
                greedy.answer(lease, play_well(lease))
            held = [header for header in await greedy.probe() if isinstance(header, Lease)]
            greedy.answer(held[0], play_well(held[0]))
            await cast.run.task
            assert numbers_of(cast.run)["system/wire/inflated"] == 4

    within(30, scene())


def test_a_thousand_peers_that_never_say_hello_get_nothing(tmp_path: Path) -> None:
    async def crowd(cast: Cast, address: str) -> None:
        with ExitStack() as everyone:
            peers = [everyone.enter_context(dealer(address)) for _ in range(200)]
            for peer in peers:
                for _ in range(5):
                    peer.send_multipart(pack(Ready(credits=10)))
            for peer in peers:
                for _ in range(5):
                    assert await asyncio.to_thread(peer.poll, 10_000)
                    assert b"before hello" in peer.recv_multipart()[2]

    numbers = numbers_with(tmp_path, crowd)
    assert numbers["wire/dropped"] == 1000
    assert numbers["wire/connected"] == 203
