import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from builders import within
from every_kind import ONE_OF_EACH
from hypothesis import example, given
from hypothesis import strategies as st

from agentgym import protocol
from agentgym.errors import ConfigError, WireError
from agentgym.protocol import KINDS, Ack, Header, Heartbeat, Welcome
from agentgym.wire import (
    DTYPES,
    MAX_ARRAYS,
    MAX_HEADER_BYTES,
    Channel,
    Packet,
    open_socket,
    pack,
    refuse_public_bind,
    unpack,
)

ARRAYS = [
    np.arange(24).reshape(2, 3, 4),
    np.zeros((0,)),
    np.zeros((3, 0, 2)),
    np.ones((1, 1, 1, 1)),
    np.arange(5),
]


def frames_of(header: Any, *buffers: bytes, kind: bytes = b"ack") -> list[bytes]:
    return [kind, b"id", header if isinstance(header, bytes) else msgpack.packb(header), *buffers]


def as_bytes(frames: list[Any]) -> list[bytes]:
    """The bytes that ZeroMQ would send; it takes no buffers that are not contiguous."""
    return [zmq.Frame(frame).bytes for frame in frames]


def ignore(*_: Any) -> None:
    """A handler for messages that a test does not look at."""


def test_there_is_an_example_of_every_kind() -> None:
    assert ONE_OF_EACH.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_of_every_kind_survives(kind: str) -> None:
    packet = unpack(as_bytes(pack(ONE_OF_EACH[kind], request_id=b"\x00\x01")), sender=b"me")
    assert packet == Packet(kind, b"\x00\x01", ONE_OF_EACH[kind], {}, b"me")
    assert packet.expect(KINDS[kind]) is packet.header


def test_a_packet_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(WireError, match="got a 'ack' message where 'lease' was expected"):
        Packet("ack", b"", Ack(lease_id=1)).expect(protocol.Lease)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_arrays_of_every_dtype_and_shape_survive(dtype: str) -> None:
    sent = {str(number): array.astype(dtype) for number, array in enumerate(ARRAYS)}
    received = unpack(as_bytes(pack(Welcome(), {**sent, "nothing": None}))).arrays
    assert received.keys() == sent.keys()
    for name, array in sent.items():
        assert (received[name].dtype, received[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(received[name], array)


def test_arrays_that_are_not_contiguous_survive() -> None:
    table = np.arange(24, dtype=np.int32).reshape(4, 6)
    for view in (table.T, table[::2, 1::2], table[::-1], np.asfortranarray(table)):
        np.testing.assert_array_equal(unpack(as_bytes(pack(Welcome(), {"x": view}))).arrays["x"], view)


@pytest.mark.parametrize(
    "array", [np.zeros(2), np.zeros(2, ">i4"), np.array(["a"]), np.zeros((1,) * 5, np.int32)]
)
def test_an_array_that_no_receiver_takes_is_refused_by_the_sender(array: Any) -> None:
    with pytest.raises(WireError, match=r"array 'x' of a 'welcome' message is .*; send bool, .*int32"):
        pack(Welcome(), {"x": array})


def test_half_a_surrogate_pair_does_not_lose_the_message() -> None:
    packet = unpack(as_bytes(pack(protocol.Error(text="cannot open \udce4.txt"))))
    assert packet.expect(protocol.Error).text == "cannot open ?.txt"


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "at least 3 frames .* got 0"),
        ([b"ack", b"id"], "got 2"),
        (frames_of({}, kind=b"nonsense"), "unknown message kind 'nonsense'; known: abort, ack"),
        (frames_of({}, kind=b"\xff" * 100), "unknown message kind"),
        (frames_of(b""), "not msgpack"),
        (frames_of(b"\xc1"), "not msgpack"),
        (frames_of(b"\x80\x80"), "not msgpack"),
        (frames_of(b"\x91" * 100_000), "not msgpack"),
        (frames_of(b"\xdd\xff\xff\xff\xff"), "not msgpack"),
        (frames_of(b"\x81\xa1\xff\x01"), "not msgpack"),
        (frames_of(b"\x81\x91\x01\x01"), "not msgpack"),
        (frames_of([1]), "a list, not a map"),
        (frames_of({}), "wrong at 'lease_id': Field required"),
        (frames_of({"lease_id": "1"}), "wrong at 'lease_id': Input should be a valid integer"),
        (frames_of({"lease_id": 1.0}), "wrong at 'lease_id'"),
        (frames_of({"lease_id": True}), "wrong at 'lease_id'"),
        (frames_of({"lease_id": 1, "more": 2}), "wrong at 'more': Extra inputs are not permitted"),
        (frames_of({"lease_id": 1, 5: 2}), "Keys should be strings"),
        (frames_of({"credits": -1}, kind=b"ready"), "wrong at 'credits'"),
        (frames_of({"role": "king", "name": "x", "protocol": 1, "pid": 1}, kind=b"hello"), "wrong at 'role'"),
        (frames_of(b"x" * (MAX_HEADER_BYTES + 1)), "has 16777217 bytes, over"),
    ],
)
def test_a_header_that_is_wrong_is_named(frames: list[bytes], message: str) -> None:
    with pytest.raises(WireError, match=message):
        unpack(frames)


