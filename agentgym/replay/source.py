"""A recorded episode, and the settings that it was played with."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym.config import EnvConfig, SamplingConfig, ServerConfig
from agentgym.coordinator.launch import checkpoint_models
from agentgym.coordinator.store import count_episodes, stored_episodes
from agentgym.episode import NOT_SAMPLED, Episode, Trajectory, Turn
from agentgym.episode_json import read_episodes
from agentgym.errors import ConfigError
from agentgym.messages import AgentId
from agentgym.policy_config import PolicyConfig
from agentgym.show import numbered


@dataclass(frozen=True, slots=True)
class Source:
    """What an episode was played with."""

    episode: Episode
    env: EnvConfig
    sampling: SamplingConfig
    server: ServerConfig
    policies: dict[str, PolicyConfig]
    models: dict[str, Path]
    """The folders of the policies that servers answer for; for the trained ones of a run its last checkpoint."""
    config: dict[str, Any]
    """All settings, as they were saved."""

    def policy_of(self, agent: AgentId) -> str:
        """Return who played an agent, by the name in the settings; "" where it is not in the record."""
        names = [t.policy for t in self.episode.trajectories if t.agent == agent]
        return names[0].partition("@")[0] if names else ""


def turns_of(episode: Episode, agent: AgentId) -> list[tuple[Trajectory, Turn]]:
    """Return the answers of an agent in their order, each with the trajectory that it is in."""
    return [(t, turn) for t in episode.trajectories if t.agent == agent for turn in t.turns]


def was_sampled(trajectory: Trajectory) -> bool:
    """Whether a policy server gave the answers; others came as words."""
    return bool((trajectory.versions != NOT_SAMPLED).any())


def read_source(path: Path, number: int) -> Source:
    """Read an episode of a file or of a run; `number` counts from 1, or from -1 backwards.

    Raises:
        ConfigError: there is no such file or episode, or the settings are not those of this version.
    """
    if path.is_dir():
        part = numbered(path, count_episodes(path), number)
        episode = next(stored_episodes(path, part)).episode
        config: dict[str, Any] = json.loads((path / "config.json").read_text())
    else:
        file = read_episodes(path)
        (record,) = file.records[numbered(path, len(file.records), number)]
        episode, config = record.episode, file.header.get("config", {})
    # Not validated as a whole: the policy that is to be trained may be scripted in an evaluation.
    try:
        env = EnvConfig.model_validate(config["env"])
        sampling = SamplingConfig.model_validate(config["sampling"])
        server = ServerConfig.model_validate(config["server"])
        policies = {name: PolicyConfig.model_validate(given) for name, given in config["policies"].items()}
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{path} does not say with which settings its episodes were played ({error}); give a run directory, or a "
            "file that `agentgym eval` or `agentgym fork` wrote"
        ) from error
    models = {name: Path(p.model or "") for name, p in policies.items() if p.kind == "model"}
    if path.is_dir():
        models |= checkpoint_models(path)
    models |= {name: models[p.pool] for name, p in policies.items() if p.pool is not None}
    return Source(episode, env, sampling, server, policies, models, config)
