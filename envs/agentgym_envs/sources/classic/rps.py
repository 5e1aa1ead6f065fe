"""Rock, paper, scissors, also with lizard and spock: what the other showed last, a shape as answer."""

from typing import Any

from agentgym.messages import AgentId
from agentgym_envs.sources.view import View, chosen, won

SHAPES = ("rock", "paper", "scissors", "spock", "lizard")
"""In the order of PettingZoo's actions; in a circle, each beats the one before it and the third before it."""


def describe(env: Any, agent: AgentId, observation: Any) -> str:
    """Return the other's last shape."""
    shape = int(observation)
    return "First round." if shape == _count(env) else f"They showed {SHAPES[shape]}."


def parse(env: Any, agent: AgentId, text: str) -> int | None:
    """Return the shape's number."""
    return chosen(text, SHAPES[: _count(env)])


def success(env: Any, agent: AgentId, outcome: float) -> float:
    """Return 1 for more rounds won than lost, 0.5 for as many."""
    return won(outcome)


def view(env: Any) -> View:
    """Return the view of a game with three or five shapes. Raises ValueError for another number."""
    if _count(env) not in (3, 5):
        raise ValueError(f"num_actions = {_count(env)}; the shapes of 3 and of 5 have names")
    shapes = SHAPES[: _count(env)]
    return View(f"Beat the other. Answer {', '.join(shapes)}.", shapes, describe, parse, success)


def _count(env: Any) -> int:
    return int(env.action_space(env.possible_agents[0]).n)
