"""Scripted players that read the views: each has an expert, and a noisy one that often moves at random."""

import re
from functools import partial
from typing import Any

from agentgym.messages import Message, ToolSchema, assistant
from agentgym.policy.scripted import RandomLegal, last_text
from agentgym_envs.sources.toy_text.grid import way
from agentgym_envs.sources.toy_text.taxi import first_step


class _Player(RandomLegal):
    """Says what `word` says, and with probability `noise` any legal word."""

    def __init__(self, seed: int, noise: float = 0.0) -> None:
        """Take the share of words at random."""
        super().__init__(seed)
        self.noise = noise

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return a word."""
        word = self.word(last_text(messages)) if self.rng.random() >= self.noise else ""
        return assistant(word) if word else super().act(messages, tools, info)

    def word(self, view: str) -> str:
        """Return the best word for a view; none where there is no good one."""
        raise NotImplementedError


class LakeWay(_Player):
    """A shortest way over FrozenLake; it does not reckon with slipping."""

    def word(self, view: str) -> str:
        """Return the first step."""
        return next(iter(way(view, "G", "H")), "")


class CliffWay(_Player):
    """The shortest way along the cliff; it does not reckon with slipping."""

    def word(self, view: str) -> str:
        """Return the first step."""
        return next(iter(way(view, "G", "C")), "")


class TaxiDriver(_Player):
    """The shortest tour: to the passenger, then to the destination."""

    def word(self, view: str) -> str:
        """Return the next word."""
        places = [(int(row), int(column)) for row, column in re.findall(r"(\d),(\d)", view)]
        taxi, goal = places[0], places[1]
        if taxi != goal:
            return first_step(taxi, goal)
        return "dropoff" if "in taxi" in view else "pickup"


class BasicStrategy(_Player):
    """Basic strategy of blackjack, without doubling and splitting."""

    def word(self, view: str) -> str:
        """Return the word for the sum, an ace, and the dealer's card."""
        total, soft, dealer = re.findall(r"= (\d+)( soft)?\. Dealer: (\w+)", view)[0]
        high = dealer in ("7", "8", "9", "10", "A")
        if soft:
            enough = 19 if dealer in ("9", "10", "A") else 18
        else:
            enough = 17 if high else 13 if dealer in ("2", "3") else 12
        return "stick" if int(total) >= enough else "hit"


noisy_lake = partial(LakeWay, noise=0.5)
noisy_cliff = partial(CliffWay, noise=0.3)
noisy_taxi = partial(TaxiDriver, noise=0.3)
noisy_blackjack = partial(BasicStrategy, noise=0.5)
