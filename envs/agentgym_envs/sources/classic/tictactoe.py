"""Tic-tac-toe: the view of `agentgym/TicTacToe-v0`."""

from typing import Any

from agentgym.messages import AgentId
from agentgym_envs.sources.view import View, won
from agentgym_envs.tictactoe import prompts
from agentgym_envs.tictactoe.env import describe, parse


def success(env: Any, agent: AgentId, outcome: float) -> float:
    """Return 1 for a win, 0.5 for a draw."""
    return won(outcome)


def view(env: Any) -> View:
    """Return the view of the game."""
    return View(prompts.SYSTEM["board"], prompts.CHOICES, describe, parse, success)
