"""The simulated worker, policy server and trainer."""

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np

from agentgym.coordinator.supervisor import Child
from agentgym.episode_codec import encode_episode
from agentgym.errors import PolicyUnavailableError
from agentgym.protocol import (
    BatchHeader,
    BatchRequest,
    Cancel,
    EpisodeDone,
    Header,
    Heartbeat,
    Hello,
    Lease,
    Loaded,
    LoadWeights,
    Ready,
    Servers,
    StepDone,
    Welcome,
)
from agentgym.segments import Place
from agentgym.simulation.engine import Spans
from agentgym.simulation.machine import Machine
from agentgym.simulation.play import Play
from agentgym.simulation.quantity import draw_of
from agentgym.simulation.site import Site
from agentgym.weights import weights_file
from agentgym.wire import PROTOCOL_VERSION, Arrays
from agentgym.worker.seat import RETRY_SECONDS


class SimulatedWorker(Machine):
    """Plays the leases it is given."""

    def __init__(self, child: Child, site: Site) -> None:
        """Start."""
        self.crashes = site.settings.worker_crashes
        self._plays: dict[int, asyncio.Task[None]] = {}
        self._addresses: dict[str, list[str]] = {}
        self._asked: Counter[str] = Counter()
        super().__init__(child, site)

    def hello(self) -> Hello:
        """See `Machine`."""
        return Hello(role="worker", name=self.name, protocol=PROTOCOL_VERSION, pid=self.pid)

    def receive(self, header: Header, arrays: Arrays) -> None:
        """See `Machine`."""
        match header:
            case Welcome():
                self.send(Ready(credits=self.site.config.workers.slots))
            case Servers():
                self._addresses = header.addresses
            case Lease():
                self._plays[header.lease_id] = self.start(self._play(header))
            case Cancel() if header.lease_id in self._plays:
                self._plays[header.lease_id].cancel()
                self.send(Ready(credits=1))

    async def _play(self, lease: Lease) -> None:
        home = ""

        async def ask(policy: str, new: int, known: int, answer: int) -> Spans:
            nonlocal home
            while True:
                addresses = self._addresses.get(policy.partition("@")[0], [])
                address = (
                    home if home in addresses else min(addresses, key=self._asked.__getitem__, default="")
                )
                cost = self.site.settings.prompt_cost * (new + (0 if address == home else known))
                home = address
                if home:
                    try:
                        return await self._sampled(home, cost, answer)
                    except PolicyUnavailableError:
                        pass
                await asyncio.sleep(RETRY_SECONDS)

        self.site.playing.add(1)
        try:
            episode = await Play(lease, self.site.config, self.site.agents, ask).play()
            fields, arrays = encode_episode(episode)
            self.send(EpisodeDone(lease_id=lease.lease_id, episode=fields), arrays)
        finally:
            self.site.playing.add(-1)
            del self._plays[lease.lease_id]

    async def _sampled(self, address: str, cost: float, answer: int) -> Spans:
        engine = self.site.engines[address]
        future = engine.ask(cost, answer)
        self._asked[address] += 1
        try:
            return await future
        except asyncio.CancelledError:
            engine.abort(future)
            raise
        finally:
            self._asked[address] -= 1


