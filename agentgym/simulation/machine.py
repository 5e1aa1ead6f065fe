"""A simulated process: it starts, says hello, and dies when its time has come."""

import abc
import asyncio
import signal
import subprocess
from collections.abc import Coroutine
from typing import Any

from agentgym.coordinator.supervisor import Child
from agentgym.errors import RunError
from agentgym.protocol import Drain, Error, Header, Heartbeat, Hello
from agentgym.simulation.quantity import draw_of
from agentgym.simulation.site import Site
from agentgym.wire import Arrays


class Machine(abc.ABC):
    """One process, in the place of a `subprocess.Popen`."""

    crashes = 0.0
    """Deaths per hour."""

    def __init__(self, child: Child, site: Site) -> None:
        """Start."""
        self.name = child.name
        self.site = site
        self.pid = site.new_pid()
        self.identity = f"{child.name}#{self.pid}".encode()
        self.rng = site.rng(child.name, self.pid)
        self.loop = asyncio.get_running_loop()
        self._status: int | None = None
        self._silent = False
        self._sent = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self.start(self._live())

    @abc.abstractmethod
    def hello(self) -> Hello:
        """Return what it says first."""

    @abc.abstractmethod
    def receive(self, header: Header, arrays: Arrays) -> None:
        """Handle a message of the coordinator."""

    def send(self, header: Header, arrays: Arrays | None = None) -> None:
        """Send a message to the coordinator."""
        if not self._silent:
            self._sent = self.loop.time()
            self.site.network.to_coordinator(self.identity, header, arrays)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something that ends when the process does."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---------------------------------------------------------------- what a supervisor sees

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; in virtual time nobody can wait for it."""
        if self._status is None:
            raise subprocess.TimeoutExpired(self.name, timeout or 0.0)
        return self._status

    def terminate(self) -> None:
        """End it."""
        self._end(-signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._end(-signal.SIGKILL)

    # ---------------------------------------------------------------- its life

    async def _live(self) -> None:
        await asyncio.sleep(draw_of(self.site.settings.start_seconds)(self.rng))
        self.site.network.connect(self.identity, self._take_in)
        self.send(self.hello())
        if self.crashes:
            self.loop.call_later(self.rng.exponential(3600.0 / self.crashes), self._crash)
        interval = self.site.config.coordinator.heartbeat_timeout / 2
        while True:
            await asyncio.sleep(interval)
            if self.loop.time() - self._sent >= interval:  # any message is a sign of life
                self.send(Heartbeat())

    def _take_in(self, header: Header, arrays: Arrays) -> None:
        match header:
            case Drain():
                self._end(0)
            case Error():
                raise RunError(f"the coordinator refuses {self.name}: {header.text}")
            case _:
                self.receive(header, arrays)

    def _crash(self) -> None:
        if self._status is None:
            self.site.crashes[type(self).__name__] += 1
            if self.rng.random() < self.site.settings.hangs:
                self.stop()
            else:
                self._end(-signal.SIGKILL)

    def _end(self, status: int) -> None:
        if self._status is None:
            self._status = status
            self.stop()

    def stop(self) -> None:
        """Work no more, dead or silent."""
        self._silent = True
        self.site.network.hang_up(self.identity)
        for task in list(self._tasks):
            task.cancel()
