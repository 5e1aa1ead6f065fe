"""Groups of episodes to the samples of one optimizer step: advantages, masking by age, the weights of the mean.

A token is trained if the policy sampled it under weights at most `max_staleness` versions older than those that the
step starts from. Trajectories with nothing left to learn (all tokens too old, or an advantage of exactly 0 where no
entropy bonus is asked) are left out of the batch; the mean is still taken over the tokens of all trajectories.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentgym.advantages import ADVANTAGES
from agentgym.batch import Sample
from agentgym.config import AlgorithmConfig
from agentgym.coordinator.groups import Group
from agentgym.episode import Episode, Trajectory


@dataclass(frozen=True, slots=True)
class Assembled:
    """The samples of a step, and what is worth knowing about them."""

    samples: list[Sample]
    episodes: list[Episode]
    ages: NDArray[np.int32]
    """Of every sampled token of the trained policy, masked or not, in versions."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Scored:
    trajectory: Trajectory
    checksum: int
    advantage: float
    mask: NDArray[np.bool_]


def assemble(
    groups: Sequence[Group], *, algorithm: AlgorithmConfig, warmup: bool, version: int, max_staleness: int
) -> Assembled:
    """Return the samples of a step that starts from the weights `version`."""
    episodes = [episode for group in groups for _, episode in sorted(group.episodes.items())]
    scored = [row for group in groups for row in _score(group, algorithm, warmup, version - max_staleness)]
    if algorithm.normalize_batch and not warmup and scored:
        scale = float(np.std([row.advantage for row in scored])) + 1e-6
    else:
        scale = 1.0
    tokens_of: dict[str, int] = {}
    for row in scored:
        tokens_of[row.trajectory.agent] = tokens_of.get(row.trajectory.agent, 0) + int(row.mask.sum())
    fresh = [row for row in scored if row.mask.any()]
    useful = fresh if warmup or algorithm.entropy_coefficient > 0 else [row for row in fresh if row.advantage]
    samples = [
        _sample(row, row.advantage / scale, _weight(row.trajectory.agent, tokens_of, algorithm))
        for row in useful or fresh[:1]  # a step where all groups agree still counts as a step
    ]
    sampled = [row.trajectory.versions[row.trajectory.loss_mask] for row in scored]
    ages = (version - np.concatenate(sampled) if sampled and not warmup else np.zeros(0)).astype(np.int32)
    masked = int((ages > max_staleness).sum())
    metrics = {
        "samples": float(len(samples)),
        "zero_advantage_share": float(np.mean([row.advantage == 0 for row in scored])) if scored else 0.0,
        "stale_share": masked / len(ages) if len(ages) else 0.0,
    }
    return Assembled(samples, episodes, ages, metrics)


def _score(group: Group, algorithm: AlgorithmConfig, warmup: bool, oldest: int) -> list[_Scored]:
    """Score the trainable trajectories of a group, each agent against itself in the other members."""
    members = [episode for _, episode in sorted(group.episodes.items())]
    rows = []
    for agent in dict.fromkeys(agent for episode in members for agent in episode.agents):
        playing = [
            e for e in members if any(t.agent == agent and t.trainable for t in e.trajectories)
        ]
        if not playing:
            continue
        rewards = np.array([episode.reward(agent) for episode in playing])
        if warmup or len(playing) < 2:
            advantages = np.zeros(len(playing))
        else:
            advantages = ADVANTAGES[algorithm.advantage](rewards)
        for episode, advantage in zip(playing, advantages, strict=True):
            for trajectory, crc in zip(episode.trajectories, episode.checksums, strict=True):
                if trajectory.agent == agent:
                    fresh = np.ones(len(trajectory.tokens), np.bool_) if warmup else trajectory.versions >= oldest
                    rows.append(_Scored(trajectory, crc, float(advantage), trajectory.loss_mask & fresh))
    return rows


def _weight(agent: str, tokens_of: dict[str, int], algorithm: AlgorithmConfig) -> float:
    if algorithm.loss_mean == "agent":
        return 1.0 / (tokens_of[agent] * sum(count > 0 for count in tokens_of.values()))
    return 1.0 / sum(tokens_of.values())


def _sample(row: _Scored, advantage: float, weight: float) -> Sample:
    trajectory, mask = row.trajectory, row.mask
    return Sample(
        tokens=trajectory.tokens,
        loss_mask=mask,
        logprobs=trajectory.logprobs,
        versions=trajectory.versions,
        routes=trajectory.routes,
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
        weights=np.where(mask, np.float32(weight), np.float32(0)),
        checksum=row.checksum,
        sampled=trajectory.loss_mask,
    )
