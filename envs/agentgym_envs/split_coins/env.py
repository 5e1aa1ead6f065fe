"""The environment `agentgym/SplitCoins-v0`."""

from typing import Any

import gymnasium

from agentgym.env import AgentObservation, ParallelEnv, ParallelStart, ParallelStep, action_text
from agentgym.errors import ConfigError
from agentgym.messages import Action, AgentId, user
from agentgym.spaces import Text
from agentgym_envs.split_coins import prompts
from agentgym_envs.split_coins.rules import agree, parse_claim, payoff


class SplitCoins(ParallelEnv):
    """Two players talk at the same time, then claim their shares."""

    metadata: dict[str, Any] = {"name": "agentgym_split_coins", "render_modes": []}  # noqa: RUF012

    def __init__(self, *, coins: int = 10, rounds: int = 2, format_penalty: float = 0.1) -> None:
        """Take the number of coins and rounds, and the price of a last text without a claim."""
        if coins < 1 or rounds < 1:
            raise ConfigError(f"coins = {coins}, rounds = {rounds}: needs at least 1 of each")
        self.coins, self.rounds, self.format_penalty = coins, rounds, format_penalty
        self.possible_agents = ["player_0", "player_1"]
        choices = [f"claim {number}" for number in range(coins + 1)]
        self._action_spaces = {agent: Text(choices=choices) for agent in self.possible_agents}

    def action_space(self, agent: AgentId) -> gymnasium.Space[Any]:
        """Return the space of texts."""
        return self._action_spaces[agent]

    def system_prompt(self, agent: AgentId) -> str:
        """Return the task, which is the same for both."""
        return prompts.system_prompt(self.coins, self.rounds)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ParallelStart:
        """Open the first round; the game has no chance in it, so the seed changes nothing."""
        self.agents = list(self.possible_agents)
        self._round = 0
        observations = {agent: {"messages": [user(prompts.first())]} for agent in self.agents}
        return observations, {agent: {} for agent in self.agents}

    def step(self, actions: dict[AgentId, Action]) -> ParallelStep:
        """Let both speak; in the last round, pay."""
        agents = self.agents
        texts = {agent: action_text(actions[agent]) for agent in agents}
        self._round += 1
        over = self._round >= self.rounds
        infos = self._settle(texts) if over else {agent: {} for agent in agents}
        observations: dict[AgentId, AgentObservation] = {
            agent: {"messages": [user(prompts.words_of_other(texts[other]))]}
            for agent, other in zip(agents, reversed(agents), strict=True)
        }
        rewards = {agent: float(sum(infos[agent].get("rewards", {}).values())) for agent in agents}
        terminations = dict.fromkeys(agents, over)
        truncations = dict.fromkeys(agents, False)
        if over:
            self.agents = []
        return observations, rewards, terminations, truncations, infos

    def _settle(self, texts: dict[AgentId, str]) -> dict[AgentId, dict[str, Any]]:
        """Pay the claims in the texts of the last round."""
        claims = {agent: parse_claim(text, self.coins) for agent, text in texts.items()}
        everyone = list(claims.values())
        infos: dict[AgentId, dict[str, Any]] = {}
        for agent, claim in claims.items():
            rewards = {"coins": payoff(claim, everyone, self.coins)}
            if claim is None:
                rewards["format"] = -self.format_penalty
            infos[agent] = {
                "rewards": rewards,
                "success": float(agree(everyone, self.coins)),
                "metrics": {"claim": float(claim or 0)},
            }
        return infos
