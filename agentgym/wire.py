"""How messages cross a socket.

A message is frames: [kind][request id][msgpack header][array 0][array 1]... Arrays travel as frames of their own,
the header names their dtypes and shapes. There is no pickle: a header is validated into the record that
`agentgym.protocol` declares for its kind, and anything else is a WireError that says what was wrong.

`Channel` drains a plain pyzmq socket from an event-loop reader on its file descriptor; `zmq.asyncio` costs twice
the CPU for a round trip. All socket options are set in `open_socket`, each with its reason. Sockets that are bound are
doors (`agentgym.door`), those that connect are of an `open_context` with the keys of the run, if it has some.
"""

import asyncio
import ipaddress
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgpack
import numpy as np
import zmq
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from agentgym.errors import ConfigError, WireError
from agentgym.keys import Keys
from agentgym.protocol import KINDS, Header

PROTOCOL_VERSION = 1
"""In the header of `hello`; a peer with another number is refused."""

MAX_HEADER_BYTES = 16 << 20
MAX_FRAME_BYTES = 1 << 30
"""ZeroMQ drops the connection of a peer that sends a larger frame."""
HEAD_FRAMES = 3
"""Kind, request id and header; behind them come the arrays."""
MAX_ARRAYS = 16
MAX_DIMENSIONS = 4
_Dtype = Literal["bool", "uint8", "uint16", "int32", "int64", "float32"]
DTYPES: frozenset[str] = frozenset(get_args(_Dtype))
_DTYPES = {name: np.dtype(name) for name in DTYPES}
# Native byte order alone; `dtype.name` is slow.
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_Name = Annotated[str, Field(strict=True)]
_Size = Annotated[int, Field(strict=True, ge=0, le=MAX_FRAME_BYTES)]
_Shape = Annotated[list[_Size], Field(strict=True, max_length=MAX_DIMENSIONS)]
_DESCRIBED = TypeAdapter(
    Annotated[list[tuple[_Name, _Dtype, _Shape]], Field(strict=True, max_length=MAX_ARRAYS)]
)
"""What a header says of the arrays behind it."""

H = TypeVar("H", bound=Header)
Arrays = Mapping[str, NDArray[Any] | None]


@dataclass(frozen=True, slots=True)
class Packet:
    """One decoded message."""

    kind: str
    request_id: bytes
    header: Header
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    """By name; read-only views of the received frames. An array sent as None is absent."""
    sender: bytes = b""
    """The peer's ZeroMQ identity on a ROUTER socket."""
    frames: Sequence[bytes | memoryview] = field(default=(), repr=False, compare=False)
    """As they were received."""

    def expect(self, record: type[H]) -> H:
        """Return the header as the given record, or raise WireError."""
        if not isinstance(self.header, record):
            raise WireError(f"got a {self.kind!r} message where {record.kind!r} was expected")
        return self.header


def pack(header: Header, arrays: Arrays | None = None, *, request_id: bytes = b"") -> list[Any]:
    """Return the frames of a message.

    Raises:
        WireError: an array is of a dtype or a number of dimensions that no receiver takes.
    """
    fields = dict(header.__dict__)  # headers are flat: pydantic need not walk through them
    buffers = []
    if arrays:
        described = []
        for name, array in arrays.items():
            if array is not None:
                dtype = _DTYPE_NAMES.get(array.dtype)
                if dtype is None or array.ndim > MAX_DIMENSIONS:
                    raise WireError(
                        f"array {name!r} of a {header.kind!r} message is {array.dtype}{list(array.shape)}; "
                        f"send {', '.join(sorted(DTYPES))} of at most {MAX_DIMENSIONS} dimensions"
                    )
                contiguous = np.ascontiguousarray(array)
                described.append((name, dtype, contiguous.shape))
                buffers.append(contiguous.data if contiguous.size else b"")
        fields["_arrays"] = described
    # Half a surrogate pair, as in a file name inside an exception's text, is no reason to lose the message.
    return [header.kind.encode(), request_id, msgpack.packb(fields, unicode_errors="replace"), *buffers]


