"""Groups of episodes to the samples of one optimizer step: advantages, masking by age, the weights of the mean.

A token is trained if the policy sampled it under weights at most `max_staleness` versions older than those that the
step starts from. Trajectories with nothing left to learn (all tokens too old, or advantages of exactly 0 where no
entropy bonus and no reference is asked) are left out of the batch; the mean is still taken over the tokens of all
trajectories.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentgym.advantages.menu import Baselines, estimate
from agentgym.advantages.returns import Floats, Joint
from agentgym.advantages.shaping import overlong
from agentgym.algorithm_config import AlgorithmConfig
from agentgym.batch import MADE_HERE, SAMPLE_ARRAYS, Sample, pack_microbatches, sums
from agentgym.coordinator.groups import Group
from agentgym.coordinator.schedule import Step
from agentgym.episode import REPLAYED, Episode, Trajectory, joined, sampled_tokens
from agentgym.messages import AgentId
from agentgym.origins import Origin
from agentgym.prefix import replayed
from agentgym.protocol import BatchHeader
from agentgym.trainer_config import TrainerConfig

ROUNDING = 1e-9
"""Advantages closer to 0 are no preference."""
NOTHING_YET: Baselines = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Assembled:
    """The samples of a step, and what is worth knowing about them."""

    samples: list[Sample]
    origins: list[Origin]
    """Of the samples."""
    episodes: list[Episode]
    ages: NDArray[np.int32]
    """Of every token that is trained on, in versions."""
    baselines: Baselines
    """What the advantages remember for the next step."""
    metrics: dict[str, float] = field(default_factory=dict)


class _Play(NamedTuple):
    """One agent's part in one episode."""

    trajectories: list[tuple[Trajectory, int, Origin]]
    """With their checksums."""
    rewards_T: Floats
    """Of its turns in order, for the advantages."""


class _Scored(NamedTuple):
    trajectory: Trajectory
    checksum: int
    origin: Origin
    advantages: NDArray[np.float32]
    """[K], 0 outside of the turns."""
    mask: NDArray[np.bool_]
    """[K], true on the tokens that are trained."""
    trained: NDArray[np.float32]
    """The advantages of those."""


def assemble(
    groups: Sequence[Group],
    *,
    policies: Sequence[str],
    algorithm: AlgorithmConfig,
    max_tokens: int,
    warmup: bool,
    version: int,
    max_staleness: int,
    baselines: Baselines = NOTHING_YET,
) -> dict[str, Assembled]:
    """Return what a step that starts from the weights `version` trains each policy on.

    Advantages look at the plays of all policies that are trained: who shares a return may be another's.
    `max_tokens` is the limit of an answer, `baselines` what the step before remembered.
    """
    split = [(group, members) for group in groups for members in _comparable(group)]
    members_B_G = [members for _, members in split]
    plays_B_G = [[_plays(episode, algorithm, max_tokens) for episode in members] for members in members_B_G]
    advantages_B_G = _rewards(plays_B_G)  # supervised steps look at no advantage
    if not warmup:
        lineups_B = [tuple(sorted(group.lineup.items())) for group, _ in split]
        advantages_B_G, baselines = estimate(advantages_B_G, algorithm, baselines, lineups_B)
    # Newer weights than the step's own are of steps that were undone when the run was resumed.
    usable = None if warmup else (max(0, version - max_staleness), version)
    scored = [
        row
        for agent in dict.fromkeys(agent for plays_G in plays_B_G for plays in plays_G for agent in plays)
        for plays_G, advantages_G in zip(plays_B_G, advantages_B_G, strict=True)
        for plays, advantages in zip(plays_G, advantages_G, strict=True)
        if agent in plays
        for row in _score(plays[agent], advantages[agent], usable)
    ]
    episodes = [episode for members in members_B_G for episode in members]
    parts = {}
    for policy in policies:
        mine = [row for row in scored if row.trajectory.policy == policy]
        samples, origins, ages, metrics = _part(mine, algorithm, warmup, version)
        parts[policy] = Assembled(samples, origins, episodes, ages, baselines, metrics)
    return parts


def _part(
    scored: Sequence[_Scored], algorithm: AlgorithmConfig, warmup: bool, version: int
) -> tuple[list[Sample], list[Origin], NDArray[np.int32], dict[str, float]]:
    """Return the samples that a policy's rows make, their origins, the ages of their tokens, and metrics."""
    scale = 1.0
    if algorithm.normalize_batch and not warmup and scored:
        values = np.concatenate([row.trained for row in scored])
        deviation = float(values.std()) if len(values) else 0.0
        scale = deviation if deviation > 1e-6 else 1.0  # equal advantages, as of one play, have no spread
    fresh = [row for row in scored if len(row.trained)]
    weights = _weights(fresh, algorithm)
    useful = list(range(len(fresh)))
    if not warmup and not algorithm.regularized:
        useful = [n for n, row in enumerate(fresh) if row.trained.any()]
    useful_or_one = useful or range(len(fresh))[:1]  # a step where all plays agree still counts as a step
    samples = [_sample(fresh[n], scale, weights[n]) for n in useful_or_one]
    origins = [fresh[n].origin for n in useful_or_one]
    sampled = sum(sampled_tokens(row.trajectory) for row in scored)
    trained = [] if warmup else [sample.versions[sample.loss_mask] for sample in samples]
    ages = (version - np.concatenate(trained) if trained else np.zeros(0)).astype(np.int32)
    metrics = {
        "samples": float(len(samples)),
        "zero_advantage_share": 1.0 - len(useful) / len(fresh) if fresh else 0.0,
        "stale_share": 1.0 - sum(len(row.trained) for row in fresh) / sampled if sampled else 0.0,
    }
    return samples, origins, ages, metrics


