"""CliffWalking: the cliff with the agent above it, four directions."""

from typing import Any

import numpy as np

from agentgym_envs.sources.toy_text.grid import drawn
from agentgym_envs.sources.view import View, chosen

CHOICES = ("up", "right", "down", "left")
"""In the order of gymnasium's actions."""
PROMPT = "You are A. Reach G; the cliff C sends you back. Answer up, right, down or left."
SLIPPERY = PROMPT + " You may slip to the side."
ROWS = ("." * 12, "." * 12, "." * 12, "." + "C" * 10 + "G")
GOAL = 47


def describe(env: Any, observation: Any) -> str:
    """Return the field: "." free, "C" cliff, "G" goal, "A" the agent."""
    return drawn(ROWS, 12, int(observation))


def parse(env: Any, text: str) -> int | None:
    """Return the direction."""
    return chosen(text, CHOICES)


def success(env: Any, outcome: float) -> float:
    """Return 1 on the goal."""
    return float(int(env.unwrapped.s) == GOAL)


def view(env: Any) -> View:
    """Return the view of a CliffWalking."""
    assert env.unwrapped.shape == (4, 12)
    assert np.flatnonzero(env.unwrapped._cliff).tolist() == list(range(37, 47))
    return View(SLIPPERY if env.unwrapped.is_slippery else PROMPT, CHOICES, describe, parse, success)