@pytest.mark.parametrize(
    ("described", "buffers"),
    [
        ("x", []),
        ([], [b"1234"]),
        ([["x", "int32", [1]]], []),
        ([["x", "int32", [1]]], [b"123"]),
        ([["x", "int32", [2]]], [b"1234"]),
        ([["x", "int32", [-1]]], [b"1234"]),
        ([["x", "int32", [True]]], [b"1234"]),
        ([["x", "int32", [1.0]]], [b"1234"]),
        ([["x", "int32", 1]], [b"1234"]),
        ([["x", "object", [1]]], [b"12345678"]),
        ([["x", "float64", [1]]], [b"12345678"]),
        ([[3, "int32", [1]]], [b"1234"]),
        ([["x", "int32"]], [b"1234"]),
        ([["x", "int32", [1, 1, 1, 1, 1]]], [b"1234"]),
        ([["x", "int32", [0, 2**62]]], [b""]),
        ([["x", "int32", [0, 2**30, 2**30, 2**30]]], [b""]),
        ([["x", "int32", [2**63]]], [b"1234"]),
        ([["x", "bool", [1]]] * (MAX_ARRAYS + 1), [b"1"] * (MAX_ARRAYS + 1)),
    ],
)
def test_array_frames_that_do_not_fit_to_the_header_are_refused(described: Any, buffers: list[bytes]) -> None:
    with pytest.raises(WireError, match=r"of a 'ack' message|a 'ack' message (has|describes)"):
        unpack(frames_of({"lease_id": 1, "_arrays": described}, *buffers))


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 99), inner, max_size=4)
    ),
    max_leaves=20,
)
kinds = st.sampled_from([kind.encode() for kind in KINDS]) | st.binary(max_size=8)
described = st.fixed_dictionaries({"_arrays": anything}) | st.fixed_dictionaries(
    {"lease_id": st.integers(0, 9)}
)
headers = st.binary() | (anything | described).map(lambda value: msgpack.packb(value, strict_types=False))


@given(frames=st.lists(st.binary(), max_size=5) | st.tuples(kinds, st.binary(), headers).map(list))
@example(
    frames=[b"ack", b"", msgpack.packb({"lease_id": 1, "_arrays": [["x", "bool", [0, 2**64 - 1]]]}), b""]
)
def test_arbitrary_frames_raise_nothing_but_wire_errors(frames: list[bytes]) -> None:
    try:
        packet = unpack(frames)
    except WireError:
        return
    assert isinstance(packet.header, KINDS[packet.kind])


