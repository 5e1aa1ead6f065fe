"""A game of OpenSpiel as a PettingZoo environment: its action numbers, its texts as observations."""

from typing import Any

import gymnasium
import pyspiel

from agentgym.env import AECEnv
from agentgym.messages import AgentId
from agentgym.spaces import Text


def plays_by_turns(kind: pyspiel.GameType) -> bool:
    """Say whether players of this kind of game act one after the other, read text, and chance can be drawn outside."""
    return bool(
        kind.dynamics == pyspiel.GameType.Dynamics.SEQUENTIAL
        and kind.chance_mode != pyspiel.GameType.ChanceMode.SAMPLED_STOCHASTIC
        and (kind.provides_information_state_string or kind.provides_observation_string)
    )


class SpielGame(AECEnv):
    """One player is one agent, "player_0" and so on; chance draws from the seed of `reset`."""

    def __init__(self, game: pyspiel.Game) -> None:
        """Take a game for which `plays_by_turns` holds."""
        self.game = game
        self.possible_agents = [f"player_{player}" for player in range(game.num_players())]
        kind = game.get_type()
        hidden = kind.information == pyspiel.GameType.Information.IMPERFECT_INFORMATION
        self._history = kind.provides_information_state_string and (
            hidden or not kind.provides_observation_string
        )
        self._spaces = {
            agent: (Text(), gymnasium.spaces.Discrete(game.num_distinct_actions()))
            for agent in self.possible_agents
        }

    def observation_space(self, agent: AgentId) -> gymnasium.Space[Any]:
        """Return the space of texts."""
        return self._spaces[agent][0]

    def action_space(self, agent: AgentId) -> gymnasium.Space[Any]:
        """Return the space of action numbers."""
        return self._spaces[agent][1]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Start a game; without a seed the next one of the same stream."""
        if seed is not None or not hasattr(self, "_rng"):
            self._rng, _ = gymnasium.utils.seeding.np_random(seed)
        self.agents = list(self.possible_agents)
        self.state = self.game.new_initial_state()
        self._returns = [0.0] * len(self.agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[AgentId, dict[str, Any]] = {agent: {} for agent in self.agents}
        self.agent_selection = self.agents[0]
        self._go_on()

    def observe(self, agent: AgentId) -> Any:
        """Return what OpenSpiel writes for the player: what it knows where cards are hidden, else the state."""
        player = self.possible_agents.index(agent)
        return (
            self.state.information_state_string(player)
            if self._history
            else self.state.observation_string(player)
        )

    def step(self, action: Any) -> None:
        """Play the action of the agent whose turn it is."""
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self.state.apply_action(int(action))
        self._go_on()
        self._accumulate_rewards()
        self._deads_step_first()

    def legal_texts(self, agent: AgentId) -> dict[str, int]:
        """Return the names and numbers of the agent's legal actions; none where it is another's turn."""
        player = self.possible_agents.index(agent)
        if self.state.is_terminal() or self.state.current_player() != player:
            return {}
        return {self.state.action_to_string(player, action): action for action in self.state.legal_actions()}

    def _go_on(self) -> None:
        """Let chance play, pay what fell due, find whose turn it is."""
        while self.state.is_chance_node():
            actions, shares = zip(*self.state.chance_outcomes(), strict=True)
            self.state.apply_action(int(self._rng.choice(actions, p=shares)))
        returns = list(self.state.returns())
        paid = (now - before for now, before in zip(returns, self._returns, strict=True))
        self.rewards = dict(zip(self.possible_agents, paid, strict=True))
        self._returns = returns
        if self.state.is_terminal():
            self.terminations = dict.fromkeys(self.agents, True)
        else:
            self.agent_selection = self.possible_agents[self.state.current_player()]
