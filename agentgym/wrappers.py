"""Text views of environments that speak in numbers: board games, grid worlds.

A view is two functions. `describe` writes what an agent sees, `parse` reads an agent's text as an action and
returns None for a text that is not a legal one. The wrapped environment is only asked and stepped, never
written to: rewards, ends and infos of the view are kept here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from agentgym.env import AECEnv, AgentObservation, action_text
from agentgym.messages import Action, AgentId, user
from agentgym.spaces import Text, agent_observation_space

Describe = Callable[[Any, AgentId], str]
Parse = Callable[[Any, AgentId, str], Any]


class TextAECWrapper(AECEnv):
    """A PettingZoo AEC environment whose agents read and write text.

    A text that `parse` refuses is a forfeit: everyone's episode ends, the mover gets `illegal_reward` (named
    "illegal") and the others nothing. Rewards of the game itself are named "outcome". `success` turns what an
    agent got in the whole episode into the number in `info["success"]`.
    """

    def __init__(
        self,
        env: Any,
        describe: Describe,
        parse: Parse,
        *,
        choices: Sequence[str] = (),
        prompt: str | None = None,
        illegal_reward: float = -1.0,
        success: Callable[[float], float] | None = None,
    ) -> None:
        """Wrap `env`; `choices` are the texts that an action mask is shown for (none: no mask)."""
        self.env = env
        self.possible_agents = list(env.possible_agents)
        self._describe = describe
        self._parse = parse
        self._choices = tuple(choices)
        self._prompt = prompt
        self._illegal_reward = illegal_reward
        self._success = success
        mask_size = len(self._choices) or None
        self._observation_spaces = {
            a: agent_observation_space(mask_size=mask_size) for a in self.possible_agents
        }
        self._action_spaces = {a: Text(choices=self._choices) for a in self.possible_agents}

    def observation_space(self, agent: AgentId) -> gymnasium.Space[Any]:
        """Return the space of the agent's messages, with a mask where there are choices."""
        return self._observation_spaces[agent]

    def action_space(self, agent: AgentId) -> gymnasium.Space[Any]:
        """Return the space of texts."""
        return self._action_spaces[agent]

    def system_prompt(self, agent: AgentId) -> str | None:
        """Return the prompt, which is the same for every agent."""
        return self._prompt

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Start the wrapped environment's next episode."""
        self.env.reset(seed=seed, options=options)
        self._forfeited = False
        self._totals: dict[AgentId, float] = dict.fromkeys(self.env.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.env.agents, 0.0)
        self.infos: dict[AgentId, dict[str, Any]] = {agent: {} for agent in self.env.agents}
        self._follow()

    def observe(self, agent: AgentId) -> AgentObservation:
        """Return the view of the agent whose turn it is; one that only waits or has ended sees nothing."""
        to_move = agent == self.agent_selection and not self._ended(agent)
        messages = [user(self._describe(self.env, agent))] if to_move else []
        observation: AgentObservation = {"messages": messages}
        if self._choices:
            legal = [to_move and self._parse(self.env, agent, text) is not None for text in self._choices]
            observation["action_mask"] = np.array(legal, dtype=np.int8)
        return observation

    def step(self, action: Action | None) -> None:
        """Play the text of the agent whose turn it is."""
        agent = self.agent_selection
        if self._ended(agent):
            self._leave(action)
            return
        if action is None:
            raise ValueError(f"{agent} has not ended and must answer with a text; got None")
        self._cumulative_rewards[agent] = 0.0
        self.infos[agent] = {}
        move = self._parse(self.env, agent, action_text(action))
        if move is None:
            self._forfeit(agent)
        else:
            self.env.step(move)
            self._follow()
            self._pay(dict(self.env.rewards), "outcome")

    def close(self) -> None:
        """Close the wrapped environment."""
        self.env.close()

    def _ended(self, agent: AgentId) -> bool:
        return bool(self.terminations[agent] or self.truncations[agent])

    def _leave(self, action: Action | None) -> None:
        """Take the dead step of an agent; after a forfeit the wrapped game has stopped and is not asked."""
        if self._forfeited:
            self._was_dead_step(action)
            return
        self.env.step(None)
        self._follow()
        self.rewards = dict.fromkeys(self.agents, 0.0)

    def _follow(self) -> None:
        """Copy who is there, whose turn it is and who has ended from the wrapped environment."""
        self.agents = list(self.env.agents)
        self.agent_selection = self.env.agent_selection
        self.terminations = {agent: bool(self.env.terminations[agent]) for agent in self.agents}
        self.truncations = {agent: bool(self.env.truncations[agent]) for agent in self.agents}
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = {agent: self._cumulative_rewards[agent] for agent in self.agents}
        self.infos = {agent: self.infos[agent] for agent in self.agents}

    def _forfeit(self, agent: AgentId) -> None:
        """End the episode because of the text of `agent`."""
        self._forfeited = True
        self.terminations = dict.fromkeys(self.agents, True)
        self.infos[agent]["metrics"] = {"illegal": 1.0}
        self._pay({agent: self._illegal_reward}, "illegal")
        self._deads_step_first()

    def _pay(self, rewards: dict[AgentId, float], part: str) -> None:
        """Book the rewards of one step, under a name, and the success of those who have ended."""
        self.rewards = {agent: float(rewards.get(agent, 0.0)) for agent in self.agents}
        self._accumulate_rewards()
        for agent, reward in self.rewards.items():
            self._totals[agent] += reward
            if reward:
                parts = self.infos[agent].setdefault("rewards", {})
                parts[part] = parts.get(part, 0.0) + reward
            if self._success is not None and self._ended(agent):
                self.infos[agent]["success"] = self._success(self._totals[agent])
