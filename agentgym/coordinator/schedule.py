"""What each step of a run is: warm-up or reinforcement learning, how many groups, at which learning rate.

Steps count from 1: the first `warmup.steps` are supervised, the `run.steps` after them are reinforcement learning.
The weights after step n are version n; version 0 is the model folder's.
"""

import math
from dataclasses import dataclass

import numpy as np

from agentgym.config import Config
from agentgym.trainer_config import TrainerConfig


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of the plan."""

    number: int
    warmup: bool
    groups: int
    """Groups that its batch is made of."""
    group_size: int
    loss: str
    learning_rate: float
    updates: int
    publish: bool
    """Whether the policy servers load the weights after it."""
    capacity: int
    """Groups that may be played, waiting or in training while it is the next step."""


class Schedule:
    """The plan of a run."""

    def __init__(self, config: Config) -> None:
        """Make the plan of a configuration."""
        self._config = config
        self.warmup_steps = config.warmup.steps
        self.last_step = config.warmup.steps + config.run.steps

    def step(self, number: int) -> Step:
        """Return step `number`, from 1 on."""
        config = self._config
        if number <= self.warmup_steps:
            return Step(
                number=number,
                warmup=True,
                groups=config.warmup.episodes,
                group_size=1,
                loss="sft",
                learning_rate=warmup_rate(config, number),
                updates=1,
                publish=number == self.warmup_steps,
                capacity=2 * config.warmup.episodes,
            )
        return Step(
            number=number,
            warmup=False,
            groups=config.rollout.tasks_per_step,
            group_size=config.rollout.group_size,
            loss=config.algorithm.loss,
            learning_rate=learning_rate(config.trainer, number - self.warmup_steps, config.run.steps),
            updates=config.algorithm.updates,
            publish=True,
            capacity=(config.rollout.max_staleness + 1) * config.rollout.tasks_per_step,
        )

    def phase_end(self, number: int) -> int:
        """Return the last step of the phase that a step belongs to."""
        return self.warmup_steps if number <= self.warmup_steps else self.last_step


def learning_rate(config: TrainerConfig, step: int, steps: int) -> float:
    """Return the learning rate of step 1..steps of reinforcement learning: a linear rise, then the decay."""
    if step <= config.lr_warmup_steps:
        return config.learning_rate * step / (config.lr_warmup_steps + 1)
    if config.lr_decay == "constant":
        return config.learning_rate
    progress = (step - config.lr_warmup_steps - 1) / max(1, steps - config.lr_warmup_steps - 1)
    shape = 1 - progress if config.lr_decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.lr_min_ratio + (1 - config.lr_min_ratio) * shape)


def warmup_rate(config: Config, step: int) -> float:
    """Return the learning rate of a supervised step: a rise over a tenth of the warm-up, then a cosine to 0.1."""
    steps, rise = config.warmup.steps, max(1, config.warmup.steps // 10)
    if step <= rise:
        return config.warmup.learning_rate * step / rise
    progress = (step - rise) / max(1, steps - rise)
    return config.warmup.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


def task_seed(run_seed: int, env_key: int, task_index: int) -> int:
    """Return the seed for `env.reset`, equal for all members of a group; `env_key` is the CRC-32 of the env id."""
    return int(np.random.SeedSequence([run_seed, env_key, task_index]).generate_state(1)[0] >> 1)


def sampling_seeds(run_seed: int, group_id: int, size: int) -> list[int]:
    """Return a seed of its own for each member of a group, for scripted policies; a larger group begins alike."""
    return [int(n) >> 1 for n in np.random.SeedSequence([run_seed, group_id]).generate_state(size)]
