"""The environments of a worker: made when they are needed, used again, closed or killed in the end.

There are never more than plays at a time: a worker's `workers.slots`. An environment whose last play failed is never
used again, since nobody knows its state.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from agentgym.config import EnvConfig
from agentgym.errors import EnvError
from agentgym.registry import spec
from agentgym.worker.inline import InlineHost
from agentgym.worker.isolated import Nursery
from agentgym.worker.threads import Mailbox, ThreadHost

CLOSE_SECONDS = 5.0
"""For an environment's `close`; the coordinator waits for its workers twice as long."""

_logger = logging.getLogger(__name__)


class Host(Protocol):
    """A `Table`, wherever it stands."""

    @property
    def stuck(self) -> bool:
        """Whether it holds a thread that will never be free again."""

    async def make(self, env_id: str, kwargs: Mapping[str, Any], timeout: float) -> None:
        """Build the environment.

        Raises:
            EnvError: that failed.
            EnvTimeoutError: it took more than `timeout` seconds.
        """

    async def run(self, what: str, timeout: float, method: str, *args: Any) -> Any:
        """Return what a method of the table returns, or raise what it raises.

        Raises:
            EnvTimeoutError: `what` (a word for people) took more than `timeout` seconds.
            EnvError: the environment's process ended.
        """

    async def close(self, timeout: float) -> None:
        """Close the environment, if it can be, and let go of its thread or process in any case."""


class EnvPool:
    """The environments of one configuration."""

    def __init__(self, env: EnvConfig, *, slots: int) -> None:
        """Make nothing yet; `slots` is how many plays there are at most."""
        self._env = env
        self._slots = slots
        self._isolation = env.isolation or spec(env.id).isolation
        self._mailbox = Mailbox()
        self._nursery = Nursery(env.id)
        self._idle: list[Host] = []
        self._stuck: set[Host] = set()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def exhausted(self) -> bool:
        """Whether so many calls never returned that this process should be replaced."""
        self._stuck = {host for host in self._stuck if host.stuck}
        return len(self._stuck) >= self._slots

    async def take(self) -> Host:
        """Return an environment that nobody uses. Raises EnvError where it cannot be made."""
        if self._idle:
            return self._idle.pop()
        timeout = self._env.reset_timeout
        host = self._host()
        made = False
        try:
            await host.make(self._env.id, self._env.kwargs, timeout)
            made = True
        finally:
            if not made:
                self.give_back(host, reusable=False)
        return host

    def _host(self) -> Host:
        match self._isolation:
            case "process":
                return self._nursery.host()
            case "shared":
                return ThreadHost(self._mailbox)
            case "inline":
                return InlineHost(self._mailbox)

    def give_back(self, host: Host, *, reusable: bool) -> None:
        """Keep an environment for the next play, or close it where its state is unknown."""
        if reusable:
            self._idle.append(host)
        else:
            if host.stuck:
                self._stuck.add(host)
            task = asyncio.create_task(self._close(host))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all environments that were given back."""
        await asyncio.gather(*self._closing, *map(self._close, self._idle))
        self._idle.clear()
        await self._nursery.close()

    async def _close(self, host: Host) -> None:
        try:
            await host.close(CLOSE_SECONDS)
        except EnvError as error:
            _logger.warning("an environment was left behind: %s", error)
