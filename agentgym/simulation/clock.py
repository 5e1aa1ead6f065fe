"""Virtual time: an asyncio event loop whose clock jumps to the next timer as soon as nothing is left to do.

What runs on it calls `asyncio.sleep`, `loop.call_later` and `loop.time` as ever, and an hour passes as fast as its
events can be handled. Nothing comes from outside: functions given to a thread run at once, in this one.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

from agentgym.errors import RunError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _Jump(selectors.SelectSelector):
    """Waits for no file: moves the time on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let `timeout` seconds pass."""
        if timeout is None:
            raise RunError("the simulation stands still: everybody waits and nothing is due")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which begins at 0."""

    def __init__(self) -> None:
        """Begin."""
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._jump.now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Call a function now: no time passes meanwhile, and its result does not depend on threads."""
        future: asyncio.Future[T] = self.create_future()
        future.set_result(func(*args))
        return future


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
