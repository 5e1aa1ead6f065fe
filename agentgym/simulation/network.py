"""Messages between the coordinator and simulated processes: delivered after a latency, in order for each peer."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Protocol
from zlib import crc32

from numpy.random import Generator

from agentgym.config import Config
from agentgym.coordinator.surroundings import Line, OnGarbage, OnPacket
from agentgym.protocol import Header, Heartbeat
from agentgym.simulation.quantity import Draw
from agentgym.wire import Arrays, Packet

TICK = 1e-9
"""Seconds between two messages of a peer at least: timers of the same time have no order."""


class Inbox(Protocol):
    """Takes in what the coordinator sends to a process."""

    def __call__(self, header: Header, arrays: Arrays) -> None:
        """Handle a message."""
        ...


class Network:
    """The wire of a simulated cluster."""

    def __init__(self, latency: Draw, rng: Generator) -> None:
        """Connect nobody yet."""
        self._latency = latency
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._inboxes: dict[bytes, Inbox] = {}
        self._line: _Line | None = None
        self._last: dict[bytes, float] = {}
        """When the last message from or to a peer arrives."""
        self.watchers: list[Callable[[float, bytes, Header], None]] = []
        """Told of every message that is delivered: when, whose peer's, and which."""
        self.trace = 0
        """A checksum over all that was delivered: when, from or to whom, which kind."""

    def bind(self, _config: Config, _address: str, on_packet: OnPacket, _on_garbage: OnGarbage) -> Line:
        """Open the coordinator's end; see `agentgym.coordinator.surroundings`."""
        self._line = _Line(self, on_packet)
        return self._line

    def connect(self, identity: bytes, inbox: Inbox) -> None:
        """Connect a process."""
        self._inboxes[identity] = inbox

    def hang_up(self, identity: bytes) -> None:
        """Deliver nothing to a process any more; what it has sent arrives."""
        self._inboxes.pop(identity, None)

    def to_coordinator(self, identity: bytes, header: Header, arrays: Arrays | None = None) -> None:
        """Send a message of a process to the coordinator."""
        present = {name: array for name, array in (arrays or {}).items() if array is not None}
        packet = Packet(header.kind, b"", header, present, identity)
        self._send(b"<" + identity, identity, header, lambda: self._arrived(packet))

    def to_peer(self, identity: bytes, header: Header, arrays: Arrays | None) -> None:
        """Send a message of the coordinator to a process."""
        if not isinstance(header, Heartbeat):  # simulated processes know that it lives
            self._send(
                b">" + identity, identity, header, lambda: self._deliver(identity, header, arrays or {})
            )

    def _send(self, way: bytes, identity: bytes, header: Header, deliver: Callable[[], None]) -> None:
        now = self._loop.time()
        due = max(now + self._latency(self._rng), self._last.get(way, 0.0) + TICK)
        self._last[way] = due

        def arrive() -> None:
            self.trace = crc32(b"%.9f%b%b" % (due, way, header.kind.encode()), self.trace)
            for watcher in self.watchers:
                watcher(due, identity, header)
            deliver()

        self._loop.call_at(due, arrive)

    def _arrived(self, packet: Packet) -> None:
        if self._line is not None and not self._line.closed:
            self._line.on_packet(packet)

    def _deliver(self, identity: bytes, header: Header, arrays: Arrays) -> None:
        inbox = self._inboxes.get(identity)
        if inbox is not None:
            inbox(header, arrays)


class _Line:
    """The coordinator's end."""

    def __init__(self, network: Network, on_packet: OnPacket) -> None:
        self._network = network
        self.on_packet = on_packet
        self.closed = False
        self.counts: Counter[str] = Counter()

    def send(self, header: Header, arrays: Arrays | None = None, *, to: bytes) -> None:
        self._network.to_peer(to, header, arrays)

    def close(self) -> None:
        self.closed = True
