"""The environment `agentgym/GuessNumber-v0`."""

import time
from typing import Any

from agentgym.env import Env, action_text
from agentgym.errors import ConfigError
from agentgym.messages import Action, Observation
from agentgym_envs.guess_number import prompts
from agentgym_envs.guess_number.rules import Comparison, compare, parse_guess, possible


class GuessNumber(Env):
    """Find a hidden number from "higher" and "lower"."""

    def __init__(
        self,
        *,
        low: int = 1,
        high: int = 20,
        turns: int = 5,
        consistency_reward: float = 0.0,
        latency: float = 0.0,
    ) -> None:
        """Take the range, the number of guesses, a shaping reward, and seconds that each step sleeps."""
        if low > high or turns < 1:
            raise ConfigError(
                f"low = {low}, high = {high}, turns = {turns}: needs low <= high and turns >= 1"
            )
        self.low, self.high, self.turns = low, high, turns
        self.consistency_reward = consistency_reward
        self.latency = latency
        self.system_prompt = prompts.system_prompt(low, high)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Hide a number."""
        super().reset(seed=seed)
        self._target = int(self.np_random.integers(self.low, self.high + 1))
        self._answers: list[tuple[int, Comparison]] = []
        self._turn = 0
        return prompts.FIRST, {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Answer one guess."""
        if self.latency:
            time.sleep(self.latency)
        self._turn += 1
        guess = parse_guess(action_text(action))
        rewards: dict[str, float] = {}
        metrics: dict[str, float] = {}
        right = False
        if guess is None:
            text = prompts.NO_NUMBER
            metrics["unreadable"] = 1.0
        else:
            if self.consistency_reward and guess in possible(self.low, self.high, self._answers):
                rewards["consistent"] = self.consistency_reward
            answer = compare(guess, self._target)
            self._answers.append((guess, answer))
            right = answer == "equal"
            text = {"equal": prompts.RIGHT, "higher": prompts.HIGHER, "lower": prompts.LOWER}[answer]
        over = right or self._turn >= self.turns
        info: dict[str, Any] = {"rewards": rewards, "metrics": metrics}
        if right:
            rewards["success"] = 1.0
        if over:
            info["success"] = float(right)
            text = prompts.RIGHT if right else prompts.OVER
        return text, float(sum(rewards.values())), over, False, info
