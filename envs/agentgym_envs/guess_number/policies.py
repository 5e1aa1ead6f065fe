"""Scripted players: at random, a noisy teacher, and bisection."""

from typing import Any

from agentgym.messages import Message, ToolSchema, assistant
from agentgym.policy.scripted import SeededPolicy
from agentgym_envs.guess_number import prompts
from agentgym_envs.guess_number.rules import Comparison, parse_guess, possible

_DEFAULT_RANGE = (1, 20)
_COMPARISONS: dict[str, Comparison] = {prompts.HIGHER: "higher", prompts.LOWER: "lower"}


def range_of(messages: list[Message]) -> tuple[int, int]:
    """Return the range of numbers that the system prompt names."""
    for message in messages:
        if message["role"] == "system" and (found := prompts.read_range(message["content"])):
            return found
    return _DEFAULT_RANGE


def still_possible(messages: list[Message]) -> range:
    """Return the numbers that the conversation so far allows."""
    answers = []
    guess: int | None = None
    for message in messages:
        if message["role"] == "assistant":
            guess = parse_guess(message["content"])
        elif guess is not None and message["content"] in _COMPARISONS:
            answers.append((guess, _COMPARISONS[message["content"]]))
    return possible(*range_of(messages), answers)


def middle(messages: list[Message]) -> int:
    """Return the middle of the numbers that the conversation so far allows."""
    numbers = still_possible(messages)
    return numbers[len(numbers) // 2]


class RandomGuess(SeededPolicy):
    """Any number of the range, each as likely."""

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return a guess."""
        low, high = range_of(messages)
        return assistant(str(self.rng.integers(low, high + 1)))


class NoisyGuess(SeededPolicy):
    """A teacher with faults: with probability `p` any number of the range, else the middle of the possible ones."""

    def __init__(self, seed: int, p: float = 0.6) -> None:
        """Take the share of guesses without thought."""
        super().__init__(seed)
        self.p = p

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return a guess."""
        if self.rng.random() < self.p:
            low, high = range_of(messages)
            return assistant(str(self.rng.integers(low, high + 1)))
        return assistant(str(middle(messages)))


class Bisection(SeededPolicy):
    """The middle of what is still possible: finds one of 31 numbers in five turns."""

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return a guess."""
        return assistant(str(middle(messages)))
