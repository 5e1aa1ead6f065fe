"""A simulated run: the real coordinator, supervisor and command lines, and simulated processes."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from agentgym.config import Config, EvaluationConfig
from agentgym.coordinator.launch import Places, launch_all
from agentgym.coordinator.process import Coordinator
from agentgym.coordinator.supervisor import Child, Supervisor, TrainerLost
from agentgym.coordinator.surroundings import Surroundings
from agentgym.messages import SINGLE_AGENT, AgentId
from agentgym.simulation.machine import Machine
from agentgym.simulation.measure import Measurements
from agentgym.simulation.processes import PROCESSES
from agentgym.simulation.site import Site

GOODBYE_SECONDS = 1.0
WATCH_SECONDS = 2.0
"""More often is dear where thousands of processes are watched."""


class Cluster:
    """A run in virtual time; belongs to the loop of `agentgym.simulation.clock.run_virtually`."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        agents: Sequence[AgentId] = (),
        coordinator: type[Coordinator] = Coordinator,
    ) -> None:
        """Prepare a run.

        Args:
            config: its settings.
            folder: for the names of its weight files, which are empty.
            agents: of the environment; by default one.
            coordinator: the class that is driven.
        """
        config = config.model_copy(update={"evaluation": EvaluationConfig()})  # they would be real
        self._config = config
        self._places = Places(folder / "run", folder / "sockets", folder / "exchange")
        for place in (self._places.run, self._places.exchange):
            place.mkdir(exist_ok=True)
        self._agents = agents
        self._make = coordinator
        self.site = Site(config, agents or [SINGLE_AGENT])
        limits = config.coordinator
        self._supervisor = Supervisor(
            logs=self._places.logs,
            start_timeout=limits.start_timeout,
            silence_timeout=limits.heartbeat_timeout,
            max_restarts=limits.max_restarts,
            clock=self.site.now,
            spawn=self._spawn,
        )
        self.ledger = self.site.ledger
        self.measured = Measurements(self.site)
        self.resumed = 0
        """How often the trainer died and the run was resumed."""

    async def run(self) -> None:
        """Run to the last step; where the trainer dies, go on from its last checkpoint.

        Raises:
            RunError: the run cannot go on.
        """
        while True:
            self.coordinator = self._coordinator()
            launch_all(self._supervisor, self._config, self._places, resume={})
            try:
                return await self.coordinator.run()
            except TrainerLost:
                pass
            finally:
                await asyncio.sleep(GOODBYE_SECONDS)  # until everybody has heard that it is over
                self._supervisor.stop(0.0)
            self.resumed += 1

    def _coordinator(self) -> Coordinator:
        state = json.loads(json.dumps(self.site.checkpoint))  # as it would be read
        return self._make(
            self._config,
            self._places,
            supervisor=self._supervisor,
            reporter=self.measured,
            agents=self._agents,
            first_step=int(state["step"]) + 1 if state else 1,
            state=state,
            surroundings=Surroundings(
                self.site.now, self.site.network.bind, self.ledger.open, watch_seconds=WATCH_SECONDS
            ),
        )

    def _spawn(self, child: Child, _log: Path) -> Machine:
        return PROCESSES[child.role](child, self.site)
