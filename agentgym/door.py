"""A socket that is bound: who comes in, who is turned away, and how many of each.

Without keys it takes whoever reaches it, so it is bound to addresses of this machine alone. With keys (`agentgym.keys`)
a connection is encrypted, and its key must be on the list, which is read again for each connection: a machine can be
added to a run or shut out of it while it goes on.

ZeroMQ itself closes a connection that does not finish its handshake in time, that falls silent (`wire.open_socket`),
or that sends a frame of more than `wire.MAX_FRAME_BYTES`; the door counts what it says about that. When too many are
open, new ones are refused, and those that are there stay.

Of how many frames a message is, and how large it is with all of them, ZeroMQ does not look at, and it keeps them until
the last one has come. So the door asks the kernel how much each TCP connection has received since a message of it was
complete, and hangs up where that is more than `MAX_MESSAGE_BYTES`. Peers at ipc:// are processes of the same user.
"""

import contextlib
import logging
import os
import resource
import socket as sockets
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from agentgym.errors import ConfigError, WireError
from agentgym.keys import Keys
from agentgym.log import worth_saying
from agentgym.wire import Channel, Packet, open_context, open_socket, refuse_public_bind

MAX_CONNECTIONS = 4096
"""A worker has one."""
MAX_MESSAGE_BYTES = 2 << 30
"""Of all frames of a message."""
LOOK_SECONDS = 1.0
"""Between two looks at what connections have received."""
REFUSALS = {
    "key_refused": "its key is not on the list",
    "no_room": "too many connections are open",
}
_EVENTS: dict[int, str] = {
    zmq.EVENT_ACCEPTED: "accepted",
    zmq.EVENT_ACCEPT_FAILED: "accept_failed",
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "connected",
    zmq.EVENT_DISCONNECTED: "disconnected",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake_failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshake_failed",
}

_logger = logging.getLogger(__name__)


class Door(Channel):
    """A ROUTER socket as a channel, and what is known of the connections to it."""

    def __init__(
        self,
        addresses: Sequence[str],
        on_packet: Callable[[Packet], None],
        on_garbage: Callable[[bytes, WireError], None],
        *,
        keys: Keys | None = None,
        queue: int = 10_000,
        silence: float = 20.0,
        connections: int = MAX_CONNECTIONS,
        largest: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Bind the addresses, from a running event loop.

        Args:
            addresses: ipc:// or tcp://; a tcp port * is a free one.
            on_packet: as in `Channel`.
            on_garbage: as in `Channel`.
            keys: of the run, if it has some.
            queue: as in `open_socket`.
            silence: as in `open_socket`.
            connections: how many may be open at once.
            largest: bytes of a message, a little more or less.

        Raises:
            ConfigError: an address cannot be bound, or can be reached from other machines and there are no keys.
        """
        for address in addresses:
            refuse_public_bind(address, keyed=keys is not None)
        options = keys.server_options() if keys is not None else {}
        self.counts: Counter[str] = Counter(dict.fromkeys([*_EVENTS.values(), *REFUSALS, "endless"], 0))
        """accepted, connected (after the handshake), handshake_failed, key_refused, no_room, disconnected,
        accept_failed, endless (cut off in a message that was too large)."""
        self._most = connections
        self._largest = largest
        self._received: dict[int, int] = {}
        """By descriptor of an open connection: the bytes it had received when a message of it was complete."""
        self._delivered: set[int] = set()
        """The connections whose messages have come since the last look."""
        # Those that have not finished their handshake count as well, and the process has other files to open.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._context = open_context()
        socket = open_socket(self._context, zmq.ROUTER, queue=queue, silence=silence)
        self._keys = keys
        for option, value in options.items():
            socket.setsockopt(option, value)
        self._open_gate(socket)
        super().__init__(socket, on_packet, on_garbage)
        self._next_look = self._loop.call_later(LOOK_SECONDS, self._look)
        self.addresses: list[str] = []
        """Where it can be reached; a tcp port that was left open is named."""
        for address in addresses:
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                self.close()
                raise ConfigError(f"cannot bind {address}: {error.strerror}") from error
            self.addresses.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def _open_gate(self, socket: zmq.Socket[bytes]) -> None:
        socket.monitor("inproc://monitor", sum(_EVENTS))
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's own thread would wait for room there
        monitor.connect("inproc://monitor")
        # Nobody is let in without the gate; it also keeps out peers of ZeroMQ 2, which know neither keys nor pings.
        socket.zap_domain, socket.zap_enforce_domain = b"agentgym", True
        gate = self._context.socket(zmq.REP)
        gate.bind("inproc://zeromq.zap.01")
        threading.Thread(target=self._keep, args=(gate, monitor), name="gate", daemon=True).start()

    @property
    def open_connections(self) -> int:
        """Connections that are open now."""
        return self.counts["accepted"] - self.counts["disconnected"]

    def close(self) -> None:
        """Close the socket after what was sent is on its way, or its peers have not read it for half a second."""
        if not self.closed:
            self._next_look.cancel()
            super().close()
            self._context.term()

    def _sender(self) -> bytes:
        frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        self._delivered.add(int(frame.get(zmq.SRCFD)))
        return frame.bytes

    def _look(self) -> None:
        """Hang up on those who send a message that does not end."""
        self._next_look = self._loop.call_later(LOOK_SECONDS, self._look)
        if self._socket.poll(0):
            self._schedule_drain()  # whose messages wait is not known
            return
        delivered, self._delivered = self._delivered, set()
        for descriptor, before in list(self._received.items()):
            # One that is closed meanwhile has nothing to say, nor has one at ipc://.
            with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(descriptor)) as connection:
                info = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, 136)
                (received,) = struct.unpack_from("<Q", info, 128)  # tcpi_bytes_received, see linux/tcp.h
                if descriptor in delivered:
                    self._received[descriptor] = received
                elif received - before > self._largest:
                    self.counts["endless"] += 1
                    connection.shutdown(sockets.SHUT_RDWR)

    def _keep(self, gate: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        """Count, and answer who may come in: on a thread, since a handshake must not wait for a busy loop."""
        poller = zmq.Poller()
        poller.register(gate, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        with gate, monitor, contextlib.suppress(zmq.ContextTerminated):
            while True:
                poller.poll()
                while monitor.poll(0):
                    message = recv_monitor_message(monitor)
                    event, descriptor = _EVENTS[message["event"]], int(message["value"])
                    self.counts[event] += 1
                    if event == "accepted":
                        self._received[descriptor] = 0
                    elif event == "disconnected":
                        self._received.pop(descriptor, None)
                if gate.poll(0):
                    version, request, _domain, address, _identity, _mechanism, *key = gate.recv_multipart()
                    status, why = self._judge(*key)
                    if why in REFUSALS:
                        self.counts[why] += 1
                        if worth_saying(count := self.counts[why]):
                            where = address.decode(errors="replace")
                            _logger.warning("refused connection %d from %s: %s", count, where, REFUSALS[why])
                    gate.send_multipart([version, request, status, b"", why.encode(), b""])

    def _judge(self, key: bytes = b"") -> tuple[bytes, str]:
        """Return the status of rfc.zeromq.org/spec/27, and whose key it is or why it is refused."""
        if self.open_connections > self._most:
            return b"300", "no_room"
        if self._keys is None:
            return b"200", ""
        name = self._keys.name_of(z85.encode(key))
        return (b"400", "key_refused") if name is None else (b"200", name)
