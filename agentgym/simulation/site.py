"""What the simulated processes of a cluster share, and the numbers that are summed up over them."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any
from zlib import crc32

import numpy as np
from numpy.random import Generator

from agentgym.config import Config
from agentgym.messages import AgentId
from agentgym.simulation.engine import Engine
from agentgym.simulation.ledger import Ledger
from agentgym.simulation.network import Network
from agentgym.simulation.quantity import draw_of


class Level:
    """A number that goes up and down, and its sum over time."""

    def __init__(self) -> None:
        """Begin at 0, now."""
        self._loop = asyncio.get_running_loop()
        self._level, self._sum, self._since = 0, 0.0, self._loop.time()

    def add(self, change: int) -> None:
        """Change it from now on."""
        self._sum, self._since, self._level = self.total(), self._loop.time(), self._level + change

    def total(self) -> float:
        """Return its integral over the seconds since the beginning."""
        return self._sum + self._level * (self._loop.time() - self._since)


class Site:
    """Where the processes of a simulated cluster are; belongs to a running event loop."""

    def __init__(self, config: Config, agents: Sequence[AgentId]) -> None:
        """Make an empty site for a run in an environment of these agents."""
        self.config = config
        self.settings = config.simulation
        self.agents = agents
        self.now = asyncio.get_running_loop().time
        """The clock."""
        self.network = Network(draw_of(self.settings.latency), self.rng("network", 0))
        self.ledger = Ledger()
        """The disk, which outlives the coordinators of a run that is resumed."""
        self.engines: dict[str, Engine] = {}
        """Of the policy servers, by address; those of dead ones are closed."""
        self._work_before = 0.0
        """Of engines whose address others have taken over."""
        self.playing = Level()
        """Plays that go on."""
        self.training = Level()
        """Trainers that work."""
        self.crashes: Counter[str] = Counter()
        """By kind of process."""
        self.ages: dict[tuple[int, str], Counter[int]] = {}
        """By step and policy: how many tokens of which age its batch trained, in versions; the last time that it was
        taken."""
        self.saved: dict[str, dict[int, dict[str, Any]]] = {policy: {} for policy in config.policies_to_train}
        """The trainers' checkpoints: the coordinator's state by policy and step."""
        self._pids = count(1)

    @property
    def checkpoint(self) -> dict[str, Any] | None:
        """The coordinator's state in the newest step that all trainers have a checkpoint of; None: there is none."""
        states = list(self.saved.values())
        common = set(states[0]).intersection(*states)
        return states[0][max(common)] if common else None

    def new_pid(self) -> int:
        """Return the id of a new process."""
        return next(self._pids)

    def rng(self, name: str, number: int) -> Generator:
        """Return a generator of its own for something that has a name and a number."""
        return np.random.default_rng([self.config.run.seed, crc32(name.encode()), number])

    def open_engine(self, address: str) -> Engine:
        """Return the engine of a new policy server."""
        if address in self.engines:
            self._work_before += self.engines[address].work
        engine = self.engines[address] = Engine(
            self.settings.tokens_per_second,
            self.settings.tokens_per_second_full,
            self.config.server.max_num_seqs,
        )
        return engine

    def work(self) -> float:
        """Return the tokens that all policy servers have sampled, with what prompts cost."""
        for engine in self.engines.values():
            engine.look()
        return self._work_before + sum(engine.work for engine in self.engines.values())
