"""The environment `agentgym/Calculator-v0`."""

from typing import Any

from agentgym.errors import ConfigError
from agentgym.messages import Action, Observation, user
from agentgym.tools import ToolEnv, tool
from agentgym.toolsets import calculator
from agentgym_envs.calculator import prompts, rules


class Calculator(ToolEnv):
    """Work out expressions with a tool and submit the answers with another."""

    system_prompt = prompts.SYSTEM
    toolsets = (calculator.Calculator(),)
    max_tool_calls = 4
    _answer_is: calculator.Number | None

    def __init__(
        self, *, max_number: int = 20, max_terms: int = 3, questions: int = 1, format_penalty: float = 0.1
    ) -> None:
        """Take what questions are made of at most, how many there are, and what a turn without a call costs."""
        if max_number < 1 or max_terms < 2 or questions < 1:
            raise ConfigError(
                f"max_number = {max_number}, max_terms = {max_terms}, questions = {questions}: needs at least 1, 2, 1"
            )
        self.max_number = max_number
        self.max_terms = max_terms
        self.questions = questions
        self.format_penalty = format_penalty

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Ask the first question."""
        super().reset(seed=seed)
        self._answered = self._right = 0
        return self._ask(), {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Run the calls; after an answer ask the next question."""
        answered = self._answered
        messages, reward, terminated, truncated, info = super().step(action)
        if self._answered > answered and not terminated:
            messages = [*messages, user(self._ask())]
        return messages, reward, terminated, truncated, {**info, "success": self._right / self.questions}

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
        self._answered += 1
        self._right += right
        self._answer_is = None  # a second answer in the same turn is to no question
        if right:
            self.add_reward(success=1.0 / self.questions)
        if self._answered == self.questions:
            self.finish()
        return prompts.RIGHT if right else prompts.WRONG

    def _ask(self) -> str:
        expression = rules.make_question(self.np_random, max_number=self.max_number, max_terms=self.max_terms)
        self._answer_is = calculator.calculate(expression)
        return prompts.question(expression)
