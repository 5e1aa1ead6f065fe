"""Calls into environments: in threads, with limits, so that nothing an environment does blocks the event loop.

All calls of one environment run in the same thread (`of_one_env`): sqlite3 connections, browsers and the like are
bound to the thread that made them. Python cannot stop a thread. A call that outlives its limit is abandoned: its
episode fails, its environment is never used again, and when too many threads are lost the worker says so
(`exhausted`) and is replaced.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

from agentgym.errors import AgentGymError, EnvError, EnvTimeoutError

T = TypeVar("T")


class EnvCalls:
    """Runs environment calls in a pool of `threads` threads, of which half may be lost before it is exhausted."""

    def __init__(self, threads: int, *, abandoned: set[Future[Any]] | None = None) -> None:
        """Make the pool; threads start when they are needed. Pools may count their lost threads together."""
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="env")
        self._abandoned: set[Future[Any]] = set() if abandoned is None else abandoned
        self._lost: Future[Any] | None = None

    def of_one_env(self) -> "EnvCalls":
        """Return a thread of its own for one environment; if it is lost, it counts here."""
        return EnvCalls(1, abandoned=self._abandoned)

    @property
    def stuck(self) -> bool:
        """Whether a call that was abandoned has not returned yet."""
        return self._lost is not None and not self._lost.done()

    def close(self) -> None:
        """Let the threads end when their calls have returned."""
        self._pool.shutdown(wait=False)

    @property
    def exhausted(self) -> bool:
        """Whether so many calls never returned that this process should be replaced."""
        return len(self._abandoned) * 2 >= self._threads

    async def run(self, what: str, timeout: float, function: Callable[..., T], *args: Any) -> T:
        """Call `function(*args)` in a thread.

        Raises:
            EnvTimeoutError: it did not return within `timeout` seconds.
            EnvError: it raised; the cause is chained.
        """
        future = self._pool.submit(_outcome, function, args)
        try:
            async with asyncio.timeout(timeout):
                value, error = await asyncio.wrap_future(future)
        except TimeoutError:
            raise EnvTimeoutError(f"{what} did not return within {timeout:g} s") from None
        finally:
            if not future.done() and not future.cancel():
                self._abandoned.add(future)
                self._lost = future
                future.add_done_callback(self._abandoned.discard)
        if error is None:
            return cast(T, value)
        if isinstance(error, AgentGymError):
            raise EnvError(f"{what}: {error}") from error
        raise EnvError(f"{what} raised {type(error).__name__}: {error}") from error


def _outcome(function: Callable[..., T], args: tuple[Any, ...]) -> tuple[T | None, BaseException | None]:
    """Return the value or the exception, which asyncio must not see.

    A future takes some exceptions for its own: StopIteration, SystemExit, CancelledError, TimeoutError.
    """
    try:
        return function(*args), None
    except BaseException as error:  # the boundary to code that users wrote
        return None, error
