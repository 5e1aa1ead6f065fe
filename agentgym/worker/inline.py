"""Tables on the worker's event loop itself: for environments whose plays wait for nothing.

Handing a call to a thread and its result back costs about as much as ten turns of a board game. An environment that
says `isolation = "inline"` promises that `reset` and `step` return within microseconds, start no event loop and do
not care in which thread they are called. While a call runs, the whole worker waits; `agentgym check` times them. One
that never returns ends its worker, as one that has fallen silent, and its episodes are played again elsewhere.
"""

import asyncio
import time
from typing import Any

from agentgym.errors import EnvTimeoutError
from agentgym.worker.table import SLICE_SECONDS
from agentgym.worker.threads import ThreadHost

_PLAYS = ("reset", "act")


class InlineHost(ThreadHost):
    """A table whose plays are called here, and what may take its time (making, scoring, closing) in a thread."""

    async def run(self, what: str, timeout: float, method: str, *args: Any) -> Any:
        """Call a method of the table.

        Raises:
            EnvTimeoutError: it returned after more than `timeout` seconds.
        """
        if method not in _PLAYS or self._table is None:
            return await super().run(what, timeout, method, *args)
        started = time.monotonic()
        result = getattr(self._table, method)(*args)
        seconds = time.monotonic() - started
        if seconds > timeout + SLICE_SECONDS:
            raise EnvTimeoutError(f"{what} took {seconds:.2g} s, and {timeout:g} s are allowed")
        await asyncio.sleep(0)  # a scripted episode would keep the loop to its end
        return result
