"""Steps that are assembled from groups, and what is read off their samples."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from builders import ANSWER

from agentgym.algorithm_config import AlgorithmConfig
from agentgym.batch import Sample
from agentgym.coordinator.assemble import NOTHING_YET, Assembled, assemble
from agentgym.coordinator.groups import Group


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


def turn_values(sample: Sample) -> list[float]:
    """The advantage of each trained turn; all its tokens have the same."""
    values = sample.advantages[sample.loss_mask].reshape(-1, ANSWER)
    assert (values == values[:, :1]).all()
    return [round(float(value), 5) for value in values[:, 0]]


def total_weight(found: Assembled) -> float:
    return float(sum(sample.weights.sum(dtype=np.float64) for sample in found.samples))
