"""A socket that is bound: who comes in, who is turned away, and how many of each.

Without keys it takes whoever reaches it, so it is bound to addresses of this machine alone. With keys (`agentgym.keys`)
a connection is encrypted, and its key must be on the list, which is read again for each connection: a machine can be
added to a run or shut out of it while it goes on.

ZeroMQ itself closes a connection that does not finish its handshake in time, that falls silent (`wire.open_socket`),
or that sends a frame of more than `wire.MAX_FRAME_BYTES`; the door counts what it says about that. When too many are
open, new ones are refused, and those that are there stay.
"""

import contextlib
import logging
import resource
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

        Raises:
            ConfigError: an address cannot be bound, or can be reached from other machines and there are no keys.
        """
        for address in addresses:
            refuse_public_bind(address, keyed=keys is not None)
        options = keys.server_options() if keys is not None else {}
        self.counts: Counter[str] = Counter(dict.fromkeys([*_EVENTS.values(), *REFUSALS], 0))
        """accepted, connected (after the handshake), handshake_failed, key_refused, no_room, disconnected,
        accept_failed."""
        self._most = connections
        # Those that have not finished their handshake count as well, and the process has other files to open.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._context = open_context()
        socket = open_socket(self._context, zmq.ROUTER, queue=queue, silence=silence)
        socket.monitor("inproc://monitor", sum(_EVENTS))
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's own thread would wait for room there
        monitor.connect("inproc://monitor")
        self._keys = keys
        for option, value in options.items():
            socket.setsockopt(option, value)
        # Nobody is let in without the gate; it also keeps out peers of ZeroMQ 2, which know neither keys nor pings.
        socket.zap_domain, socket.zap_enforce_domain = b"agentgym", True
        gate = self._context.socket(zmq.REP)
        gate.bind("inproc://zeromq.zap.01")
        threading.Thread(target=self._keep, args=(gate, monitor), name="gate", daemon=True).start()
        super().__init__(socket, on_packet, on_garbage)
        self.addresses: list[str] = []
        """Where it can be reached; a tcp port that was left open is named."""
        for address in addresses:
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                self.close()
                raise ConfigError(f"cannot bind {address}: {error.strerror}") from error
            self.addresses.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def open_connections(self) -> int:
        """Connections that are open now."""
        return self.counts["accepted"] - self.counts["disconnected"]

    def close(self) -> None:
        """Close the socket after what was sent is on its way, or its peers have not read it for half a second."""
        if not self.closed:
            super().close()
            self._context.term()

    def _keep(self, gate: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        """Count, and answer who may come in: on a thread, since a handshake must not wait for a busy loop."""
        poller = zmq.Poller()
        poller.register(gate, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        with gate, monitor, contextlib.suppress(zmq.ContextTerminated):
            while True:
                poller.poll()
                while monitor.poll(0):
                    self.counts[_EVENTS[recv_monitor_message(monitor)["event"]]] += 1
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
