"""A PettingZoo environment for agents by turns as text."""

from typing import Any

from agentgym.env import AECEnv, AgentObservation, action_text
from agentgym.messages import Action, AgentId
from agentgym.wrappers.seated import Seated


class TextAECWrapper(Seated, AECEnv):
    """A `pettingzoo.AECEnv` whose agents read and write text; `agentgym.wrappers` says how.

    An agent that must answer again stays the one whose turn it is.
    """

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Start the wrapped environment's next episode."""
        self.env.reset(seed=seed, options=options)
        self._referee.reset()
        self._cumulative_rewards = dict.fromkeys(self.env.agents, 0.0)
        self.infos: dict[AgentId, dict[str, Any]] = {agent: {} for agent in self.env.agents}
        self._follow()
        self._offer()

    def observe(self, agent: AgentId) -> AgentObservation:
        """Return the view of the agent whose turn it is; one that only waits or has ended sees nothing."""
        if agent != self.agent_selection or self._ended(agent):
            return self._view(None, ())
        text = self._notice or self._describe(self.env, agent, self.env.observe(agent))
        return self._view(text, self._choices_now)

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
            self._refuse(agent)
            return
        self._referee.accept([agent])
        self.env.step(move)
        self._follow()
        self._book(dict(self.env.rewards), "outcome")
        self._offer()

    def _ended(self, agent: AgentId) -> bool:
        return bool(self.terminations[agent] or self.truncations[agent])

    def _leave(self, action: Action | None) -> None:
        """Take the dead step of an agent; after a forfeit the wrapped game has stopped and is not asked."""
        if self._referee.forfeited:
            self._was_dead_step(action)
            return
        self.env.step(None)
        self._follow()
        self._offer()

    def _follow(self) -> None:
        """Copy who is there, whose turn it is and who has ended from the wrapped environment."""
        self.agents = list(self.env.agents)
        self.agent_selection = self.env.agent_selection
        self.terminations = {agent: bool(self.env.terminations[agent]) for agent in self.agents}
        self.truncations = {agent: bool(self.env.truncations[agent]) for agent in self.agents}
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = {agent: self._cumulative_rewards[agent] for agent in self.agents}
        self.infos = {agent: self.infos[agent] for agent in self.agents}

    def _offer(self) -> None:
        """Begin a turn of the agent whose it is now."""
        self._notice: str | None = None
        agent = self.agent_selection
        self._choices_now = [] if not self.agents or self._ended(agent) else self._legal(agent)
        if self._choices_now:
            self.infos[agent]["legal"] = self._choices_now

    def _refuse(self, agent: AgentId) -> None:
        """Pay for an illegal answer; end the episode because of it, or leave the turn open."""
        reward = self._referee.refuse(agent, self.infos[agent])
        if self._referee.forfeited:
            self.terminations = dict.fromkeys(self.agents, True)
        self._book({agent: reward}, "illegal")
        if self._referee.forfeited:
            self._deads_step_first()
        else:
            self._notice = self._referee.notice(self._choices_now)
            if self._choices_now:
                self.infos[agent]["legal"] = self._choices_now

    def _book(self, rewards: dict[AgentId, float], part: str) -> None:
        """Pay the rewards of one step."""
        self.rewards = {agent: float(rewards.get(agent, 0.0)) for agent in self.agents}
        self._accumulate_rewards()
        for agent, reward in self.rewards.items():
            self._pay(agent, reward, part, self.infos[agent])
