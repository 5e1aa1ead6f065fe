"""The workers and policy servers that are connected now, and which weights the servers have.

A weight version is published when every connected server has loaded it, and at least one is connected. A server
that starts late or comes back is brought to the newest offered version before workers hear of it.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class WorkerPeer:
    """A worker that said hello."""

    name: str
    identity: bytes
    heard: float
    credits: int = 0
    """Episodes that it can take."""


@dataclass(slots=True)
class ServerPeer:
    """A policy server that said hello."""

    name: str
    identity: bytes
    heard: float
    address: str
    max_model_len: int
    version: int
    """The weights it samples with."""
    loading: int | None = None
    """The version that it was asked to load."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Weights that the trainer offers."""

    version: int
    path: str
    """A safetensors file; empty for version 0, the model folder's own."""


class Peers:
    """Who is connected, by ZeroMQ identity."""

    def __init__(self) -> None:
        """Nobody is, and no weights are offered."""
        self.workers: dict[bytes, WorkerPeer] = {}
        self.servers: dict[bytes, ServerPeer] = {}
        self.trainer: bytes | None = None
        self.offer: Offer | None = None

    @property
    def published(self) -> int | None:
        """The version that every connected server samples with; None if there is none."""
        if self.offer is None or not self.servers:
            return None
        current = all(server.version == self.offer.version for server in self.servers.values())
        return self.offer.version if current else None

    def to_load(self) -> list[ServerPeer]:
        """Return the servers that must be asked to load the offered version, and note that they were."""
        if self.offer is None:
            return []
        behind = [
            s
            for s in self.servers.values()
            if self.offer.version not in (s.version, s.loading) and self.offer.path
        ]
        for server in behind:
            server.loading = self.offer.version
        return behind

    def announced(self, ever_published: int | None) -> list[ServerPeer]:
        """Return the servers that workers may ask: those with the published or the offered version."""
        fresh = {ever_published, self.offer.version if self.offer else None}
        return [server for server in self.servers.values() if server.version in fresh]

    def freest_worker(self) -> WorkerPeer | None:
        """Return the worker with the most credits, or None if nobody has one."""
        best = max(self.workers.values(), key=lambda worker: worker.credits, default=None)
        return best if best is not None and best.credits > 0 else None

    def heard(self, identity: bytes, now: float) -> str | None:
        """Note a sign of life and return the peer's name; None if it never said hello."""
        if identity == self.trainer:
            return "trainer"
        peer = self.workers.get(identity) or self.servers.get(identity)
        if peer is None:
            return None
        peer.heard = now
        return peer.name

    def silent(self, before: float) -> list[str]:
        """Return the names of the workers and servers not heard of since `before`."""
        peers: list[WorkerPeer | ServerPeer] = [*self.workers.values(), *self.servers.values()]
        return [peer.name for peer in peers if peer.heard < before]

    def forget(self, name: str) -> list[bytes]:
        """Remove a peer by name and return its identities; empty if it never said hello."""
        gone = [i for table in (self.workers, self.servers) for i, peer in table.items() if peer.name == name]
        for identity in gone:
            self.workers.pop(identity, None)
            self.servers.pop(identity, None)
        return gone
