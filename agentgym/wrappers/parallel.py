"""A PettingZoo environment for agents at once as text."""

from collections.abc import Mapping
from typing import Any

from agentgym.env import AgentObservation, ParallelEnv, ParallelStart, ParallelStep, action_text
from agentgym.messages import Action, AgentId
from agentgym.wrappers.referee import OTHERS_ILLEGAL
from agentgym.wrappers.seated import Seated


class TextParallelWrapper(Seated, ParallelEnv):
    """A `pettingzoo.ParallelEnv` whose agents read and write text; `agentgym.wrappers` says how.

    A step is played when the answers of all agents are legal; else all of them answer again.
    """

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ParallelStart:
        """Start the wrapped environment's next episode."""
        observations, _ = self.env.reset(seed=seed, options=options)
        self._referee.reset()
        self.agents = list(self.env.agents)
        infos: dict[AgentId, dict[str, Any]] = {agent: {} for agent in self.agents}
        return self._describe_all(observations, infos), infos

    def step(self, actions: Mapping[AgentId, Action]) -> ParallelStep:
        """Play the texts of all agents that are there."""
        acting = list(self.agents)
        silent = [agent for agent in acting if actions.get(agent) is None]
        if silent:
            raise ValueError(
                f"{', '.join(silent)} must answer with a text; answers came from {list(actions)}"
            )
        moves = {agent: self._parse(self.env, agent, action_text(actions[agent])) for agent in acting}
        infos: dict[AgentId, dict[str, Any]] = {agent: {} for agent in acting}
        if any(move is None for move in moves.values()):
            return self._refuse(moves, infos)
        self._referee.accept(acting)
        observations, rewards, terminations, truncations, _ = self.env.step(moves)
        self.agents = list(self.env.agents)
        ends = [{agent: bool(by.get(agent)) for agent in acting} for by in (terminations, truncations)]
        paid = {agent: float(rewards.get(agent, 0.0)) for agent in acting}
        for agent in acting:
            self._pay(agent, paid[agent], "outcome", infos[agent])
        return self._describe_all(observations, infos), paid, ends[0], ends[1], infos

    def _refuse(self, moves: Mapping[AgentId, Any], infos: dict[AgentId, dict[str, Any]]) -> ParallelStep:
        """Pay for the illegal answers; end the episode because of them, or ask everyone again."""
        paid = {a: self._referee.refuse(a, infos[a]) if move is None else 0.0 for a, move in moves.items()}
        over = self._referee.forfeited
        self.agents = [] if over else list(moves)
        views = {}
        for agent, move in moves.items():
            self._pay(agent, paid[agent], "illegal", infos[agent])
            legal = [] if over else self._offer(agent, infos[agent])
            told = self._referee.notice(legal) if move is None else OTHERS_ILLEGAL
            views[agent] = self._view(None if over else told, legal)
        return views, paid, dict.fromkeys(moves, over), dict.fromkeys(moves, False), infos

    def _describe_all(
        self, observations: Mapping[AgentId, Any], infos: dict[AgentId, dict[str, Any]]
    ) -> dict[AgentId, AgentObservation]:
        """Return the views of all agents in `infos`; one that has ended sees nothing."""
        return {
            agent: self._view(
                self._describe(self.env, agent, observations[agent]), self._offer(agent, infos[agent])
            )
            if agent in self.agents
            else self._view(None, ())
            for agent in infos
        }

    def _offer(self, agent: AgentId, info: dict[str, Any]) -> list[str]:
        """Write the legal choices into the info, and return them."""
        legal = self._legal(agent)
        if legal:
            info["legal"] = legal
        return legal
