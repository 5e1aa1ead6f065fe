"""How many episodes are in play at once: as many as the policy servers can use.

Fewer leave a server idle. More do harm: their requests wait for a seat in vLLM's batch, so that answers are late and
their tokens old, and when the keys and values of the running requests fill the cache, vLLM throws those of some away
and computes them again. The servers say in their heartbeats how full they are, and the number of episodes is found from
that by additive increase and multiplicative decrease, as in TCP.

It is held where episodes are leased. An episode that waits there has no clock running, no environment and no token
that grows old, and a worker need not know of the others. Workers spread their requests evenly over the servers of a
policy, so that the fullest of them decides.
"""

from collections.abc import Collection

from agentgym.config import Config
from agentgym.coordinator.peers import ServerPeer

FULL = 0.95
"""Share of the cache in use above which there are fewer episodes."""
ROOMY = 0.85
"""Share of the cache in use below which there may be more."""
CROWDED = 1.25
"""Requests per seat above which there are fewer episodes: a fifth of the requests waits for a seat."""
GROW, SHRINK = 1 / 16, 0.9


class Window:
    """The episodes in play for each server of one policy."""

    def __init__(self, seats: int) -> None:
        """Begin with an episode for each of the `seats` of a server: the requests in one engine step."""
        self._seats = seats
        self.size = float(seats)

    def adapt(self, *, usage: float, requests: float, playing: float, wanted: bool) -> None:
        """Grow or shrink by what was measured.

        Args:
            usage: share of the key-value cache in use, at the fullest server.
            requests: in the hands of the fullest server.
            playing: episodes in play, per server.
            wanted: whether more episodes wait to be played.
        """
        if playing > self.size:
            return  # it has shrunk, and the episodes beyond it are still in play
        if usage > FULL or requests > CROWDED * self._seats:
            self.size = max(1.0, SHRINK * playing)
        elif wanted and usage < ROOMY and requests < self._seats and playing > self.size - 1:
            self.size += max(1.0, GROW * self.size)


class Concurrency:
    """The most episodes in play, over all policies that are served."""

    def __init__(self, config: Config) -> None:
        """Begin with what the servers can run in one engine step, or stay at `rollout.max_playing`."""
        self._fixed = config.rollout.max_playing
        self._windows = {policy: Window(config.server.max_num_seqs) for policy in config.served}
        self.limit = self._fixed or config.server.max_num_seqs * config.server.count

    def adapt(self, servers: Collection[ServerPeer], *, playing: int, wanted: bool) -> None:
        """Go by what the connected servers have said of themselves since the last time."""
        if self._fixed:
            return
        limits = []
        for policy, window in self._windows.items():
            mine = [server for server in servers if server.policy == policy]
            if mine and all(server.stats for server in mine):
                window.adapt(
                    usage=max(server.stats.get("kv_usage", 0.0) for server in mine),
                    requests=max(server.stats.get("running", 0.0) for server in mine),
                    playing=playing / len(mine),
                    wanted=wanted,
                )
                for server in mine:
                    server.stats = {}  # what is known is acted on once
            if mine:  # else nobody is asked, or everybody waits until one is back
                limits.append(int(window.size * len(mine)))
        self.limit = max(1, min(limits, default=self.limit))
