"""FrozenLake: the lake with the agent on it, four directions."""

from typing import Any

from agentgym_envs.sources.toy_text.grid import drawn
from agentgym_envs.sources.view import View, chosen

CHOICES = ("left", "down", "right", "up")
"""In the order of gymnasium's actions."""
PROMPT = "You are A on ice. Reach G, avoid the holes H. Answer left, down, right or up."
SLIPPERY = PROMPT + " You may slip to the side."


def describe(env: Any, observation: Any) -> str:
    """Return the lake: "." ice, "H" hole, "G" goal, "A" the agent."""
    return drawn(_rows(env), env.unwrapped.ncol, int(observation))


def parse(env: Any, text: str) -> int | None:
    """Return the direction."""
    return chosen(text, CHOICES)


def success(env: Any, outcome: float) -> float:
    """Return 1 on the goal."""
    row, column = divmod(int(env.unwrapped.s), env.unwrapped.ncol)
    return float(_rows(env)[row][column] == "G")


def view(env: Any) -> View:
    """Return the view of a FrozenLake."""
    slippery = any(len(moves) > 1 for moves in env.unwrapped.P[0].values())
    return View(SLIPPERY if slippery else PROMPT, CHOICES, describe, parse, success)


def _rows(env: Any) -> list[str]:
    lines = (b"".join(row).decode() for row in env.unwrapped.desc)
    return [line.replace("F", ".").replace("S", ".") for line in lines]
