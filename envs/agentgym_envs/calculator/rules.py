"""The rules: making a question."""

import numpy as np


def make_question(rng: np.random.Generator, *, max_number: int, max_terms: int) -> str:
    """Draw an expression of two to `max_terms` numbers, joined by +, - and *."""
    text = str(rng.integers(1, max_number + 1))
    for _ in range(int(rng.integers(1, max_terms))):
        text += f"{'+-*'[int(rng.integers(3))]}{rng.integers(1, max_number + 1)}"
    return text
