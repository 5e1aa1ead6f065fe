"""Tables on the worker's event loop itself: for environments whose plays wait for nothing.

Handing a call to a thread and its result back costs about as much as ten turns of a board game. An environment that
says `isolation = "inline"` promises that `reset` and `step` return within microseconds, start no event loop and do
not care in which thread they are called. While one runs, the whole worker waits: a slow one is named in the log, and
one that never returns ends as any worker does that has fallen silent, with its episodes played again elsewhere.
"""

import asyncio
import logging
import time
from typing import Any

from agentgym.errors import EnvTimeoutError
from agentgym.worker.table import SLICE_SECONDS
from agentgym.worker.threads import ThreadHost

SLOW_SECONDS = 0.5
"""A call that takes longer is worth a warning; on a busy machine a quick one may take a tenth of it."""
_PLAYS = ("reset", "act")

_logger = logging.getLogger(__name__)


class InlineHost(ThreadHost):
    """A table whose plays are called here, and what may take its time (making, scoring, closing) in a thread."""

    _named = False
    """Whether it has been called slow."""

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
        if seconds > SLOW_SECONDS and not self._named:
            self._named = True
            _logger.warning(
                "%s took %.2g s in which the whole worker waited; give this environment isolation = 'shared' or "
                "'process'",
                what,
                seconds,
            )
        await asyncio.sleep(0)  # a scripted episode would keep the loop to its end
        return result
