"""The coordinator's clock, which stands still while the coordinator does."""

import logging
import time
from collections.abc import Callable

_logger = logging.getLogger(__name__)


class AwakeClock:
    """Seconds that this process was awake for; to be read several times a second.

    A coordinator that was stopped (Ctrl-Z, SIGSTOP, a debugger, a machine that swaps) finds the others' signs of life
    unread when it goes on. By this clock they were not silent meanwhile, and no deadline has passed.
    """

    def __init__(self, *, longest: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin at 0; between two readings `longest` seconds pass at most."""
        self._longest = longest
        self._clock = clock
        self._read = clock()
        self._now = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        now = self._clock()
        gap, self._read = now - self._read, now
        self._now += min(gap, self._longest)
        if gap > 5 * self._longest:
            _logger.warning("this process stood still for %.0f s", gap)
        return self._now
