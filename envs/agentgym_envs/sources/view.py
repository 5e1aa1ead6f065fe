"""What a ready text view of another library's environment consists of."""

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentgym.messages import AgentId
from agentgym.wrappers.referee import Choices

_AROUND_ANSWERS = string.whitespace + ".!\"'`"


@dataclass(frozen=True, slots=True)
class View:
    """A pair of `describe` and `parse` with what belongs to it; see `agentgym.wrappers` for their arguments."""

    prompt: str | Callable[[AgentId], str]
    choices: Choices
    describe: Callable[..., str]
    parse: Callable[..., Any]
    success: Callable[..., float]

    def wrap(self, wrapper: Callable[..., Any], env: Any, rule: dict[str, Any]) -> Any:
        """Return `env` in this view; `rule` is how illegal answers are dealt with."""
        return wrapper(
            env,
            self.describe,
            self.parse,
            choices=self.choices,
            prompt=self.prompt,
            success=self.success,
            **rule,
        )


def take_rule(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that concern illegal answers, and remove them from `kwargs`."""
    names = ("illegal", "illegal_reward", "max_retries")
    return {name: kwargs.pop(name) for name in names if name in kwargs}


def chosen(text: str, choices: Sequence[str]) -> int | None:
    """Return which of the choices a text is; space and punctuation around it do not matter.

    Nor does the case, unless two choices differ by nothing else.
    """
    answer = text.strip(_AROUND_ANSWERS)
    if answer in choices:
        return choices.index(answer)
    alike = [i for i, choice in enumerate(choices) if choice.casefold() == answer.casefold()]
    return alike[0] if len(alike) == 1 else None


def won(outcome: float) -> float:
    """Return the success of a game that was won (1), drawn (0.5) or lost (0)."""
    return 0.5 + 0.5 * (outcome > 0) - 0.5 * (outcome < 0)