def unpack(frames: Sequence[bytes | memoryview], *, sender: bytes = b"") -> Packet:
    """Return the message in the frames (without the ROUTER's identity frame).

    Raises:
        WireError: too few frames, an unknown kind, a header that is not what its kind declares, or array
            frames that do not match the header.
    """
    if len(frames) < HEAD_FRAMES:
        raise WireError(f"a message has at least 3 frames (kind, request id, header); got {len(frames)}")
    kind = bytes(frames[0][:64]).decode("ascii", "replace")
    record = KINDS.get(kind)
    if record is None:
        raise WireError(f"unknown message kind {kind!r}; known: {', '.join(sorted(KINDS))}")
    if len(frames[2]) > MAX_HEADER_BYTES:
        raise WireError(
            f"the header of a {kind!r} message has {len(frames[2])} bytes, over {MAX_HEADER_BYTES}"
        )
    try:
        fields = msgpack.unpackb(frames[2], strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"the header of a {kind!r} message is not msgpack: {error}") from error
    if not isinstance(fields, dict):
        raise WireError(f"the header of a {kind!r} message is a {type(fields).__name__}, not a map")
    arrays = _arrays(kind, fields.pop("_arrays", []), frames[HEAD_FRAMES:])
    try:
        header = record.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise WireError(
            f"the header of a {kind!r} message is wrong at {place!r:.100}: {first['msg']}"
        ) from error
    return Packet(kind, bytes(frames[1]), header, arrays, sender, frames)


def _arrays(kind: str, described: Any, buffers: Sequence[bytes | memoryview]) -> dict[str, NDArray[Any]]:
    try:
        entries = _DESCRIBED.validate_python(described)
    except ValidationError as error:
        raise WireError(f"a {kind!r} message describes its arrays as {described!r:.80}") from error
    if len(entries) != len(buffers):
        raise WireError(
            f"a {kind!r} message has {len(buffers)} array frames, its header describes {described!r:.80}"
        )
    arrays = {}
    for (name, dtype, shape), buffer in zip(entries, buffers, strict=True):
        known = _DTYPES[dtype]
        if math.prod(shape) * known.itemsize != len(buffer):
            raise WireError(
                f"array {name!r} of a {kind!r} message: {dtype}{shape} does not have {len(buffer)} bytes"
            )
        try:
            arrays[name] = np.frombuffer(buffer, known).reshape(shape)
        except ValueError as error:  # no bytes, and sizes whose product is beyond any memory
            raise WireError(f"array {name!r} of a {kind!r} message: {dtype}{shape}: {error}") from error
    return arrays


Context = zmq.Context[zmq.Socket[bytes]]
_MORE = zmq.NOBLOCK | zmq.SNDMORE


def open_context(keys: Keys | None = None) -> Context:
    """Return a context; with `keys` its sockets connect only to the server of these keys, and encrypted."""
    context: Context = zmq.Context()
    for option, value in keys.client_options().items() if keys is not None else ():
        context.setsockopt(option, value)  # what every socket of the context begins with
    return context


def open_socket(
    context: Context, socket_type: int, *, queue: int = 10_000, silence: float = 20.0
) -> zmq.Socket[bytes]:
    """Return a socket with the options that every socket of agentgym has.

    Args:
        context: of `open_context`.
        socket_type: ROUTER or DEALER.
        queue: messages that may wait to be sent to one peer. More than its leases and requests can ever be: what is
            beyond is an error on a DEALER socket, and lost on a ROUTER.
        silence: seconds after which a peer that says nothing, not even to ZeroMQ's own pings, is disconnected; one
            that has not finished its handshake after half of them is, too.
    """
    socket = context.socket(socket_type)
    socket.setsockopt(zmq.SNDHWM, queue)
    # What is not read yet waits at its sender, where leases and slots bound it; only a little of it comes here.
    socket.setsockopt(zmq.RCVHWM, 1_000)
    # A closing process may lose what its peer no longer reads; it must never hang in close().
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    # TCP peers that vanish without a FIN (power, cable), and those that stop in the middle of a message.
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(silence * 250))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(silence * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(silence * 500))
    return socket


