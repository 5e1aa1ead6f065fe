"""Tables in threads of this process: for environments that keep no state outside of their instances.

Each environment has a thread of its own for all its calls, since sqlite3 connections, browsers and the like are bound
to the thread that made them. Python cannot stop a thread. A call that outlives its limit is abandoned: its episode
fails, its environment is never used again, and when too many threads are lost the worker is replaced (`worker.pool`).
The threads are daemons, so that a lost one does not keep the process from ending.
"""

import asyncio
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

from agentgym.errors import EnvTimeoutError
from agentgym.worker.table import SLICE_SECONDS, Table, attempt

Result = tuple[Any, BaseException | None]
Waiting = asyncio.Future[Result]


class Mailbox:
    """Brings the results of threads to the event loop; one wake-up carries all that are there."""

    def __init__(self) -> None:
        """Belong to the running event loop."""
        self.loop = asyncio.get_running_loop()
        self._results: deque[tuple[Waiting, Result]] = deque()
        self._awake = False

    def post(self, waiting: Waiting, result: Result) -> None:
        """Resolve a future, from any thread."""
        self._results.append((waiting, result))
        if not self._awake:  # else the delivery that is due finds this one too
            self._awake = True
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._awake = False  # first: what is posted from now on asks for another delivery
        while self._results:
            waiting, result = self._results.popleft()
            if not waiting.done():
                waiting.set_result(result)


class EnvThread:
    """A thread for the calls of one environment."""

    def __init__(self, mailbox: Mailbox) -> None:
        """Start the thread."""
        self._mailbox = mailbox
        self._queue: SimpleQueue[tuple[Callable[[], Any], Waiting] | None] = SimpleQueue()
        self._busy = self._abandoned = False
        self._thread = threading.Thread(target=self._work, name="env", daemon=True)
        self._thread.start()

    @property
    def stuck(self) -> bool:
        """Whether a call that was abandoned has not returned yet."""
        return self._abandoned and self._busy

    async def run(self, what: str, timeout: float, call: Callable[[], Any]) -> Any:
        """Return what `call` returns, or raise what it raises.

        Raises:
            EnvTimeoutError: it did not return within `timeout` seconds.
        """
        waiting: Waiting = self._mailbox.loop.create_future()
        self._busy = True
        self._queue.put((call, waiting))
        try:
            async with asyncio.timeout(timeout + SLICE_SECONDS):
                value, error = await waiting
        except TimeoutError:
            self._abandoned = True
            raise EnvTimeoutError(f"{what} did not return within {timeout:g} s{self._place()}") from None
        except asyncio.CancelledError:
            self._abandoned = True
            raise
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """Let the thread end when its call has returned."""
        self._queue.put(None)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            call, waiting = task
            result = attempt(call)
            self._busy = False
            self._mailbox.post(waiting, result)
            del call, waiting, task, result  # an environment must not live on in a thread that waits

    def _place(self) -> str:
        """Return where the thread is now."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        frames = traceback.extract_stack(frame)[-3:] if frame is not None else []
        return "".join(f"\n  at {f.filename}, line {f.lineno}, in {f.name}" for f in reversed(frames))


class ThreadHost:
    """A table in a thread; see `worker.pool.Host`."""

    def __init__(self, mailbox: Mailbox, table: Table | None = None) -> None:
        """Start the thread; without a `table`, `make` one."""
        self._mailbox = mailbox
        self._thread = EnvThread(mailbox)
        self._table = table

    @property
    def stuck(self) -> bool:
        """Whether a call never returned."""
        return self._thread.stuck

    async def make(self, env_id: str, kwargs: Mapping[str, Any], timeout: float) -> None:
        """Build the environment."""
        self._table = await self._thread.run(f"making {env_id}", timeout, lambda: Table.make(env_id, kwargs))

    async def run(self, what: str, timeout: float, method: str, *args: Any) -> Any:
        """Call a method of the table."""
        return await self._thread.run(what, timeout, lambda: getattr(self._table, method)(*args))

    async def close(self, timeout: float) -> None:
        """Close the environment."""
        try:
            if self._table is not None:
                # Closing from another thread may free a call that does not return; waiting behind it never would.
                thread = EnvThread(self._mailbox) if self._thread.stuck else self._thread
                await thread.run("close", timeout, self._table.close)
                thread.close()
        finally:
            self._thread.close()
