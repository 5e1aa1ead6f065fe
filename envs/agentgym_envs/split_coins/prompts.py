"""Every text an agent reads."""

import re

_MAX_WORDS = 40


def system_prompt(coins: int, rounds: int) -> str:
    """Return the task."""
    return f"Split {coins} coins in {rounds} rounds. Say claim N."


def first() -> str:
    """Return what opens the first round."""
    return "?"


def words_of_other(text: str) -> str:
    """Return the other's words as an agent reads them: short, on one line, printable ASCII."""
    return re.sub(r"[^ -~]", " ", text[:_MAX_WORDS]).strip() or "-"
