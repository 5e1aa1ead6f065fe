"""Episodes, groups, configurations and leases for the tests of the core, the coordinator and the worker."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from agentgym.config import Config
from agentgym.coordinator.groups import Group
from agentgym.episode import NOT_SAMPLED, REPLAYED, EndReason, Episode, Trajectory, Turn, no_route
from agentgym.episode_codec import encode_episode
from agentgym.messages import assistant
from agentgym.protocol import EpisodeDone, Lease
from agentgym.routes import write_routes
from agentgym.wire import Packet, pack, unpack

T = TypeVar("T")
PROMPT, ANSWER = 3, 2
"""Tokens before each answer, and tokens of each answer, in the trajectories made here."""
LAYERS, TOPK = 2, 2


def within(seconds: float, play: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new event loop; a deadline makes a test that hangs fail."""
    return asyncio.run(asyncio.wait_for(play, seconds))


def trajectory_of(
    rewards: Sequence[float],
    *,
    agent: str = "agent",
    versions: Sequence[int] | int = 0,
    trainable: bool = True,
    policy: str = "",
    routes: bool = True,
    branch: int = 0,
    answer: int = ANSWER,
    finish: str = "stop",
    replayed: int = 0,
) -> Trajectory:
    """A trajectory with a turn per reward: PROMPT tokens are read, `answer` are sampled, and so on.

    The first `replayed` answers are those of another episode.
    """
    turns, rounds = [], len(rewards)
    each = [versions] * rounds if isinstance(versions, int) else list(versions)
    K = rounds * (PROMPT + answer)
    mask, version = np.zeros(K, np.bool_), np.full(K, NOT_SAMPLED, np.int32)
    for number, reward in enumerate(rewards):
        end = (number + 1) * (PROMPT + answer)
        again = number < replayed
        mask[end - answer : end], version[end - answer : end] = True, NOT_SAMPLED if again else each[number]
        ended, message = REPLAYED if again else finish, assistant(f"answer {number}")
        turns.append(Turn(end - answer, end, message, ended, reward, {"all": reward}, 0.5))
    experts = (np.arange(K * LAYERS * TOPK) % 8).astype(np.uint8).reshape(K, LAYERS, TOPK)
    experts[-1:] = no_route(experts.dtype)
    return Trajectory(
        agent=agent,
        policy=policy or ("learner" if trainable else "other"),
        trainable=trainable,
        tokens=np.arange(K, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=version,
        routes=experts if routes else None,
        turns=tuple(turns),
        branch=branch,
    )


def episode_of(
    rewards: Sequence[float] | Mapping[str, Sequence[float]] = (1.0,),
    *,
    trajectories: Sequence[Trajectory] = (),
    group: int = 0,
    member: int = 0,
    end: EndReason = EndReason.TERMINATED,
    error: str = "",
    **fields: Any,
) -> Episode:
    """An episode with a turn per reward, of one agent or of several; or with the given trajectories."""
    by_agent = rewards if isinstance(rewards, Mapping) else {"agent": rewards}
    given = ("metrics", "agent_metrics", "task_index", "sampling_seed")
    record = {key: fields.pop(key) for key in given if key in fields}
    made = tuple(trajectories) or tuple(
        trajectory_of(values, agent=agent, **fields) for agent, values in by_agent.items()
    )
    if end in (EndReason.ENV_FAILED, EndReason.POLICY_FAILED):
        made = ()
    return Episode(
        env_id="test/Env-v0",
        task_index=record.get("task_index", 7),
        seed=11,
        group_id=group,
        member=member,
        end_reason=end,
        trajectories=made,
        checksums=tuple(t.checksum() for t in made),
        metrics=record.get("metrics", {"seconds": 1.5}),
        agent_metrics=record.get("agent_metrics", {}),
        error=error,
        sampling_seed=record.get("sampling_seed", 0),
    )


def shifted(member: int) -> Episode:
    """An episode of two agents whose routes are its own."""
    made = [trajectory_of([float(member), 1.0], agent=agent) for agent in ("one", "two")]
    for number, trajectory in enumerate(made):
        assert trajectory.routes is not None
        trajectory.routes[:] = 10 * member + number
    return episode_of(trajectories=made, member=member)


def sent(episode: Episode, lease: int = 1, *, apart: Path | None = None) -> Packet:
    """The message in which an episode arrives, whose routes its worker may have left in a folder."""
    fields, arrays = encode_episode(episode)
    message = EpisodeDone(lease_id=lease, episode=fields)
    if apart is not None:
        message = message.model_copy(update={"apart": write_routes(apart, lease, arrays.pop("routes"))})
    return unpack([bytes(frame) for frame in pack(message, arrays)])


def group_of(*episodes: Episode, group: int = 0) -> Group:
    """A complete group."""
    return Group(group, task_index=group, size=len(episodes), episodes=dict(enumerate(episodes)))


def config_of(env_id: str = "agentgym/GuessNumber-v0", /, *, model: str = "model", **sections: Any) -> Config:
    """A configuration; sections are dictionaries: `config_of(rollout={"group_size": 2})`."""
    base: dict[str, Any] = {"env": {"id": env_id}, "policies": {"learner": {"model": model}}}
    for name, value in sections.items():
        base[name] = {**base[name], **value} if isinstance(value, dict) and name in base else value
    return Config.model_validate(base)


def lease_of(lease_id: int = 1, **fields: Any) -> Lease:
    """A lease; by default of member 0 of group 0."""
    record = {"task_index": 0, "seed": 5, "group_id": 0, "member": 0, "sampling_seed": lease_id}
    record = {**record, "policies": {"*": "learner"}, **fields}
    return Lease(lease_id=lease_id, **record)
