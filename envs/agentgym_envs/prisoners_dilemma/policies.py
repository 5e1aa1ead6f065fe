"""Scripted players: tit for tat, and one that always defects."""

from typing import Any

from agentgym.messages import Message, ToolSchema, assistant
from agentgym.policy.scripted import SeededPolicy, last_text
from agentgym_envs.prisoners_dilemma.rules import parse_move


class TitForTat(SeededPolicy):
    """Cooperates first, then does what the other did."""

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return a move."""
        return assistant(parse_move(last_text(messages)) or "cooperate")


class Defector(SeededPolicy):
    """Always defects."""

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return a move."""
        return assistant("defect")
