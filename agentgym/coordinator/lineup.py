"""Who plays whom in a group: drawn once for all of its members, from the run's seed and the group's number alone."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from zlib import crc32

import numpy as np

from agentgym.config import Config
from agentgym.errors import ConfigError, RunError
from agentgym.messages import SINGLE_AGENT, AgentId
from agentgym.policy_config import Choice, weights_of
from agentgym.registry import load_attribute, make, spec

EVERYBODY_ELSE = "*"
REDRAWS = 100
"""Draws without a trained policy after which a mapping is given up."""


class Lineups:
    """Draws the policies of each group's agents."""

    def __init__(self, config: Config, agents: Sequence[AgentId]) -> None:
        """Know the environment's `agents`; empty where it does not name them beforehand.

        Raises:
            ConfigError: the mapping names an agent that is not there, or needs agents where none are named.
        """
        self._config = config
        self._agents = list(agents)
        self._rest: Choice = config.policy_mapping.get(EVERYBODY_ELSE, config.learner)
        strangers = config.policy_mapping.keys() - {EVERYBODY_ELSE, *agents}
        if agents and strangers:
            raise ConfigError(
                f"policy_mapping names {min(strangers)!r}; the agents of {config.env.id} are {', '.join(agents)}"
            )
        for key in ("seat_rotation", "policy_mapping_fn"):
            if getattr(config, key) and not agents:
                raise ConfigError(f"{key} needs to know the agents; {config.env.id} has no `possible_agents`")
        self._function = None
        if config.policy_mapping_fn is not None:
            self._function = load_attribute(config.policy_mapping_fn)
            if not callable(self._function):
                raise ConfigError(f"policy_mapping_fn = {config.policy_mapping_fn!r} is not a function")

    def draw(self, *, group_id: int, task_index: int, seed: int) -> dict[AgentId, str]:
        """Return the policy of each agent; "*" is every agent that the environment did not name.

        Raises:
            RunError: no agent plays a policy that is trained, or `policy_mapping_fn` went wrong.
        """

        @cache
        def rng() -> np.random.Generator:
            return np.random.default_rng([self._config.run.seed, crc32(b"lineup"), group_id])

        info = {"group_id": group_id, "task_index": task_index, "seed": seed}
        for _ in range(REDRAWS if self._function is None else 1):
            lineup = self._drawn(rng, group_id) if self._function is None else self._asked(info)
            if any(lineup[agent] in self._config.policies_to_train for agent in self._agents or lineup):
                return lineup
        raise RunError(
            f"in group {group_id} no agent of {self._config.env.id} plays a policy of policies_to_train = "
            f"{self._config.policies_to_train}: {lineup}"
        )

    def _drawn(self, rng: Callable[[], np.random.Generator], group_id: int) -> dict[AgentId, str]:
        mapping = self._config.policy_mapping
        seats = self._agents or [agent for agent in mapping if agent != EVERYBODY_ELSE]
        choices = [mapping.get(agent, self._rest) for agent in seats]
        if self._config.seat_rotation:
            shift = group_id % len(seats)
            choices = choices[-shift:] + choices[:-shift]
        names = [_pick(choice, rng) for choice in (*choices, self._rest)]
        return dict(zip((*seats, EVERYBODY_ELSE), names, strict=True))

    def _asked(self, info: Mapping[str, int]) -> dict[AgentId, str]:
        name = self._config.policy_mapping_fn
        assert self._function is not None
        lineup = {EVERYBODY_ELSE: self._config.learner}
        for agent in self._agents:
            try:
                policy = self._function(agent, dict(info))
            except Exception as error:  # the boundary to code that users wrote
                raise RunError(f"{name}({agent!r}, {info}) raised {type(error).__name__}: {error}") from error
            if policy not in self._config.policies:
                raise RunError(
                    f"{name}({agent!r}, {info}) returned {policy!r}; "
                    f"known policies: {sorted(self._config.policies)}"
                )
            lineup[agent] = policy
        return lineup


def agents_of(config: Config) -> list[AgentId]:
    """Make the environment of a configuration once, and return its agents; none where it names none beforehand.

    Raises:
        ConfigError: there is no such environment, or it cannot be made.
    """
    env = make(config.env.id, **config.env.kwargs)
    single = spec(config.env.id).kind == "single"
    agents = [SINGLE_AGENT] if single else list(getattr(env, "possible_agents", ()))
    env.close()
    return agents


def _pick(choice: Choice, rng: Callable[[], np.random.Generator]) -> str:
    names, weights = zip(*weights_of(choice).items(), strict=True)
    return str(rng().choice(names, p=weights)) if len(names) > 1 else str(names[0])
