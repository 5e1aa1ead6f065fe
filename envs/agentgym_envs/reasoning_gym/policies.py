"""Scripted players that know the answer which the question was made with."""

import json
import re
from typing import Any

from agentgym.messages import Message, ToolSchema, assistant, tool_call
from agentgym.policy.scripted import SeededPolicy, last_text
from agentgym_envs.reasoning_gym import prompts

_EXPRESSION = re.compile(r"-?[\d(][\d+\-*/(). ]*[+\-*/][\d+\-*/(). ]*[\d)]")


class Oracle(SeededPolicy):
    """Gives that answer; where the question was made without one, an empty one."""

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return the answer, by `submit` where there are tools."""
        return say(self.choose(str(info.get("answer") or "")), tools)

    def choose(self, answer: str) -> str:
        """Return what is answered where `answer` is right."""
        return answer


class Noisy(Oracle):
    """The same, but with probability `p` one character is another one."""

    def __init__(self, seed: int, p: float = 0.4) -> None:
        """Take the share of wrong answers."""
        super().__init__(seed)
        self.p = p

    def choose(self, answer: str) -> str:
        """Return what is answered where `answer` is right."""
        if self.rng.random() >= self.p:
            return answer
        wrong = list(answer or "0")
        at = int(self.rng.integers(len(wrong)))
        digit = str(self.rng.integers(10))
        wrong[at] = digit if wrong[at].isdigit() else wrong[at - 1]
        return "".join(wrong)


class Coder(Noisy):
    """Computes the first expression of the question with the tool `python` and submits the result.

    With probability `p`, or where there is no such tool or expression, answers at once, like `Noisy`.
    """

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return the call of `python`, or the answer."""
        if result := last_text(messages, "tool"):
            return say(result.strip(), tools)
        expression = _EXPRESSION.search(last_text(messages))
        has_python = any(tool["function"]["name"] == "python" for tool in tools)
        if not has_python or expression is None or self.rng.random() < self.p:
            return super().act(messages, tools, info)
        code = json.dumps({"code": expression[0].strip()})
        return assistant("", [tool_call("python", code, "call_0")])


def say(answer: str, tools: list[ToolSchema]) -> Message:
    """Return an answer in the form that the environment asks for."""
    if not tools:
        return assistant(prompts.tagged(answer))
    return assistant("", [tool_call("submit", json.dumps({"answer": answer}), "call_0")])