def refuse_public_bind(address: str, *, keyed: bool = False) -> None:
    """Raise ConfigError for an address that other machines could reach, unless there are keys for its socket."""
    scheme, _, rest = address.partition("://")
    if scheme in ("ipc", "inproc"):
        return
    host = rest.rpartition(":")[0].strip("[]")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if scheme != "tcp" or not (loopback or keyed):
        raise ConfigError(
            f"cannot bind {address!r}: without keys only ipc:// and loopback tcp:// addresses can be bound; "
            "`agentgym keys DIR` makes keys, which coordinator.keys or --keys names"
            if scheme == "tcp"
            else f"cannot bind {address!r}: it is neither ipc://PATH nor tcp://HOST:PORT"
        )


class Channel:
    """A socket on the event loop: received messages go to a handler, `send` never blocks.

    `on_garbage` gets (sender, WireError) for what could not be decoded; the channel itself goes on.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_packet: Callable[[Packet], None],
        on_garbage: Callable[[bytes, WireError], None],
    ) -> None:
        """Start draining the socket from the running event loop."""
        self._socket = socket
        self._on_packet = on_packet
        self._on_garbage = on_garbage
        self._routed = socket.type == zmq.ROUTER
        self._loop = asyncio.get_running_loop()
        self._drain_due = False
        self._loop.add_reader(socket.FD, self._drain)
        self._schedule_drain()

    def send(
        self, header: Header, arrays: Arrays | None = None, *, to: bytes = b"", request_id: bytes = b""
    ) -> None:
        """Send a message; `to` is the peer's identity on a ROUTER socket.

        Raises:
            WireError: the peer has not read for so long that the socket's high-water mark is reached, or has refused
                the connection.
        """
        frames = pack(header, arrays, request_id=request_id)
        *first, last = [to, *frames] if self._routed else frames
        try:
            for frame in first:
                self._socket.send(frame, _MORE, copy=False)
            self._socket.send(last, zmq.NOBLOCK, copy=False)
        except zmq.Again as error:
            raise WireError(f"a {header.kind!r} message could not be sent: nobody reads it") from error
        # The descriptor is edge-triggered: a send may consume the edge of a message that arrived meanwhile.
        self._schedule_drain()

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._socket.closed

    def close(self) -> None:
        """Stop draining and close the socket."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._socket.close()

    def _schedule_drain(self) -> None:
        if not self._drain_due:
            self._drain_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_due = False
        empty = False
        try:
            empty = self._drain_some()
        finally:
            if not empty:  # a handler that raises must not take the edge of the messages behind it along
                self._schedule_drain()

    def _sender(self) -> bytes:
        """Receive the identity of the peer whose message comes next."""
        return self._socket.recv(zmq.NOBLOCK)

    def _frames(self) -> list[bytes | memoryview]:
        """Receive a message; its arrays stay where ZeroMQ has put them."""
        frames: list[bytes | memoryview] = []
        more = True
        while more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            more = frame.more
            frames.append(frame.bytes if len(frames) < HEAD_FRAMES else frame.buffer.toreadonly())
        return frames

    def _drain_some(self) -> bool:
        """Handle what has arrived, but let other callbacks run now and then; return whether nothing is left."""
        for _ in range(256):
            if self._socket.closed:
                return True
            try:
                sender = self._sender() if self._routed else b""
                frames = self._frames()
            except zmq.Again:
                return True
            try:
                packet = unpack(frames, sender=sender)
            except WireError as error:
                self._on_garbage(sender, error)
                continue
            self._on_packet(packet)
        return False
