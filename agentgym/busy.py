"""How much of the time a process works, and how it is spared a long pause."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class BusyShare:
    """The share of wall time between two readings in which there was something to do; safe between threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin idle."""
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = clock()
        self._since: float | None = None
        self._sum = 0.0

    def start(self) -> None:
        """Count the time from now on."""
        with self._lock:
            self._since = self._clock()

    def stop(self) -> None:
        """Count no longer."""
        with self._lock:
            if self._since is not None:
                self._sum += self._clock() - self._since
                self._since = None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count the time inside."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def read(self) -> float:
        """Return the share since the last reading, 0 to 1, and start anew."""
        with self._lock:
            now = self._clock()
            if self._since is not None:
                self._sum += now - self._since
                self._since = now
            share = self._sum / max(now - self._read_at, 1e-9)
            self._read_at, self._sum = now, 0.0
            return min(share, 1.0)


class CpuShare:
    """The share of a core that this process used between two readings; threads can make it more than 1."""

    def __init__(self) -> None:
        """Begin now."""
        self._read_at = (time.monotonic(), time.process_time())

    def read(self) -> float:
        """Return the share since the last reading."""
        (wall, cpu), self._read_at = self._read_at, (time.monotonic(), time.process_time())
        return (self._read_at[1] - cpu) / max(self._read_at[0] - wall, 1e-9)


@contextmanager
def large_imports() -> Iterator[None]:
    """Import in this block what takes seconds, without the garbage collector, which would take a quarter of them.

    Modules live as long as the process, so that looking for garbage among them finds none; it never does later either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def forget_startup() -> None:
    """Take what this process has made so far out of the garbage collector's sight; for the end of its start.

    The modules and objects of vLLM and torch live as long as the process, and a full collection that looks at them
    takes close to a second, in which nothing else happens.
    """
    gc.collect()
    gc.freeze()
