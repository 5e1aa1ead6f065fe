"""A real coordinator on a real socket, and the stand-ins that play the other processes of its run."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from builders import config_of
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wire_peers import FakeServer, FakeTrainer, FakeWorker, Peer, open_context

from agentgym.config import Config
from agentgym.coordinator.launch import Places
from agentgym.coordinator.process import Coordinator
from agentgym.coordinator.report import Reporter
from agentgym.coordinator.schedule import Schedule
from agentgym.coordinator.supervisor import Child, Process, Supervisor, spawn
from agentgym.errors import RunError
from agentgym.keys import Keys
from agentgym.protocol import Lease, Servers
from agentgym.tensorboard import TensorBoard


def small_run(**sections: Any) -> Config:
    """Two groups of two a step, quick heartbeats."""
    base: dict[str, Any] = {
        "run": {"steps": 3},
        "rollout": {"tasks_per_step": 2, "group_size": 2, "max_staleness": 1},
        "coordinator": {"heartbeat_interval": 0.1, "heartbeat_timeout": 5.0, "step_timeout": 20.0},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values} if isinstance(values, dict) else values
    return config_of(**base)


P = TypeVar("P", bound=Peer)


class Run:
    """A coordinator that runs as a task, and the terminal that it writes to."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        spawn: Callable[[Child, Path], Process] = spawn,
        **resumed: Any,
    ) -> None:
        for name in ("run", "sockets", "exchange"):
            (folder / name).mkdir(exist_ok=True)  # a run may be resumed
        self.places = Places(folder / "run", folder / "sockets", folder / "exchange")
        self.terminal = io.StringIO()
        self.board = TensorBoard(self.places.tensorboard)
        self.supervisor = Supervisor(
            logs=self.places.logs, start_timeout=60.0, silence_timeout=60.0, max_restarts=1, spawn=spawn
        )
        self.reporter = Reporter(
            Schedule(config),
            self.board,
            config.tensorboard,
            console=Console(file=self.terminal, width=200),
            decode=str,
        )
        self.coordinator = Coordinator(
            config, self.places, supervisor=self.supervisor, reporter=self.reporter, **resumed
        )
        self.task = asyncio.create_task(self.coordinator.run())

    async def failure(self) -> str:
        """Wait for the run to end by a RunError and return its text."""
        with pytest.raises(RunError) as caught:
            await self.task
        return str(caught.value)


class Cast:
    """Who plays in a test: peers that are connected to one run, and tasks that must not fail."""

    def __init__(self, run: Run, context: Any) -> None:
        self.run, self._context = run, context
        self._tasks: list[asyncio.Task[None]] = []
        self._peers: list[Peer] = []

    def peer(self) -> Peer:
        return self._connected(Peer)

    def worker(self, address: str = "") -> FakeWorker:
        return self._connected(FakeWorker, address)

    def server(self) -> FakeServer:
        return self._connected(FakeServer)

    def trainer(self) -> FakeTrainer:
        return self._connected(FakeTrainer)

    def _connected(self, kind: type[P], address: str = "") -> P:
        peer = kind(self._context, address or self.run.places.coordinator)
        self._peers.append(peer)
        return peer

    async def leave(self) -> None:
        """Everyone ends where it stands, and hangs up."""
        everyone = [self.run.task, *self._tasks]
        for task in everyone:
            task.cancel()
        await asyncio.gather(*everyone, return_exceptions=True)
        for peer in self._peers:
            peer.close()

    def start(self, *parts: Coroutine[Any, Any, None]) -> None:
        self._tasks += [asyncio.create_task(part) for part in parts]

    async def everyone_is_done(self) -> None:
        await asyncio.gather(self.run.task, *self._tasks)


@asynccontextmanager
async def play(
    config: Config, folder: Path, *, keys: Keys | None = None, **resumed: Any
) -> AsyncIterator[Cast]:
    """`keys` are those of the peers."""
    with open_context(keys) as context:
        run = Run(config, folder, **resumed)
        cast = Cast(run, context)
        try:
            yield cast
        finally:
            await cast.leave()
            run.board.close()


async def leased(worker: FakeWorker) -> Lease:
    """Wait for a lease; news about servers are passed over."""
    while not isinstance(header := (await worker.packet()).header, Lease):
        assert isinstance(header, Servers)
    return header


def numbers_of(run: Run) -> dict[str, float]:
    """The latest numbers in the event files."""
    events = EventAccumulator(str(run.places.tensorboard))
    events.Reload()
    return {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
