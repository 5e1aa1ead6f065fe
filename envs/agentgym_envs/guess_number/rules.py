"""The rules: reading a guess, comparing it, and what the answers so far allow."""

import re
from collections.abc import Iterable
from typing import Literal

Comparison = Literal["higher", "lower", "equal"]


def parse_guess(text: str) -> int | None:
    """Return the first integer in a text; None where there is none (or one too long to be meant)."""
    found = re.search(r"-?[0-9]+", text)
    return int(found[0]) if found and len(found[0]) <= 9 else None


def compare(guess: int, target: int) -> Comparison:
    """Say where the target lies, seen from the guess."""
    if guess == target:
        return "equal"
    return "higher" if target > guess else "lower"


def possible(low: int, high: int, answers: Iterable[tuple[int, Comparison]]) -> range:
    """Return the numbers that all answers so far allow."""
    for guess, answer in answers:
        if answer == "higher":
            low = max(low, guess + 1)
        elif answer == "lower":
            high = min(high, guess - 1)
    return range(low, high + 1)
