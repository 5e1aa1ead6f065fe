"""Steps that are assembled from groups, and what is read off their samples."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from builders import ANSWER, group_of

from agentgym.algorithm_config import AlgorithmConfig
from agentgym.batch import Sample
from agentgym.coordinator.assemble import NOTHING_YET, Assembled, assemble, batch_of
from agentgym.coordinator.groups import Group
from agentgym.coordinator.schedule import Step
from agentgym.episode import Episode
from agentgym.protocol import BatchHeader
from agentgym.trainer_config import TrainerConfig
from agentgym.wire import Arrays


def assembled(
    *groups: Group,
    version: int = 0,
    max_staleness: int = 1,
    warmup: bool = False,
    baselines: Mapping[str, float] = NOTHING_YET,
    **algorithm: Any,
) -> Assembled:
    settings = AlgorithmConfig.model_validate(
        {"normalize_batch": False, "advantage": "group_mean", **algorithm}
    )
    return assemble(
        groups,
        policies=["learner"],
        algorithm=settings,
        max_tokens=4,
        warmup=warmup,
        version=version,
        max_staleness=max_staleness,
        baselines=baselines,
    )["learner"]


STEP = Step(
    number=1, warmup=False, groups=1, group_size=2, loss="ppo_clip", learning_rate=0.1, updates=1, publish=True,
    capacity=1,
)  # fmt: skip


def message_of(*episodes: Episode) -> tuple[Assembled, BatchHeader, Arrays]:
    """A step that trains on one group, and the message that gives it to the trainer, but where it was recorded."""
    found = assemble(
        [group_of(*episodes)],
        policies=["learner"],
        algorithm=AlgorithmConfig(),
        max_tokens=8,
        warmup=False,
        version=0,
        max_staleness=1,
    )["learner"]
    return found, *batch_of(found, STEP, trainer=TrainerConfig(), checkpoint=False, state={})


def turn_values(sample: Sample) -> list[float]:
    """The advantage of each trained turn; all its tokens have the same."""
    values = sample.advantages[sample.loss_mask].reshape(-1, ANSWER)
    assert (values == values[:, :1]).all()
    return [round(float(value), 5) for value in values[:, 0]]


def total_weight(found: Assembled) -> float:
    return float(sum(sample.weights.sum(dtype=np.float64) for sample in found.samples))
