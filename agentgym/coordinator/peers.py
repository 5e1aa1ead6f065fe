"""The workers and policy servers that are connected now, and which weights the servers have.

Each policy that is served has weights on offer: of the trainer's newest version, of a pool's snapshot of this round, or
the model folder's own. A version is published when every connected server of the policy has loaded it, and at least
one is connected. A server that starts late or comes back is brought to the version on offer before workers hear of it.
"""

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True)
class WorkerPeer:
    """A worker that said hello."""

    name: str
    identity: bytes
    heard: float
    credits: int = 0
    """Episodes that it can take."""
    slots: int = 0
    """Episodes that it may have at once; 0 when it leaves."""

    def credit(self, credits: int, held: int) -> bool:
        """Let it have more leases: with the `held` ones no more than its slots. Return whether it asked for no more."""
        room = self.slots - held - self.credits
        self.credits += min(credits, max(0, room))
        return credits <= room or self.slots == 0

    def leave(self) -> None:
        """Let it have no more leases."""
        self.slots = self.credits = 0


@dataclass(slots=True)
class ServerPeer:
    """A policy server that said hello."""

    name: str
    policy: str
    """What it answers for."""
    identity: bytes
    heard: float
    address: str
    max_model_len: int
    version: int
    """The weights it samples with."""
    loading: int | None = None
    """The version that it was asked to load at last; it loads in the order in which it is asked."""

    stats: dict[str, float] = field(default_factory=dict)
    """Of its last heartbeat; empty when they were taken into account."""

    def has_loaded(self, version: int) -> None:
        """Note what it says; it may have been asked for a newer version meanwhile."""
        self.version = version
        if version == self.loading:
            self.loading = None


@dataclass(frozen=True, slots=True)
class TrainerPeer:
    """A trainer that said hello."""

    name: str
    policy: str
    """What it trains."""
    identity: bytes


@dataclass(frozen=True, slots=True)
class Offer:
    """Weights that the servers of a policy are to have."""

    version: int
    path: str
    """A safetensors file or a model folder; empty where a server starts with them, as with version 0."""


class Peers:
    """Who is connected, by ZeroMQ identity."""

    def __init__(self) -> None:
        """Nobody is, and no weights are offered."""
        self.workers: dict[bytes, WorkerPeer] = {}
        self.servers: dict[bytes, ServerPeer] = {}
        self.trainers: dict[str, TrainerPeer] = {}
        """By policy."""
        self.offers: dict[str, Offer] = {}
        """By policy."""

    def published(self, policy: str) -> int | None:
        """Return the version that every connected server of a policy samples with; None if there is none."""
        offer, versions = self.offers.get(policy), {server.version for server in self._serving(policy)}
        return offer.version if offer is not None and versions == {offer.version} else None

    def to_load(self) -> list[tuple[ServerPeer, Offer]]:
        """Return the servers that must be asked to load what is on offer, and note that they were."""
        behind = [
            (server, offer)
            for policy, offer in self.offers.items()
            for server in self._serving(policy)
            if offer.version not in (server.version, server.loading) and offer.path
        ]
        for server, offer in behind:
            server.loading = offer.version
        return behind

    def announced(self, policy: str, ever_published: int | None) -> list[ServerPeer]:
        """Return the servers of a policy that workers may ask: those with the published or the offered version."""
        offer = self.offers.get(policy)
        fresh = {ever_published, offer.version if offer else None}
        return [server for server in self._serving(policy) if server.version in fresh]

    def _serving(self, policy: str) -> list[ServerPeer]:
        return [server for server in self.servers.values() if server.policy == policy]

    @property
    def everyone(self) -> list[bytes]:
        """The identities of all peers."""
        return [*self.workers, *self.servers, *(trainer.identity for trainer in self.trainers.values())]

    def trainer(self, identity: bytes) -> TrainerPeer | None:
        """Return the trainer of this identity."""
        return next((one for one in self.trainers.values() if one.identity == identity), None)

    def free_name(self, name: str, identity: bytes, *, reserved: Collection[str]) -> str:
        """Return a name that no other worker has: two that were started by hand may both be called "worker"."""
        taken = name in reserved or any(worker.name == name for worker in self.workers.values())
        return f"{name}-{identity.hex()[-8:]}" if taken else name

    def freest_worker(self) -> WorkerPeer | None:
        """Return the worker with the most credits, or None if nobody has one."""
        best = max(self.workers.values(), key=lambda worker: worker.credits, default=None)
        return best if best is not None and best.credits > 0 else None

    def heard(self, identity: bytes, now: float) -> str | None:
        """Note a sign of life and return the peer's name; None if it never said hello."""
        peer = self.workers.get(identity) or self.servers.get(identity)
        if peer is None:
            trainer = self.trainer(identity)
            return None if trainer is None else trainer.name
        peer.heard = now
        return peer.name

    def note(self, identity: bytes, stats: dict[str, float]) -> None:
        """Keep the numbers of a policy server's heartbeat."""
        if identity in self.servers:
            self.servers[identity].stats = stats

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
