"""Groups of episodes to the samples of one optimizer step: advantages, masking by age, the weights of the mean.

A token is trained if the policy sampled it under weights at most `max_staleness` versions older than those that the
step starts from. Trajectories with nothing left to learn (all tokens too old, or advantages of exactly 0 where no
entropy bonus is asked) are left out of the batch; the mean is still taken over the tokens of all trajectories.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgym.advantages import ADVANTAGES, Floats
from agentgym.algorithm_config import AlgorithmConfig
from agentgym.batch import Sample, concatenate, pack_microbatches
from agentgym.coordinator.groups import Group
from agentgym.coordinator.schedule import Step
from agentgym.episode import Episode, Trajectory
from agentgym.protocol import BatchHeader


@dataclass(frozen=True, slots=True)
class Assembled:
    """The samples of a step, and what is worth knowing about them."""

    samples: list[Sample]
    episodes: list[Episode]
    ages: NDArray[np.int32]
    """Of every sampled token of the trained policy, masked or not, in versions."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Play:
    """One agent's part in one episode: its trajectories, and the advantages of its turns in order."""

    trajectories: list[tuple[Trajectory, int]]
    """With their checksums."""
    rewards_T: Floats


@dataclass(frozen=True, slots=True)
class _Scored:
    trajectory: Trajectory
    checksum: int
    advantages: NDArray[np.float32]
    """[K], 0 outside of the turns."""
    mask: NDArray[np.bool_]


def assemble(
    groups: Sequence[Group], *, algorithm: AlgorithmConfig, warmup: bool, version: int, max_staleness: int
) -> Assembled:
    """Return the samples of a step that starts from the weights `version`."""
    members_B_G = [group.members for group in groups]
    agents = dict.fromkeys(
        agent for members in members_B_G for episode in members for agent in episode.agents
    )
    # Newer weights than the step's own are of steps that were undone when the run was resumed.
    usable = None if warmup else (max(0, version - max_staleness), version)
    scored = [row for agent in agents for row in _score(agent, members_B_G, algorithm, usable)]
    scale = 1.0
    if algorithm.normalize_batch and not warmup and scored:
        values = np.concatenate([row.advantages[row.mask] for row in scored])
        deviation = float(values.std()) if len(values) else 0.0
        scale = deviation if deviation > 1e-6 else 1.0  # equal advantages, as of one play, have no spread
    tokens_of: dict[str, int] = {}
    for row in scored:
        tokens_of[row.trajectory.agent] = tokens_of.get(row.trajectory.agent, 0) + int(row.mask.sum())
    fresh = [row for row in scored if row.mask.any()]
    useful = fresh
    if not warmup and algorithm.entropy_coefficient == 0:
        useful = [row for row in fresh if row.advantages[row.mask].any()]
    samples = [
        _sample(row, scale, _weight(row.trajectory.agent, tokens_of, algorithm))
        for row in useful or fresh[:1]  # a step where all plays agree still counts as a step
    ]
    sampled = [row.trajectory.versions[row.trajectory.loss_mask] for row in scored]
    ages = (version - np.concatenate(sampled) if sampled and not warmup else np.zeros(0)).astype(np.int32)
    metrics = {
        "samples": float(len(samples)),
        "zero_advantage_share": 1.0 - len(useful) / len(fresh) if fresh else 0.0,
        "stale_share": float(((ages > max_staleness) | (ages < 0)).mean()) if len(ages) else 0.0,
    }
    return Assembled(samples, [episode for members in members_B_G for episode in members], ages, metrics)


def batch_of(
    assembled: Assembled, step: Step, *, microbatch_tokens: int, checkpoint: bool, state: dict[str, Any]
) -> tuple[BatchHeader, dict[str, NDArray[Any] | None]]:
    """Return the message that gives a step to the trainer, and its arrays."""
    lengths = [len(sample.tokens) for sample in assembled.samples]
    header = BatchHeader(
        step=step.number,
        loss=step.loss,
        learning_rate=step.learning_rate,
        updates=step.updates,
        lengths=lengths,
        checksums=[sample.checksum for sample in assembled.samples],
        microbatches=pack_microbatches(lengths, microbatch_tokens),
        publish=step.publish,
        checkpoint=checkpoint,
        state={**state, "step": step.number},
    )
    return header, concatenate(assembled.samples)


def _score(
    agent: str, members_B_G: list[list[Episode]], algorithm: AlgorithmConfig, usable: tuple[int, int] | None
) -> list[_Scored]:
    """Score an agent's trainable trajectories, against its own plays in the same step.

    `usable` are the oldest and the newest version that is trained; None: a warm-up.
    """
    plays_B_G = [[play for episode in members if (play := _play(agent, episode))] for members in members_B_G]
    plays_B_G = [plays for plays in plays_B_G if plays]
    rewards_B_G_T = [[play.rewards_T for play in plays] for plays in plays_B_G]
    if usable is None:
        advantages_B_G_T = rewards_B_G_T  # supervised steps look at no advantage
    else:
        advantages_B_G_T = ADVANTAGES[algorithm.advantage](rewards_B_G_T, algorithm.discount)
    rows = []
    for plays, advantages_G_T in zip(plays_B_G, advantages_B_G_T, strict=True):
        for play, advantages_T in zip(plays, advantages_G_T, strict=True):
            rest = iter(np.where(np.abs(advantages_T) < 1e-9, 0.0, advantages_T))  # rounding is no preference
            for trajectory, crc in play.trajectories:
                per_token = np.zeros(len(trajectory.tokens), np.float32)
                for turn in trajectory.turns:
                    per_token[turn.start : turn.end] = next(rest)
                mask = trajectory.loss_mask
                if usable is not None:
                    mask = mask & (trajectory.versions >= usable[0]) & (trajectory.versions <= usable[1])
                rows.append(_Scored(trajectory, crc, per_token, mask))
    return rows


def _play(agent: str, episode: Episode) -> _Play | None:
    mine = [
        (trajectory, crc)
        for trajectory, crc in zip(episode.trajectories, episode.checksums, strict=True)
        if trajectory.agent == agent and trajectory.trainable
    ]
    rewards = [turn.reward for trajectory, _ in mine for turn in trajectory.turns]
    return _Play(mine, np.array(rewards)) if rewards else None


def _weight(agent: str, tokens_of: dict[str, int], algorithm: AlgorithmConfig) -> float:
    if algorithm.loss_mean == "agent":
        return 1.0 / (tokens_of[agent] * sum(count > 0 for count in tokens_of.values()))
    return 1.0 / sum(tokens_of.values())


def _sample(row: _Scored, scale: float, weight: float) -> Sample:
    trajectory, mask = row.trajectory, row.mask
    return Sample(
        tokens=trajectory.tokens,
        loss_mask=mask,
        logprobs=trajectory.logprobs,
        versions=trajectory.versions,
        routes=trajectory.routes,
        advantages=np.where(mask, row.advantages / np.float32(scale), np.float32(0)),
        weights=np.where(mask, np.float32(weight), np.float32(0)),
        checksum=row.checksum,
        sampled=trajectory.loss_mask,
    )
