"""The environment `agentgym/PrisonersDilemma-v0`."""

from typing import Any

import gymnasium

from agentgym.env import AgentObservation, ParallelEnv, ParallelStart, ParallelStep, action_text
from agentgym.errors import ConfigError
from agentgym.messages import Action, AgentId, user
from agentgym.spaces import Text
from agentgym_envs.prisoners_dilemma import prompts
from agentgym_envs.prisoners_dilemma.rules import MOVES, POINTS, parse_move


class PrisonersDilemma(ParallelEnv):
    """Two players cooperate or defect at the same time, a few times in a row."""

    metadata: dict[str, Any] = {"name": "agentgym_prisoners_dilemma", "render_modes": []}  # noqa: RUF012

    def __init__(self, *, rounds: int = 3, format_penalty: float = 0.5) -> None:
        """Take the number of rounds, and the price of a text without a move."""
        if rounds < 1:
            raise ConfigError(f"rounds = {rounds}: needs at least 1")
        self.rounds, self.format_penalty = rounds, format_penalty
        self.possible_agents = ["player_0", "player_1"]
        self._action_spaces = {agent: Text(choices=list(MOVES)) for agent in self.possible_agents}

    def action_space(self, agent: AgentId) -> gymnasium.Space[Any]:
        """Return the space of texts."""
        return self._action_spaces[agent]

    def system_prompt(self, agent: AgentId) -> str:
        """Return the task, which is the same for both."""
        return prompts.system_prompt(self.rounds)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ParallelStart:
        """Open the first round; the game has no chance in it, so the seed changes nothing."""
        self.agents = list(self.possible_agents)
        self._round = 0
        observations: dict[AgentId, AgentObservation] = {
            agent: {"messages": [user(prompts.first())]} for agent in self.agents
        }
        return observations, {agent: {"legal": list(MOVES)} for agent in self.agents}

    def step(self, actions: dict[AgentId, Action]) -> ParallelStep:
        """Pay one round."""
        agents = self.agents
        named = {agent: parse_move(action_text(actions[agent])) for agent in agents}
        moves = {agent: move or "cooperate" for agent, move in named.items()}
        self._round += 1
        over = self._round >= self.rounds
        observations: dict[AgentId, AgentObservation] = {}
        infos: dict[AgentId, dict[str, Any]] = {}
        for agent, other in zip(agents, reversed(agents), strict=True):
            rewards = {"points": POINTS[moves[agent], moves[other]]}
            if named[agent] is None:
                rewards["format"] = -self.format_penalty
            observations[agent] = {"messages": [user(moves[other])]}
            infos[agent] = {
                "rewards": rewards,
                "metrics": {"cooperated": float(moves[agent] == "cooperate") / self.rounds},
                "legal": list(MOVES),
            }
        sums = {agent: float(sum(infos[agent]["rewards"].values())) for agent in agents}
        if over:
            self.agents = []
        return observations, sums, dict.fromkeys(agents, over), dict.fromkeys(agents, False), infos
