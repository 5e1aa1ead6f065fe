"""Scripted players: one that does it right, and one with the faults of an untrained model."""

import json
from typing import Any

from agentgym.messages import Message, ToolSchema, assistant, tool_call
from agentgym.policy.scripted import SeededPolicy, last_text
from agentgym_envs.calculator import prompts


def call(name: str, **arguments: Any) -> Message:
    """Return an answer with one tool call."""
    return assistant("", [tool_call(name, json.dumps(arguments), "call_0")])


class CalculatorExpert(SeededPolicy):
    """Calculates, then submits."""

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return the next call."""
        result = last_text(messages, "tool")
        if result.lstrip("-").isdigit():
            return call("submit", answer=int(result))
        questions = [prompts.read_question(m["content"]) for m in messages if m["role"] == "user"]
        return call("calculate", expression=next((q for q in reversed(questions) if q), "0"))


class NoisyCalculator(CalculatorExpert):
    """The expert, but with probability `p` a turn goes wrong: text, a tool that is not there, or a wrong answer."""

    def __init__(self, seed: int, p: float = 0.4) -> None:
        """Take the share of turns that go wrong."""
        super().__init__(seed)
        self.p = p

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return the next call, or a fault."""
        if self.rng.random() >= self.p:
            return super().act(messages, tools, info)
        faults = [
            assistant(str(self.rng.integers(100))),
            call("calc"),
            call("submit", answer=int(self.rng.integers(100))),
        ]
        return faults[int(self.rng.integers(len(faults)))]
