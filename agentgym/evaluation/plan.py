"""What an evaluation plays: which policies, which tasks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from agentgym.config import Config
from agentgym.coordinator.launch import checkpoint_models
from agentgym.coordinator.lineup import Lineups
from agentgym.coordinator.schedule import sampling_seeds, task_seed
from agentgym.errors import ConfigError
from agentgym.policy_config import PolicyConfig
from agentgym.protocol import Lease


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be played."""

    config: Config
    """Its policies are those that play, trained or not."""
    episodes: int
    group: int
    """Episodes of each task."""

    @property
    def header(self) -> dict[str, Any]:
        """What an evaluation must share with another one to go on with its file; the number of episodes may grow."""
        return {"config": self.config.model_dump(mode="json"), "group": self.group}

    def episode_keys(self) -> list[tuple[int, int]]:
        """Return the task and the member of each episode."""
        return [divmod(number, self.group) for number in range(self.episodes)]

    def leases(self, lineups: Lineups) -> Iterator[Lease]:
        """Yield the episodes."""
        seed, env_key = self.config.run.seed, crc32(f"eval:{self.config.env.id}".encode())
        for number, (task, member) in enumerate(self.episode_keys()):
            tasks_seed = task_seed(seed, env_key, task)
            yield Lease(
                lease_id=number,
                task_index=task,
                seed=tasks_seed,
                group_id=task,
                member=member,
                sampling_seed=sampling_seeds(seed, task, self.group)[member],
                policies=lineups.draw(group_id=task, task_index=task, seed=tasks_seed),
            )


def with_policies(config: Config, players: Sequence[str], checkpoint: Path | None) -> Config:
    """Return a configuration in which others play: `players` as "NAME=WHO", the last checkpoint of a run.

    Raises:
        ConfigError: there is no such policy or checkpoint, or it is given twice.
    """
    who = {}
    for player in players:
        name, equals, value = player.partition("=")
        if not equals or not value:
            raise ConfigError(
                f"--policy {player!r} is not of the form NAME=WHO, as in {config.learner}=expert"
            )
        if name not in config.policies:
            raise ConfigError(
                f"--policy {player}: there is no policy {name!r}; known: {', '.join(config.policies)}"
            )
        is_model = Path(value).is_dir()
        who[name] = PolicyConfig(model=value) if is_model else PolicyConfig(scripted=value)
    if checkpoint is not None:
        models = checkpoint_models(checkpoint)
        if not models:
            raise ConfigError(f"{checkpoint} has no checkpoint yet")
        if len(models) == 1:  # whatever it was called there
            models = {config.learner: next(iter(models.values()))}
        for name, model in models.items():
            if name in who:
                raise ConfigError(f"--checkpoint and --policy both say who plays as {name!r}; give one")
            if name not in config.policies:
                raise ConfigError(
                    f"{checkpoint} has trained a policy {name!r}, which the configuration has not"
                )
            who[name] = PolicyConfig(model=str(model))
    # Not validated again: a policy that is to be trained may be scripted here.
    return config.model_copy(update={"policies": {**config.policies, **who}})
