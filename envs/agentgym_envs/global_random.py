"""For libraries that draw from the process-global generators of `random` and numpy."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


class GlobalRandom:
    """The global generators as one environment sees them: seeded by it, and moved by its own draws only.

    What is called within `borrowed()` draws from the environment's streams; afterwards everybody else finds the global
    generators as they were. Environments in several threads at once still disturb each other.
    """

    def __init__(self) -> None:
        """Begin with the generators as they are."""
        self._states = random.getstate(), np.random.get_state()

    def seed(self, seed: int) -> None:
        """Start both streams anew; `seed` is below 2**32."""
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Put the environment's streams in the place of the global ones."""
        others = random.getstate(), np.random.get_state()
        _set(self._states)
        try:
            yield
        finally:
            self._states = random.getstate(), np.random.get_state()
            _set(others)


def _set(states: tuple[object, object]) -> None:
    random.setstate(states[0])  # type: ignore[arg-type]  # opaque
    np.random.set_state(states[1])  # type: ignore[arg-type]  # opaque
