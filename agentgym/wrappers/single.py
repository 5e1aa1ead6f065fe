"""A Gymnasium environment as text."""

from collections.abc import Callable
from typing import Any

from agentgym.env import Env, action_text
from agentgym.messages import SINGLE_AGENT, Action
from agentgym.spaces import Text
from agentgym.wrappers.referee import Choices, Illegal, Referee

Describe = Callable[[Any, Any], str]
"""(env, observation) to what the agent reads."""
Parse = Callable[[Any, str], Any]
"""(env, text) to an action; None where the text is no legal one."""
Success = Callable[[Any, float], float]
"""(env, sum of its rewards) to the success so far, 0 to 1."""


class TextWrapper(Env):
    """A `gymnasium.Env` whose agent reads and writes text; `agentgym.wrappers` says how.

    Where there are `choices`, `info["legal"]` lists those that are legal now.
    """

    def __init__(
        self,
        env: Any,
        describe: Describe,
        parse: Parse,
        *,
        choices: Choices = (),
        prompt: str | None = None,
        success: Success | None = None,
        illegal: Illegal = "retry",
        illegal_reward: float = -1.0,
        max_retries: int = 2,
    ) -> None:
        """Wrap `env`.

        Args:
            env: The environment, with its own wrappers (its time limit stays in force).
            describe: Writes what the agent sees.
            parse: Reads an answer.
            choices: All answers that can ever be legal, where they can be listed; `parse` decides which are now.
                Or a function (env) to the legal ones, where the menu changes.
            prompt: The system prompt.
            success: Says how well the agent did.
            illegal: The rule for illegal answers.
            illegal_reward: What it pays.
            max_retries: Illegal answers in one turn that "retry" allows.
        """
        self.env = env
        self.system_prompt = prompt
        self._describe = describe
        self._parse = parse
        self._success = success
        self._referee = Referee(choices, illegal, illegal_reward, max_retries)
        self.action_space = Text(choices=self._referee.choices)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start the wrapped environment's next episode."""
        super().reset(seed=seed)
        observation, _ = self.env.reset(seed=seed, options=options)
        self._referee.reset()
        info: dict[str, Any] = {}
        self._offer(info)
        return self._describe(self.env, observation), info

    def step(self, action: Action) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play a text."""
        move = self._parse(self.env, action_text(action))
        info: dict[str, Any] = {}
        if move is None:
            reward, truncated = self._referee.refuse(SINGLE_AGENT, info), False
            terminated = self._referee.forfeited
            view = self._referee.notice(self._legal)
        else:
            self._referee.accept([SINGLE_AGENT])
            observation, reward, terminated, truncated, _ = self.env.step(move)
            view = self._describe(self.env, observation)
        self._referee.pay(SINGLE_AGENT, float(reward), "illegal" if move is None else "outcome", info)
        if not (terminated or truncated):
            self._offer(info)
        if (success := self._success) is not None:
            info["success"] = self._referee.success(SINGLE_AGENT, lambda outcome: success(self.env, outcome))
        return view, float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        """Close the wrapped environment."""
        self.env.close()

    def _offer(self, info: dict[str, Any]) -> None:
        """Write the legal answers into the info, where they are known."""
        self._legal = self._referee.legal(self.env, parse=self._parse)
        if self._legal:
            info["legal"] = self._legal
