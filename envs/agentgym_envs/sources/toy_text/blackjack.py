"""Blackjack: the cards of the player, the card that the dealer shows."""

from typing import Any

from agentgym_envs.sources.view import View, chosen, won

CHOICES = ("stick", "hit")
"""In the order of gymnasium's actions."""
PROMPT = "Blackjack: come closer to 21 than the dealer, not above. Answer hit or stick."


def describe(env: Any, observation: Any) -> str:
    """Return the hands, for example "You: A 6 = 17 soft. Dealer: 10"."""
    total, dealer, usable_ace = (int(part) for part in observation)
    cards = " ".join(_named(card) for card in env.unwrapped.player)
    return f"You: {cards} = {total}{' soft' if usable_ace else ''}. Dealer: {_named(dealer)}"


def parse(env: Any, text: str) -> int | None:
    """Return the action."""
    return chosen(text, CHOICES)


def success(env: Any, outcome: float) -> float:
    """Return 1 for a win, 0.5 for a draw."""
    return won(outcome)


def view(env: Any) -> View:
    """Return the view of a Blackjack."""
    return View(PROMPT, CHOICES, describe, parse, success)


def _named(card: int) -> str:
    return "A" if card == 1 else str(card)