class Ends:
    """A ROUTER and a DEALER on one event loop, and what each received."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.received: asyncio.Queue[Packet | WireError] = asyncio.Queue()
        self.answers: asyncio.Queue[Packet | WireError] = asyncio.Queue()
        router, self.raw = open_socket(context, zmq.ROUTER), open_socket(context, zmq.DEALER)
        router.bind(address)
        self.raw.connect(address)
        self.router = Channel(router, self.received.put_nowait, self.note)
        self.dealer = Channel(self.raw, self.answers.put_nowait, self.note)

    def note(self, sender: bytes, error: WireError) -> None:
        self.received.put_nowait(error)


@contextmanager
def two_ends(folder: Path) -> Iterator[Ends]:
    with zmq.Context() as context:
        ends = Ends(context, f"ipc://{folder}/socket")
        try:
            yield ends
        finally:
            ends.dealer.close()
            ends.router.close()


def test_a_dealer_and_a_router_exchange_messages(tmp_path: Path) -> None:
    async def exchange() -> None:
        with two_ends(tmp_path) as ends:
            tokens = np.arange(100_000, dtype=np.int32)
            ends.dealer.send(Ack(lease_id=1), {"tokens": tokens}, request_id=b"7")
            asked = await ends.received.get()
            assert isinstance(asked, Packet)
            assert (asked.header, asked.request_id) == (Ack(lease_id=1), b"7")
            np.testing.assert_array_equal(asked.arrays["tokens"], tokens)
            assert not asked.arrays["tokens"].flags.writeable
            ends.router.send(Ack(lease_id=2), to=asked.sender, request_id=asked.request_id)
            answer = await ends.answers.get()
            assert isinstance(answer, Packet)
            assert (answer.header, answer.request_id, answer.sender) == (Ack(lease_id=2), b"7", b"")

    within(10, exchange())


def test_garbage_is_reported_and_the_channel_goes_on(tmp_path: Path) -> None:
    async def exchange() -> None:
        with two_ends(tmp_path) as ends:
            for garbage in ([b""], [b"ack", b"", b"\xc1"], [b"boo", b"", b"\x80"]):
                ends.raw.send_multipart(garbage)
            ends.dealer.send(Ack(lease_id=1))
            got = [await ends.received.get() for _ in range(4)]
            assert [type(item).__name__ for item in got] == ["WireError"] * 3 + ["Packet"]

    within(10, exchange())


def test_a_message_is_read_although_a_send_used_up_its_edge(tmp_path: Path) -> None:
    async def exchange() -> None:
        with two_ends(tmp_path) as ends:
            ends.dealer.send(Ack(lease_id=1))
            asked = await ends.received.get()
            assert isinstance(asked, Packet)
            ends.router.send(Ack(lease_id=2), to=asked.sender)
            assert ends.raw.poll(5000)  # it is there, and its descriptor will say so no more
            ends.dealer.send(Ack(lease_id=3))
            answer = await ends.answers.get()
            assert isinstance(answer, Packet)
            assert answer.header == Ack(lease_id=2)

    within(10, exchange())


def test_many_messages_sent_at_once_all_arrive_in_order(tmp_path: Path) -> None:
    async def exchange() -> None:
        with two_ends(tmp_path) as ends:
            for number in range(3000):
                ends.dealer.send(Ack(lease_id=number))
            for number in range(3000):
                packet = await ends.received.get()
                assert isinstance(packet, Packet)
                assert packet.header == Ack(lease_id=number)
                # Answers in between use up the descriptor's edges.
                ends.router.send(Heartbeat(), to=packet.sender)
            for _ in range(3000):
                await ends.answers.get()

    within(20, exchange())


def test_a_handler_that_raises_loses_only_its_own_message(tmp_path: Path) -> None:
    async def exchange() -> None:
        failures: asyncio.Queue[BaseException] = asyncio.Queue()
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: failures.put_nowait(context["exception"])
        )
        arrived: asyncio.Queue[Header] = asyncio.Queue()

        def handle(packet: Packet) -> None:
            if packet.header == Ack(lease_id=0):
                raise KeyError("a bug in a handler")
            arrived.put_nowait(packet.header)

        with zmq.Context() as context, context.socket(zmq.PAIR) as sender:
            receiver = context.socket(zmq.PAIR)
            receiver.bind(f"ipc://{tmp_path}/pair")
            sender.connect(f"ipc://{tmp_path}/pair")
            for number in range(3):
                sender.send_multipart(pack(Ack(lease_id=number)))
            receiver.poll()  # all three wait before the channel looks
            channel = Channel(receiver, handle, ignore)
            assert [await arrived.get() for _ in range(2)] == [Ack(lease_id=1), Ack(lease_id=2)]
            assert isinstance(await failures.get(), KeyError)
            channel.close()

    within(10, exchange())


def test_a_peer_that_does_not_read_is_an_error_not_a_wait(tmp_path: Path) -> None:
    async def exchange() -> None:
        with zmq.Context() as context:
            socket = open_socket(context, zmq.DEALER)
            socket.setsockopt(zmq.SNDHWM, 3)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"ipc://{tmp_path}/nobody")
            channel = Channel(socket, ignore, ignore)
            for _ in range(3):
                channel.send(Ack(lease_id=1))
            with pytest.raises(WireError, match="'ack' message could not be sent: nobody reads it"):
                channel.send(Ack(lease_id=1))
            channel.close()

    within(10, exchange())


@pytest.mark.parametrize(
    "address",
    [
        "ipc:///tmp/x",
        "inproc://x",
        "tcp://127.0.0.1:5",
        "tcp://localhost:*",
        "tcp://[::1]:5",
        "tcp://127.9.9.9:1",
    ],
)
def test_addresses_of_this_machine_may_be_bound(address: str) -> None:
    refuse_public_bind(address)


@pytest.mark.parametrize(
    "address",
    ["tcp://*:5", "tcp://0.0.0.0:5", "tcp://[::]:5", "tcp://10.0.0.1:5", "tcp://eth0:5", "tcp://localhost.example.com:5",
     "tcp://:5", "pgm://127.0.0.1:5", "udp://127.0.0.1:5", "127.0.0.1:5", ""],
)  # fmt: skip
def test_addresses_that_others_reach_may_not_be_bound_without_keys(address: str) -> None:
    scheme_is_known = address.startswith("tcp://")
    message = "without keys only ipc:// and loopback" if scheme_is_known else "neither ipc://PATH nor tcp://"
    with pytest.raises(ConfigError, match=message):
        refuse_public_bind(address)


@pytest.mark.parametrize("address", ["tcp://*:5", "tcp://[::]:5", "tcp://10.0.0.1:5", "tcp://eth0:5"])
def test_with_keys_they_may(address: str) -> None:
    refuse_public_bind(address, keyed=True)
