"""What the two multi-agent text wrappers share: spaces, the prompt, what an agent is offered and told."""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from agentgym.env import AgentObservation
from agentgym.messages import AgentId, user
from agentgym.spaces import Text, agent_observation_space
from agentgym.wrappers.referee import Choices, Illegal, Referee

Describe = Callable[[Any, AgentId, Any], str]
"""(env, agent, observation) to what the agent reads."""
Parse = Callable[[Any, AgentId, str], Any]
"""(env, agent, text) to an action; None where the text is no legal one."""
Success = Callable[[Any, AgentId, float], float]
"""(env, agent, sum of the rewards that env gave it) to its success so far, 0 to 1."""


class Seated:
    """A view of a PettingZoo environment; `agentgym.wrappers` says how illegal answers are dealt with.

    Where there are `choices`, `info["legal"]` of an agent that must answer lists those that are legal now, and where
    all of them are listed, observations have an "action_mask" over them.
    """

    def __init__(
        self,
        env: Any,
        describe: Describe,
        parse: Parse,
        *,
        choices: Choices = (),
        prompt: str | Callable[[AgentId], str] | None = None,
        success: Success | None = None,
        illegal: Illegal = "retry",
        illegal_reward: float = -1.0,
        max_retries: int = 2,
    ) -> None:
        """Wrap `env`.

        Args:
            env: The environment.
            describe: Writes what an agent sees.
            parse: Reads an answer.
            choices: All answers that can ever be legal, where they can be listed; `parse` decides which are now.
                Or a function (env, agent) to the legal ones, where the menu changes.
            prompt: The system prompt, or a function of the agent where it is not the same for all.
            success: Says how well an agent did.
            illegal: The rule for illegal answers.
            illegal_reward: What it pays.
            max_retries: Illegal answers in one turn that "retry" allows.
        """
        self.env = env
        self.possible_agents: list[AgentId] = list(env.possible_agents)
        self._describe = describe
        self._parse = parse
        self._prompt = prompt
        self._success = success
        self._referee = Referee(choices, illegal, illegal_reward, max_retries)
        mask_size = len(self._referee.choices) or None
        self._observation_spaces = {
            a: agent_observation_space(mask_size=mask_size) for a in self.possible_agents
        }
        self._action_spaces = {a: Text(choices=self._referee.choices) for a in self.possible_agents}

    def observation_space(self, agent: AgentId) -> gymnasium.Space[Any]:
        """Return the space of the agent's messages, with a mask where there are choices."""
        return self._observation_spaces[agent]

    def action_space(self, agent: AgentId) -> gymnasium.Space[Any]:
        """Return the space of texts."""
        return self._action_spaces[agent]

    def system_prompt(self, agent: AgentId) -> str | None:
        """Return the agent's prompt."""
        return self._prompt(agent) if callable(self._prompt) else self._prompt

    def close(self) -> None:
        """Close the wrapped environment."""
        self.env.close()

    def _legal(self, agent: AgentId) -> list[str]:
        """Return the answers that are legal for an agent now."""
        return self._referee.legal(self.env, agent, parse=self._parse)

    def _view(self, text: str | None, legal: Sequence[str]) -> AgentObservation:
        """Return the observation of an agent that reads `text`, or nothing."""
        view: AgentObservation = {"messages": [] if text is None else [user(text)]}
        if self._referee.choices:
            view["action_mask"] = np.array([choice in legal for choice in self._referee.choices], np.int8)
        return view

    def _pay(self, agent: AgentId, reward: float, part: str, info: dict[str, Any]) -> None:
        """Book the reward of a step, and the agent's success so far."""
        self._referee.pay(agent, reward, part, info)
        if (success := self._success) is not None:
            info["success"] = self._referee.success(agent, lambda outcome: success(self.env, agent, outcome))
