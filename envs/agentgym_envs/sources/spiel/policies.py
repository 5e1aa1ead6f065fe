"""Scripted players of Kuhn poker."""

from functools import partial
from typing import Any

from agentgym.messages import Message, ToolSchema, assistant
from agentgym.policy.scripted import RandomLegal, last_text


def equilibrium_bet(hand: str, alpha: float = 1 / 3) -> float:
    """Return how often a player in equilibrium bets (or calls) with a hand as the view writes it.

    The first player has one equilibrium for each `alpha` from 0 to 1/3, how often it bluffs with a jack; the second
    has one. The first player loses 1/18 a hand on average (Kuhn, 1950).
    """
    card, _, moves = hand.partition(": ")
    return {
        "": {"J": alpha, "Q": 0.0, "K": 3 * alpha},
        "pass": {"J": 1 / 3, "Q": 0.0, "K": 1.0},
        "bet": {"J": 0.0, "Q": 1 / 3, "K": 1.0},
        "pass bet": {"J": 0.0, "Q": alpha + 1 / 3, "K": 1.0},
    }[moves][card]


class KuhnEquilibrium(RandomLegal):
    """Plays an equilibrium, and with probability `noise` any move."""

    def __init__(self, seed: int, noise: float = 0.0) -> None:
        """Take the share of moves at random."""
        super().__init__(seed)
        self.noise = noise

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return a move."""
        if self.rng.random() < self.noise:
            return super().act(messages, tools, info)
        return assistant("bet" if self.rng.random() < equilibrium_bet(last_text(messages)) else "pass")


class KuhnBeginner(RandomLegal):
    """Bets as a coin falls; calls the more often the higher its card. Its NashConv is 0.458."""

    @staticmethod
    def bets(hand: str) -> float:
        """Return how often it bets (or calls) with a hand as the view writes it."""
        return {"J": 0.25, "Q": 0.5, "K": 0.75}[hand[0]] if hand.endswith("bet") else 0.5

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return a move."""
        return assistant("bet" if self.rng.random() < self.bets(last_text(messages)) else "pass")


noisy_kuhn = partial(KuhnEquilibrium, noise=0.5)
