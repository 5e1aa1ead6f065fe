"""Scripted players: one that does it right, and one with the faults of an untrained model."""

import json
from typing import Any

from agentgym.messages import Message, ToolSchema, assistant, tool_call
from agentgym.policy.scripted import SeededPolicy, last_text
from agentgym_envs.calculator import prompts


def call(name: str, **arguments: Any) -> Message:
    """Return an answer with one tool call."""
    return assistant("", [tool_call(name, json.dumps(arguments), "call_0")])


def result_of(messages: list[Message]) -> str:
    """Return what the calculator found for the question that is open; empty where it was not asked."""
    text = last_text(messages, "tool")
    return text if text.lstrip("-").isdigit() else ""


class CalculatorExpert(SeededPolicy):
    """Calculates, then submits."""

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return the next call."""
        result = result_of(messages)
        if result:
            return call("submit", answer=int(result))
        questions = [prompts.read_question(m["content"]) for m in messages if m["role"] == "user"]
        return call("calculate", expression=next((q for q in reversed(questions) if q), "0"))


class NoisyCalculator(CalculatorExpert):
    """The expert, but with probability `p` a turn goes wrong: text, a tool that is not there, or a guess.

    It guesses only where it has no result. What it submits after one is therefore that result, so that a model that
    imitates it can learn to copy.
    """

    def __init__(self, seed: int, p: float = 0.3) -> None:
        """Take the share of turns that go wrong."""
        super().__init__(seed)
        self.p = p

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return the next call, or a fault."""
        if self.rng.random() >= self.p:
            return super().act(messages, tools, info)
        number = int(self.rng.integers(100))
        faults = [assistant(str(number)), call("calc")]
        if not result_of(messages):
            faults.append(call("submit", answer=number))
        return faults[int(self.rng.integers(len(faults)))]
