"""The environment `agentgym/Calculator-v0`."""

from typing import Any

from agentgym.errors import ConfigError
from agentgym.messages import Action, Observation
from agentgym.tools import ToolEnv, tool
from agentgym.toolsets import calculator
from agentgym_envs.calculator import prompts, rules


class Calculator(ToolEnv):
    """Work out an expression with a tool and submit the answer with another."""

    system_prompt = prompts.SYSTEM
    toolsets = (calculator.Calculator(),)
    max_tool_calls = 4

    def __init__(self, *, max_number: int = 20, max_terms: int = 3, format_penalty: float = 0.1) -> None:
        """Take the largest number and most terms of a question, and the price of a turn without a call."""
        if max_number < 1 or max_terms < 2:
            raise ConfigError(f"max_number = {max_number}, max_terms = {max_terms}: needs at least 1 and 2")
        self.max_number = max_number
        self.max_terms = max_terms
        self.format_penalty = format_penalty

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Ask a question."""
        super().reset(seed=seed)
        expression = rules.make_question(self.np_random, max_number=self.max_number, max_terms=self.max_terms)
        self._answer_is = calculator.calculate(expression)
        return prompts.question(expression), {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Run the calls; who never submits has not succeeded."""
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {"success": 0.0, **info}

    def on_text(self, text: str) -> str:
        """Remind of the tools, at a price."""
        self.add_reward(format=-self.format_penalty)
        return prompts.NO_CALL

    @tool
    def submit(self, answer: int) -> str:
        """Give the answer.

        Args:
            answer: The value.
        """
        right = answer == self._answer_is
        self.finish(float(right), success=float(right))
        return prompts.RIGHT if right else prompts.WRONG
