import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from builders import within
from strangers import GREETING, READY, KeyRing, Stranger, dealer, frame, ready

from agentgym.door import Door
from agentgym.errors import ConfigError, WireError
from agentgym.protocol import Ack
from agentgym.wire import MAX_FRAME_BYTES, Packet, pack

HANDSHAKE = GREETING + READY
ADDRESS = "tcp://127.0.0.1:*"


class Hall:
    """A door, what came through it, and what it has counted."""

    def __init__(self, **settings: Any) -> None:
        self.inbox: asyncio.Queue[Packet | WireError] = asyncio.Queue()
        settings = {"addresses": [ADDRESS], "silence": 1.0, **settings}
        self.door = Door(
            on_packet=self.inbox.put_nowait,
            on_garbage=lambda _, error: self.inbox.put_nowait(error),
            **settings,
        )
        (self.address,) = self.door.addresses

    async def packet(self) -> Packet:
        packet = await self.inbox.get()
        assert isinstance(packet, Packet)
        return packet

    async def counted(self, **counts: int) -> None:
        """Wait until the door has counted exactly this."""
        while self.door.counts != Counter(counts):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def hall(**settings: Any) -> AsyncIterator[Hall]:
    made = Hall(**settings)
    try:
        yield made
    finally:
        made.door.close()


def test_those_on_the_list_come_in_and_are_answered(tmp_path: Path) -> None:
    async def scene() -> None:
        ring = KeyRing(tmp_path)
        async with hall(keys=ring.server) as made:
            for keys in (ring.server, ring.client):
                with dealer(made.address, keys) as peer:
                    peer.send_multipart(pack(Ack(lease_id=1)))
                    packet = await made.packet()
                    made.door.send(Ack(lease_id=2), to=packet.sender)
                    assert peer.poll(5000)
            await made.counted(accepted=2, connected=2, disconnected=2)

    within(20, scene())


def test_a_message_without_an_end_is_cut_off_and_counted_and_many_messages_are_not() -> None:
    async def scene() -> None:
        async with hall(largest=1 << 20) as made:
            endless = Stranger(made.address)
            await endless.say(HANDSHAKE)
            await endless.heard(READY[:8])

            async def say_more() -> None:
                while True:
                    await endless.say(frame(b"x" * (1 << 16), more=True))
                    await asyncio.sleep(0)  # what is sent at once would keep the loop

            talking = asyncio.create_task(say_more())
            with dealer(made.address) as peer:
                for number in range(64):  # 4 MB in all
                    peer.send_multipart([*pack(Ack(lease_id=number))[:2], b"y" * (1 << 16)])
                    assert isinstance(await made.inbox.get(), WireError)
                # Whoever fills the window of a connection that is gone hears of it when its kernel asks again.
                while not made.door.counts["endless"]:
                    await asyncio.sleep(0.01)
                talking.cancel()
                peer.send_multipart(pack(Ack(lease_id=1)))
                await made.packet()
            endless.close()
            await made.counted(accepted=2, connected=2, endless=1, disconnected=2)

    within(20, scene())


def test_a_key_that_is_not_on_the_list_is_refused_and_counted(tmp_path: Path) -> None:
    async def scene() -> None:
        ring = KeyRing(tmp_path)
        async with hall(keys=ring.server) as made:
            with dealer(made.address, ring.unlisted) as peer:
                peer.send_multipart(pack(Ack(lease_id=1)))
                await made.counted(accepted=1, key_refused=1, disconnected=1)
            assert made.inbox.empty()

    within(20, scene())


@pytest.mark.parametrize("keys", ["none", "of another server"])
def test_no_key_and_keys_of_another_server_are_refused_and_counted(tmp_path: Path, keys: str) -> None:
    async def scene() -> None:
        ring = KeyRing(tmp_path)
        async with hall(keys=ring.server) as made:
            with dealer(made.address, None if keys == "none" else ring.of_another_server) as peer:
                peer.send_multipart(pack(Ack(lease_id=1)))
                while made.door.counts["handshake_failed"] < 1:
                    await asyncio.sleep(0.01)
            assert made.door.counts["connected"] == 0
            assert made.inbox.empty()

    within(20, scene())


def test_a_client_is_added_and_shut_out_while_the_door_is_open(tmp_path: Path) -> None:
    async def scene() -> None:
        ring = KeyRing(tmp_path)
        async with hall(keys=ring.server) as made:
            listed = ring.folder / "allowed" / "other-host.pub"
            key = listed.read_bytes()
            listed.unlink()
            with dealer(made.address, ring.client):
                await made.counted(accepted=1, key_refused=1, disconnected=1)
            listed.write_bytes(key)
            with dealer(made.address, ring.client):
                await made.counted(accepted=2, key_refused=1, disconnected=1, connected=1)

    within(20, scene())


