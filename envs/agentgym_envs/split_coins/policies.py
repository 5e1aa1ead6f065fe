"""Scripted players: a random claim, and the fair one."""

import re
from typing import Any

from agentgym.messages import Message, ToolSchema, assistant
from agentgym.policy.scripted import SeededPolicy

_DEFAULT_COINS = 10


def coins_of(messages: list[Message]) -> int:
    """Return the number of coins that the system prompt names."""
    found = re.search(r"Split (\d+) coins", messages[0]["content"]) if messages else None
    return int(found[1]) if found else _DEFAULT_COINS


class RandomClaim(SeededPolicy):
    """Any share, each as likely."""

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return a claim."""
        return assistant(f"claim {self.rng.integers(coins_of(messages) + 1)}")


class FairClaim(SeededPolicy):
    """Half of the coins."""

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return a claim."""
        return assistant(f"claim {coins_of(messages) // 2}")
