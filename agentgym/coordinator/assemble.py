"""Groups of episodes to the samples of one optimizer step: advantages, masking by age, the weights of the mean.

A token is trained if the policy sampled it under weights at most `max_staleness` versions older than those that the
step starts from. Trajectories with nothing left to learn (all tokens too old, or advantages of exactly 0 where no
entropy bonus and no reference is asked) are left out of the batch; the mean is still taken over the tokens of all
trajectories.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
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


class _Row(NamedTuple):
    """A trajectory that may become a sample."""

    trajectory: Trajectory
    checksum: int
    origin: Origin
    advantages_T: list[float]
    """Of its turns; 0 of those that were another episode's."""


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
    rows = [
        row
        for agent in dict.fromkeys(agent for plays_G in plays_B_G for plays in plays_G for agent in plays)
        for plays_G, advantages_G in zip(plays_B_G, advantages_B_G, strict=True)
        for plays, advantages in zip(plays_G, advantages_G, strict=True)
        if agent in plays
        for row in _rows(plays[agent], advantages[agent])
    ]
    episodes = [episode for members in members_B_G for episode in members]
    parts = {}
    for policy in policies:
        mine = [row for row in rows if row.trajectory.policy == policy]
        samples, origins, ages, metrics = _part(mine, algorithm, usable, version)
        parts[policy] = Assembled(samples, origins, episodes, ages, baselines, metrics)
    return parts


def _part(
    rows: Sequence[_Row], algorithm: AlgorithmConfig, usable: tuple[int, int] | None, version: int
) -> tuple[list[Sample], list[Origin], NDArray[np.int32], dict[str, float]]:
    """Return the samples that a policy's rows make, their origins, the ages of their tokens, and metrics.

    `usable` are the oldest and the newest version that is trained; None: a warm-up.
    """
    if not rows:
        return [], [], np.zeros(0, np.int32), {}
    lengths = [len(row.trajectory.tokens) for row in rows]
    spans = [slice(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]
    mask, versions, advantages = _laid_out(rows, usable)
    if algorithm.normalize_batch and usable is not None and mask.any():
        deviation = advantages[mask].std()
        if deviation > 1e-6:  # equal advantages, as of one play, have no spread
            advantages /= deviation
    advantages *= mask
    counts = [int(np.count_nonzero(mask[span])) for span in spans]
    fresh = [n for n, count in enumerate(counts) if count]
    useful = fresh
    if usable is not None and not algorithm.regularized:
        prefer = advantages != 0
        useful = [n for n in fresh if prefer[spans[n]].any()]
    useful_or_one = useful or fresh[:1]  # a step where all plays agree still counts as a step
    of_row = np.zeros(len(rows), np.float32)
    of_row[fresh] = _weights([rows[n] for n in fresh], [counts[n] for n in fresh], algorithm)
    weights = np.repeat(of_row, lengths) * mask
    samples = [
        _sample(rows[n], mask[spans[n]], advantages[spans[n]], weights[spans[n]]) for n in useful_or_one
    ]
    used = np.zeros(len(rows), np.bool_)
    used[useful_or_one] = usable is not None
    ages = version - versions[np.repeat(used, lengths) & mask]
    sampled = sum(sampled_tokens(row.trajectory) for row in rows)
    metrics = {
        "samples": float(len(samples)),
        "zero_advantage_share": 1.0 - len(useful) / len(fresh) if fresh else 0.0,
        "stale_share": 1.0 - sum(counts) / sampled if sampled else 0.0,
    }
    return samples, [rows[n].origin for n in useful_or_one], ages, metrics


def _laid_out(
    rows: Sequence[_Row], usable: tuple[int, int] | None
) -> tuple[NDArray[np.bool_], NDArray[np.int32], NDArray[np.float32]]:
    """Return which tokens are trained, their versions and advantages: of all rows, one behind the other.

    A step has many short rows: numpy spends more on a call than on their tokens.
    """
    mask = np.concatenate([row.trajectory.loss_mask for row in rows])
    versions = np.concatenate([row.trajectory.versions for row in rows])
    turns = [turn for row in rows for turn in row.trajectory.turns]
    advantages = np.zeros(len(mask), np.float32)
    advantages[mask] = np.repeat(
        [value for row in rows for value in row.advantages_T], [turn.end - turn.start for turn in turns]
    )
    if usable is not None:  # recorded answers have no version
        mask &= (versions >= usable[0]) & (versions <= usable[1])
    return mask, versions, advantages


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


def _rows(play: _Play, advantages_T: Floats) -> list[_Row]:
    """Share the advantages of an agent's turns out to its trajectories."""
    rest = iter(np.where(np.abs(advantages_T) < ROUNDING, 0.0, advantages_T).tolist())
    return [
        _Row(
            trajectory,
            crc,
            origin,
            [0.0 if turn.finish_reason == REPLAYED else next(rest) for turn in trajectory.turns],
        )
        for trajectory, crc, origin in play.trajectories
    ]


def _weights(rows: Sequence[_Row], counts: Sequence[int], algorithm: AlgorithmConfig) -> list[float]:
    """Return the weight of each token of a row: what `algorithm.loss_mean` makes of the sum over all tokens.

    `counts` are the tokens of the rows that are trained.
    """
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


def _sample(
    row: _Row, mask: NDArray[np.bool_], advantages: NDArray[np.float32], weights: NDArray[np.float32]
) -> Sample:
    trajectory = row.trajectory
    return Sample(
        tokens=trajectory.tokens,
        loss_mask=mask,
        logprobs=trajectory.logprobs,
        versions=trajectory.versions,
        routes=trajectory.routes,
        advantages=advantages,
        weights=weights,
        checksum=row.checksum,
        sampled=trajectory.loss_mask,
    )
