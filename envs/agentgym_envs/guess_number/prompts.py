"""Every text the agent reads; short, because a small character-level model pays for each character."""

import re

FIRST = "?"
HIGHER = "higher"
LOWER = "lower"
NO_NUMBER = "number?"
RIGHT = "yes"
OVER = "over"


def system_prompt(low: int, high: int) -> str:
    """Return the task."""
    return f"Guess {low}-{high}."


def read_range(system_prompt: str) -> tuple[int, int] | None:
    """Return the lowest and highest number that a system prompt names."""
    found = re.search(r"Guess (-?\d+)-(-?\d+)\.", system_prompt)
    return (int(found[1]), int(found[2])) if found else None
