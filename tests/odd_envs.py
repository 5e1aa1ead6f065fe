"""An environment as a user writes one, environments that go wrong, and scripted policies for them.

Whole runs find them as "odd_envs:NAME" in their working directory, registered nowhere.
"""

import threading
import time
from typing import Any

import gymnasium
import numpy as np

LETTERS = "abcde"


class Letters(gymnasium.Env[str, str]):
    """Repeat the letter that is shown, three times; a step may be slow."""

    def __init__(self, latency: float = 0.0) -> None:
        self.latency = latency

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.seed, self.turn = seed or 0, 0
        return self.show(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self.latency)
        right = action == self.letter
        self.turn += 1
        return self.show(), float(right), self.turn == 3, False, {"success": float(right)}

    def show(self) -> str:
        self.letter = str(self.np_random.choice(list(LETTERS)))
        return self.letter


class BreaksInStep(Letters):
    """Every play fails in its first step."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        raise KeyError("letter")


class NeverReturns(Letters):
    """The first step of every play waits for ever."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        threading.Event().wait()
        return super().step(action)


class BreaksSometimes(Letters):
    """A play of a seed that can be divided by four fails."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        if seed is not None and seed % 4 == 0:
            raise ValueError(f"no letters for seed {seed}")
        return super().reset(seed=seed, options=options)


class GrowsTooLong(Letters):
    """What is shown in the second turn fits into no context."""

    def show(self) -> str:
        letter = super().show()
        return letter * 3000 if self.turn else letter


class BeginsTooLong(Letters):
    """What is shown first fits into no context."""

    def show(self) -> str:
        return super().show() * 3000


class Scripted:
    """The base of the policies: no state."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def reset(self, agent: str, seed: int) -> None:
        pass


class Parrot(Scripted):
    """Repeats what was shown, or, one time in four, says another letter."""

    def act(self, messages: list[Any], tools: list[Any], info: dict[str, Any]) -> dict[str, Any]:
        wrong = self.rng.random() < 0.25
        return {"role": "assistant", "content": "x" if wrong else messages[-1]["content"][:1]}


class Raises(Scripted):
    """Cannot answer."""

    def act(self, messages: list[Any], tools: list[Any], info: dict[str, Any]) -> dict[str, Any]:
        raise LookupError("no answer in the book")


class BadCaller(Scripted):
    """Calls a tool that is not there, then one with broken JSON, then with wrong arguments, then submits."""

    CALLS = (
        ("add", '{"a": 1}'),
        ("calculate", '{"expression": "1+'),
        ("calculate", '{"sum": 3}'),
        ("submit", '{"answer": 0}'),
    )

    def act(self, messages: list[Any], tools: list[Any], info: dict[str, Any]) -> dict[str, Any]:
        turn = sum(message["role"] == "assistant" for message in messages)
        name, arguments = self.CALLS[turn]
        call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