def teaches(group: Group, algorithm: AlgorithmConfig, max_tokens: int) -> bool:
    """Whether the plays of a group, compared with each other, give any turn an advantage."""
    plays_B_G = [
        [_plays(episode, algorithm, max_tokens) for episode in members] for members in _comparable(group)
    ]
    advantages_B_G, _ = estimate(_rewards(plays_B_G), algorithm, {})
    return any(
        (np.abs(a_T) >= ROUNDING).any()
        for advantages_G in advantages_B_G
        for advantages in advantages_G
        for a_T in advantages.values()
    )


def batch_of(
    assembled: Assembled,
    step: Step,
    *,
    trainer: TrainerConfig,
    checkpoint: bool,
    state: dict[str, Any],
) -> tuple[BatchHeader, dict[str, NDArray[Any]]]:
    """Return the message that gives a step to the trainer, and the arrays that the workers did not record."""
    lengths = [len(sample.tokens) for sample in assembled.samples]
    arrays = joined(assembled.samples, {name: SAMPLE_ARRAYS[name] for name in MADE_HERE})
    header = BatchHeader(
        step=step.number,
        loss=step.loss,
        learning_rate=step.learning_rate,
        updates=step.updates,
        lengths=lengths,
        checksums=[sample.checksum for sample in assembled.samples],
        sums=sums(arrays),
        microbatches=pack_microbatches(lengths, trainer.tokens_per_microbatch, trainer.dp),
        publish=step.publish,
        checkpoint=checkpoint,
        state={**state, "step": step.number},
    )
    return header, arrays


def _comparable(group: Group) -> list[list[Episode]]:
    """Return the members that share what they began with, in the order of the members.

    In a fork that is the turn that they go on from; those whose environment did not come to it again play from the
    beginning, and are compared with each other.
    """
    together: dict[int, list[Episode]] = {}
    for episode in group.members:
        together.setdefault(replayed(episode), []).append(episode)
    return list(together.values())


def _plays(episode: Episode, algorithm: AlgorithmConfig, max_tokens: int) -> dict[AgentId, _Play]:
    """Return the parts of the agents that are trained."""
    plays = {}
    for agent in episode.agents:
        mine = [
            (trajectory, crc, Origin(episode.group_id, episode.member, number))
            for number, (trajectory, crc) in enumerate(
                zip(episode.trajectories, episode.checksums, strict=True)
            )
            if trajectory.agent == agent and trajectory.trainable
        ]
        turns = [
            turn for trajectory, *_ in mine for turn in trajectory.turns if turn.finish_reason != REPLAYED
        ]
        rewards_T = np.array([turn.reward for turn in turns])
        if algorithm.overlong_buffer is not None:
            rewards_T = rewards_T + overlong(
                np.array([turn.end - turn.start for turn in turns], float),
                longest=max_tokens,
                buffer=algorithm.overlong_buffer,
                penalty=algorithm.overlong_penalty,
            )
        if turns:
            plays[agent] = _Play(mine, rewards_T)
    return plays


def _rewards(plays_B_G: list[list[dict[AgentId, _Play]]]) -> Joint:
    return [
        [{agent: play.rewards_T for agent, play in plays.items()} for plays in plays_G]
        for plays_G in plays_B_G
    ]


def _score(play: _Play, advantages_T: Floats, usable: tuple[int, int] | None) -> list[_Scored]:
    """Spread the advantages of turns over their tokens.

    `usable` are the oldest and the newest version that is trained; None: a warm-up.
    """
    rows = []
    rest = iter(np.where(np.abs(advantages_T) < ROUNDING, 0.0, advantages_T))
    for trajectory, crc, origin in play.trajectories:
        per_token = np.zeros(len(trajectory.tokens), np.float32)
        for turn in trajectory.turns:
            if turn.finish_reason != REPLAYED:
                per_token[turn.start : turn.end] = next(rest)
        mask = trajectory.loss_mask
        if usable is not None:  # recorded answers have no version
            mask = mask & (trajectory.versions >= usable[0]) & (trajectory.versions <= usable[1])
        rows.append(_Scored(trajectory, crc, origin, per_token, mask, per_token[mask]))
    return rows


def _weights(rows: Sequence[_Scored], algorithm: AlgorithmConfig) -> list[float]:
    """Return the weight of each token of a row: what `algorithm.loss_mean` makes of the sum over all tokens."""
    counts = [len(row.trained) for row in rows]
    match algorithm.loss_mean:
        case "sequence":
            return [1.0 / (len(rows) * count) for count in counts]
        case "constant":
            assert algorithm.loss_length is not None
            return [1.0 / (len(rows) * algorithm.loss_length) for _ in rows]
        case "agent":
            tokens_of: Counter[AgentId] = Counter()
            for row, count in zip(rows, counts, strict=True):
                tokens_of[row.trajectory.agent] += count
            return [1.0 / (len(tokens_of) * tokens_of[row.trajectory.agent]) for row in rows]
        case _:
            return [1.0 / sum(counts) for _ in rows]


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
