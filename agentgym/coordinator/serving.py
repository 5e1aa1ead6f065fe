"""Brings the weights on offer to the policy servers, and tells workers which servers they may ask for which policy."""

from collections.abc import Callable, Iterable

from agentgym.config import Config
from agentgym.coordinator.peers import Offer, Peers
from agentgym.protocol import Header, Hello, LoadWeights, Servers
from agentgym.wire import PROTOCOL_VERSION

Send = Callable[[Header, bytes], None]


class Serving:
    """The policies that are served, as the workers see them."""

    def __init__(self, config: Config, peers: Peers, send: Send) -> None:
        """Nothing but frozen models is on offer yet; `send` sends a message to a peer."""
        self._peers = peers
        self._send = send
        self._trained = config.policies_to_train
        self._addresses: dict[str, list[str]] = {policy: [] for policy in config.served}
        self._models = [policy for policy in config.served if config.policies[policy].kind == "model"]
        for policy in self._models:
            if policy not in config.policies_to_train:
                self.offer(policy, 0, "")  # what its servers start with
        self.published: dict[str, int] = {}
        """By policy: the version that its servers had at last."""

    def knows(self, policy: str) -> bool:
        """Whether the policy is served in this run."""
        return policy in self._addresses

    def refusal(self, hello: Hello) -> str:
        """Return why a process cannot take part in this run, or nothing."""
        if hello.protocol != PROTOCOL_VERSION:
            return f"{hello.name} speaks protocol {hello.protocol}, this run {PROTOCOL_VERSION}; install one version"
        if hello.role == "trainer" and hello.policy not in self._trained:
            return f"{hello.name} trains {hello.policy!r}; this run trains {', '.join(self._trained)}"
        if hello.role == "server" and not self.knows(hello.policy):
            return f"{hello.name} serves {hello.policy!r}; this run asks for {', '.join(self._addresses)}"
        return ""

    @property
    def models_are_there(self) -> bool:
        """Whether every model has a server that workers may ask; pools look after themselves."""
        return all(self._addresses[policy] for policy in self._models)

    def offer(self, policy: str, version: int, path: str) -> None:
        """Have the servers of a policy load weights, with the next `update`."""
        self._peers.offers[policy] = Offer(version, path)

    def update(self) -> None:
        """Ask servers that are behind to load, note what is published, tell workers whom to ask."""
        for server, offer in self._peers.to_load():
            self._send(LoadWeights(version=offer.version, path=offer.path), server.identity)
        before = dict(self._addresses)
        for policy in self._addresses:
            version = self._peers.published(policy)
            if version is not None:
                self.published[policy] = version
            announced = self._peers.announced(policy, self.published.get(policy))
            self._addresses[policy] = sorted(server.address for server in announced)
        if self._addresses != before:
            self.tell(self._peers.workers)

    def tell(self, workers: Iterable[bytes]) -> None:
        """Name the servers to some workers."""
        lengths = [server.max_model_len for server in self._peers.servers.values()]
        message = Servers(addresses=dict(self._addresses), max_model_len=min(lengths, default=0))
        for identity in workers:
            self._send(message, identity)