def test_nobody_takes_over_the_identity_of_another(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hall() as made:
            with dealer(made.address) as first:
                first.send_multipart(pack(Ack(lease_id=1)))
                victim = (await made.packet()).sender
                stranger = Stranger(made.address)
                await stranger.say(GREETING + ready(victim))
                await made.counted(accepted=2, connected=2)
                await stranger.say(
                    frame(b"ack", more=True) + frame(b"", more=True) + frame(b"\x81\xa8lease_id\x07")
                )
                made.door.send(Ack(lease_id=2), to=victim)
                assert await asyncio.to_thread(first.poll, 5000), "it is still the one that is answered"
                first.send_multipart(pack(Ack(lease_id=3)))
                assert (await made.packet()).header == Ack(lease_id=3), "the other was not heard"
                stranger.close()

    within(20, scene())


def test_a_client_with_keys_talks_to_no_impostor(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hall() as made:
            with dealer(made.address, KeyRing(tmp_path).client) as peer:
                peer.send_multipart(pack(Ack(lease_id=1)))
                while made.door.counts["handshake_failed"] < 1:
                    await asyncio.sleep(0.01)
            assert made.inbox.empty()

    within(20, scene())


@pytest.mark.parametrize(
    ("says", "counts"),
    [
        (b"", {"handshake_failed": 1}),
        (GREETING[:5], {"handshake_failed": 1}),
        (GREETING, {"handshake_failed": 1}),
        (HANDSHAKE[:10], {"handshake_failed": 1}),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", {}),
        (b"\x01\x00" + b"\x04\x00ack" * 3, {}),
        (HANDSHAKE, {"connected": 1}),
        (HANDSHAKE + frame(b"ack", more=True) + frame(b"half", claims=1000), {"connected": 1}),
        (HANDSHAKE + frame(b"a lot", claims=MAX_FRAME_BYTES + 1), {"connected": 1}),
    ],
    ids=["silence", "part of a greeting", "a greeting alone", "half a handshake", "another protocol", "ZeroMQ 2",
         "silence after the handshake", "half a message", "a frame that is too large"],
)  # fmt: skip
def test_a_stranger_that_stops_is_hung_up_on_and_counted(says: bytes, counts: dict[str, int]) -> None:
    async def scene() -> None:
        async with hall() as made:
            stranger = Stranger(made.address)
            await stranger.say(says[: len(HANDSHAKE)])
            if says.startswith(HANDSHAKE):
                await made.counted(accepted=1, connected=1)
                await stranger.say(says[len(HANDSHAKE) :])
            await stranger.hung_up()
            await made.counted(accepted=1, disconnected=1, **counts)
            stranger.close()
            with dealer(made.address) as peer:
                peer.send_multipart(pack(Ack(lease_id=1)))
                await made.packet()
            assert made.inbox.empty()

    within(20, scene())


def test_a_handshake_byte_by_byte_has_a_deadline() -> None:
    async def scene() -> None:
        async with hall() as made:
            stranger = Stranger(made.address)

            async def drip() -> None:
                for byte in HANDSHAKE:
                    await stranger.say(bytes([byte]))
                    await asyncio.sleep(
                        0.05
                    )  # the slow loris: 5 seconds for all of it, and half of one is allowed

            dripping = asyncio.create_task(drip())
            await stranger.hung_up()
            dripping.cancel()
            await made.counted(accepted=1, disconnected=1, handshake_failed=1)
            stranger.close()

    within(20, scene())


def test_with_too_many_connections_others_are_refused_until_there_is_room() -> None:
    async def scene() -> None:
        async with hall(connections=2) as made:
            with dealer(made.address) as first, dealer(made.address) as second:
                for peer in (first, second):
                    peer.send_multipart(pack(Ack(lease_id=1)))
                    await made.packet()
                with dealer(made.address) as third:
                    third.send_multipart(pack(Ack(lease_id=3)))
                    while made.door.counts["no_room"] < 3:  # it tries again
                        await asyncio.sleep(0.01)
                    assert made.inbox.empty()
                    first.send_multipart(pack(Ack(lease_id=2)))
                    assert (await made.packet()).header == Ack(lease_id=2)
                    second.close()
                    assert (await made.packet()).header == Ack(lease_id=3)

    within(30, scene())


def test_a_thousand_connections_are_counted_and_gone_after_their_time() -> None:
    async def scene() -> None:
        async with hall() as made:
            with ExitStack() as crowd:
                for _ in range(1000):
                    crowd.callback(Stranger(made.address).close)
                with dealer(made.address) as peer:
                    peer.send_multipart(pack(Ack(lease_id=1)))
                    await made.packet()
                await made.counted(accepted=1001, connected=1, handshake_failed=1000, disconnected=1001)

    within(30, scene())


def test_an_address_that_cannot_be_bound_is_named(tmp_path: Path) -> None:
    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(
                ConfigError, match=f"cannot bind tcp://127.0.0.1:{port}: Address already in use"
            ):
                Hall(addresses=[f"tcp://127.0.0.1:{port}"])
        with pytest.raises(ConfigError, match=r"cannot bind 'tcp://0\.0\.0\.0:5': without keys"):
            Hall(addresses=["tcp://0.0.0.0:5"])
        with pytest.raises(
            ConfigError, match=r"clients/other-host has no server.key, which a process that binds"
        ):
            Hall(keys=KeyRing(tmp_path).client)

    within(10, scene())
