"""The environment behind `textarena:ID`."""

import functools
import importlib
from typing import Any

import numpy as np
import textarena
from textarena.envs.registration import ENV_REGISTRY

from agentgym.env import AECEnv, AgentObservation, action_text
from agentgym.messages import Action, AgentId, user
from agentgym_envs.global_random import GlobalRandom
from agentgym_envs.textarena.games import PLAYERS

YOUR_TURN = "[GAME] It is your turn."
"""What an agent hears whom the game asks without a word; some games do so after an illegal move."""


class TextArena(AECEnv):
    """A game of textarena; see the package's docstring."""

    metadata: dict[str, Any] = {  # noqa: RUF012  as in PettingZoo
        "name": "textarena",
        "render_modes": [],
        "is_parallelizable": False,
    }

    def __init__(self, name: str, *, num_players: int | None = None, **settings: Any) -> None:
        """Take the game's id, how many play (None: the fewest that can) and the game's own settings."""
        self._new_game = functools.partial(_build, name, settings)
        self._random = GlobalRandom()
        with self._random.borrowed():
            self._game = self._new_game()
        self.possible_agents = [f"player_{seat}" for seat in range(num_players or PLAYERS[name])]
        self._rng = np.random.default_rng()

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Start a game."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        game_seed = int(self._rng.integers(2**32))
        self._random.seed(game_seed)
        with self._random.borrowed():
            self._game = (
                self._new_game()
            )  # some games keep something, a deck in its order, over their own reset
            self._game.reset(num_players=len(self.possible_agents), seed=game_seed)
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[AgentId, dict[str, Any]] = {agent: {} for agent in self.agents}
        self._heard: dict[AgentId, str] = dict.fromkeys(self.agents, "")
        self._listen()

    def observe(self, agent: AgentId) -> AgentObservation:
        """Return what the agent has not answered yet; the same until it does."""
        heard = self._heard[agent]
        return {"messages": [user(heard)] if heard else []}

    def step(self, action: Action | None) -> None:
        """Hand the agent's text to the game."""
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        if action is None:
            raise ValueError(f"{agent} has not ended and must answer with a text; got None")
        self._heard[agent] = ""
        self._cumulative_rewards[agent] = 0.0
        self.infos[agent] = {}
        self._clear_rewards()
        with self._random.borrowed():
            ended, _ = self._game.step(action_text(action))
        if ended:
            self._finish()
        else:
            self._listen()

    def _listen(self) -> None:
        """Fetch, once, what the game says to the player whose turn it is."""
        seat, said = self._game.get_observation()
        names = self._game.state.role_mapping
        agent = self.possible_agents[seat]
        lines = [
            f"[{'GAME' if speaker == textarena.GAME_ID else names.get(speaker, f'Player {speaker}')}] {text}"
            for speaker, text, kind in said
            if not (speaker == seat and kind is textarena.ObservationType.PLAYER_ACTION)
        ]
        self._heard[agent] = "\n".join(lines) or YOUR_TURN
        self.agent_selection = agent

    def _finish(self) -> None:
        """Pay everyone what the game says at its end."""
        rewards, details = self._game.close()
        for seat, agent in enumerate(self.possible_agents):
            reward = (rewards or {}).get(seat, 0.0)
            if isinstance(
                reward, str
            ):  # a few one-player games give the reason of an illegal move for its reward
                reward = 0.0
            reward = float(reward)
            self.rewards[agent] = reward
            worth = reward if len(self.possible_agents) == 1 else (reward + 1.0) / 2.0
            self.infos[agent] = {
                "rewards": {"outcome": reward},
                "success": min(max(worth, 0.0), 1.0),
                "metrics": {"illegal": float(details[seat]["invalid_move"])},
            }
        self.terminations = dict.fromkeys(self.agents, True)
        self._accumulate_rewards()
        self._deads_step_first()


def _build(name: str, settings: dict[str, Any]) -> Any:
    """Return the game without what textarena wraps around its observations: they would repeat the history."""
    found = ENV_REGISTRY[name]
    module, _, attribute = found.entry_point.partition(":")
    game = getattr(importlib.import_module(module), attribute)(**{**found.kwargs, **settings})
    for wrapper in found.default_wrappers or ():
        if issubclass(wrapper, textarena.ActionWrapper):
            game = wrapper(game)
    return game
