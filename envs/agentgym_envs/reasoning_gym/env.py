"""The environments behind `reasoning_gym:NAME`: one that answers in text, one with tools."""

from collections.abc import Callable, Sequence
from typing import Any

from reasoning_gym.utils import extract_answer

from agentgym.env import Env, action_text
from agentgym.errors import ConfigError
from agentgym.messages import Action, Observation
from agentgym.tools import ToolEnv, tool
from agentgym.toolsets import Calculator, Python
from agentgym_envs.reasoning_gym import prompts
from agentgym_envs.reasoning_gym.verifier import Questions

TOOLSETS: dict[str, Callable[[], Any]] = {"calculator": Calculator, "python": Python}
"""What `tools` may name."""


def make(name: str, *, tools: Sequence[str] = (), **settings: Any) -> Env:
    """Return the environment of a data set.

    Args:
        name: The data set.
        tools: Names in `TOOLSETS`; with any, the answer is given by the tool `submit`.
        settings: The data set's own settings.
    """
    strange = [one for one in tools if one not in TOOLSETS]
    if strange:
        raise ConfigError(
            f"reasoning_gym: there are no tools {', '.join(strange)}; choose from {list(TOOLSETS)}"
        )
    questions = Questions(name, settings)
    return QuestionWithTools(questions, [TOOLSETS[one]() for one in tools]) if tools else Question(questions)


class Question(Env):
    """One question, one answer as text."""

    system_prompt = prompts.ANSWER

    def __init__(self, questions: Questions) -> None:
        """Take the data set."""
        self._questions = questions

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Ask a question."""
        super().reset(seed=seed)
        self._entry = self._questions.draw(self.np_random)
        return self._entry["question"], {"answer": self._entry["answer"]}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Score the answer."""
        text = action_text(action)
        score = self._questions.score(extract_answer(text) or text.strip(), self._entry)
        return "", score, True, False, {"rewards": {"verifier": score}, "success": float(score == 1.0)}


class QuestionWithTools(ToolEnv):
    """One question; the agent may compute before it submits."""

    system_prompt = prompts.SUBMIT

    def __init__(self, questions: Questions, toolsets: Sequence[Any]) -> None:
        """Take the data set and the tools beside `submit`."""
        self._questions = questions
        self.toolsets = toolsets

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Ask a question."""
        super().reset(seed=seed)
        self._entry = self._questions.draw(self.np_random)
        return self._entry["question"], {"answer": self._entry["answer"]}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Run the calls; who never submits has not succeeded."""
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {"success": 0.0, **info}

    @tool
    def submit(self, answer: str) -> str:
        """Give the final answer.

        Args:
            answer: The answer, and nothing else.
        """
        score = self._questions.score(answer.strip(), self._entry)
        self.finish(success=float(score == 1.0), verifier=score)
        return prompts.RECORDED