class SimulatedServer(Machine):
    """Answers with an engine, and loads weights one after another."""

    def __init__(self, child: Child, site: Site) -> None:
        """Start."""
        self.crashes = site.settings.server_crashes
        options = child.arguments()
        self._address = options[options.index("--bind") + 1]
        self._policy = options[options.index("--policy") + 1]
        self._engine = site.open_engine(self._address)
        self._orders: asyncio.Queue[LoadWeights] = asyncio.Queue()
        super().__init__(child, site)
        self.start(self._load())
        self.start(self._report())

    def hello(self) -> Hello:
        """See `Machine`."""
        return Hello(
            role="server",
            name=self.name,
            protocol=PROTOCOL_VERSION,
            pid=self.pid,
            address=self._address,
            policy=self._policy,
            max_model_len=self.site.config.server.max_model_len,
        )

    def receive(self, header: Header, arrays: Arrays) -> None:
        """See `Machine`."""
        if isinstance(header, LoadWeights):
            self._orders.put_nowait(header)

    def stop(self) -> None:
        """Answer nobody; those who wait hear of it when the process is dead."""
        super().stop()
        self._engine.pause()
        if self.poll() is not None:
            self._engine.close()

    async def _report(self) -> None:
        """Say how many requests are in hand; no cache is simulated."""
        while True:
            await asyncio.sleep(self.site.config.coordinator.heartbeat_interval)
            self.send(Heartbeat(stats={"running": float(self._engine.outstanding)}))

    async def _load(self) -> None:
        while True:
            order = await self._orders.get()
            seconds = draw_of(self.site.settings.load_seconds)(self.rng)
            self._engine.pause()
            await asyncio.sleep(seconds)
            self._engine.go_on(order.version)
            self.send(Loaded(version=order.version, seconds=seconds))


class SimulatedTrainer(Machine):
    """Takes a step with every batch."""

    def __init__(self, child: Child, site: Site) -> None:
        """Start, with what the last checkpoint holds."""
        self.crashes = site.settings.trainer_crashes
        options = child.arguments()
        self._policy = options[options.index("--policy") + 1]
        self._exchange = Path(options[options.index("--exchange") + 1])
        state = site.checkpoint
        self._done = int(state["step"]) if state else 0
        super().__init__(child, site)

    def hello(self) -> Hello:
        """See `Machine`."""
        return Hello(
            role="trainer",
            name=self.name,
            policy=self._policy,
            protocol=PROTOCOL_VERSION,
            pid=self.pid,
            version=self._done,
            weights=self._publish(self._done) if self._done else "",
        )

    def receive(self, header: Header, arrays: Arrays) -> None:
        """See `Machine`."""
        match header:
            case Welcome():
                self.send(BatchRequest(step=self._done + 1))
            case BatchHeader():
                if header.loss != "sft":  # what a teacher said has no age
                    self._look_at_ages(header, arrays)
                self.start(self._step(header))

    async def _step(self, batch: BatchHeader) -> None:
        settings = self.site.settings
        passed = batch.updates * sum(batch.lengths) / settings.trained_tokens_per_second
        seconds = draw_of(settings.step_seconds)(self.rng) + passed
        writing = draw_of(settings.checkpoint_seconds)(self.rng) if batch.checkpoint else 0.0
        self.site.training.add(1)
        try:
            await asyncio.sleep(seconds)
            weights = self._publish(batch.step) if batch.publish else ""
            await asyncio.sleep(writing)
        finally:
            self.site.training.add(-1)
        self._done = batch.step
        if batch.checkpoint:
            self.site.saved[self._policy][batch.step] = batch.state
        self.send(
            StepDone(
                step=batch.step,
                metrics={"seconds": seconds + writing},
                weights=weights,
                checkpoint="written" if batch.checkpoint else "",
            )
        )
        self.send(BatchRequest(step=batch.step + 1))

    def _look_at_ages(self, batch: BatchHeader, arrays: Arrays) -> None:
        versions = np.concatenate(
            [self.site.ledger.versions(Place(*place), number) for *place, number in batch.recorded]
        )
        mask = arrays["loss_mask"]
        assert mask is not None
        ages, counts = np.unique(batch.step - 1 - versions[mask], return_counts=True)
        self.site.ages[batch.step, self._policy] = Counter(
            dict(zip(ages.tolist(), counts.tolist(), strict=True))
        )

    def _publish(self, version: int) -> str:
        path = weights_file(self._exchange, version)
        path.touch()
        return str(path)


PROCESSES: dict[str, type[SimulatedWorker] | type[SimulatedServer] | type[SimulatedTrainer]] = {
    "worker": SimulatedWorker,
    "server": SimulatedServer,
    "trainer": SimulatedTrainer,
}
"""By role."""
