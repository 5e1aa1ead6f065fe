"""The record of one play.

    Episode      one play of one task: all agents, why it ended
    Trajectory   one agent's tokens in one branch of its conversation, as flat arrays over K tokens
    Turn         one answer inside a trajectory: a span of its tokens

Shapes: K tokens of a trajectory, L MoE layers, k experts per token (top-k).

Invariants, checked by `Trajectory.check` where a record is made and where it is used: equal lengths; the loss
mask is true exactly on sampled tokens; within a branch each prompt starts with all earlier tokens; a
checksum over ids, mask, log-probabilities, versions and routes travels from the worker to the trainer.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentgym.errors import IntegrityError
from agentgym.messages import AgentId, Message

NOT_SAMPLED = -1
"""The version of a token that no policy server sampled (prompts, tool results, scripted policies)."""
SCRIPTED, REPLAYED = "scripted", "replayed"
"""Why an answer ended that no policy server sampled: a scripted policy said it; it is another episode's, of which this
one is a fork."""


class EndReason(StrEnum):
    """Why an episode ended."""

    TERMINATED = "terminated"
    """The environment said that it is over."""
    ENV_TRUNCATED = "env_truncated"
    """The environment cut the episode (for example gymnasium's TimeLimit)."""
    MAX_TURNS = "max_turns"
    """An agent used up its turns."""
    MAX_TOKENS = "max_tokens"
    """An agent used up its tokens."""
    CONTEXT = "context"
    """The next prompt would not have fitted into the model's context; no request was sent."""
    TIMEOUT = "timeout"
    """The episode took longer than `env.episode_timeout`."""
    ENV_FAILED = "env_failed"
    """The environment raised, broke its contract or did not return; `Episode.error` says how. Never trained."""
    POLICY_FAILED = "policy_failed"
    """No policy server answered; `Episode.error` says how. Never trained."""


class Status(StrEnum):
    """What became of an episode."""

    OK = "ok"
    TRUNCATED = "truncated"
    FAILED = "failed"


def status_of(reason: EndReason) -> Status:
    """Return the status that an end reason implies."""
    if reason in (EndReason.ENV_FAILED, EndReason.POLICY_FAILED):
        return Status.FAILED
    return Status.OK if reason is EndReason.TERMINATED else Status.TRUNCATED


class Turn(NamedTuple):
    """One answer of one agent."""

    start: int
    """Index of the first sampled token in the trajectory."""
    end: int
    """Index after the last sampled token (the sampled stop token included)."""
    message: Message
    """The answer as parsed; the tokens, not this text, are what is trained."""
    finish_reason: str
    """"stop" (a stop token was sampled), "length" (max_tokens), SCRIPTED or REPLAYED; an endpoint's own word for it."""
    reward: float
    """What this agent got from this answer until its next one; named parts enter it times their weights."""
    rewards: dict[str, float]
    """Named parts of `reward` before their weights; empty where nobody named one."""
    seconds: float
    """Wall time from the request to the answer."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One agent's tokens in one branch of its conversation."""

    agent: AgentId
    policy: str
    """The policy's name in the configuration; of a pool with the snapshot that was played: "past@40"."""
    trainable: bool
    """False for policies that are only logged: frozen, scripted or external ones."""
    tokens: NDArray[np.int32]
    """int32 [K]."""
    loss_mask: NDArray[np.bool_]
    """bool [K], true exactly on sampled tokens."""
    logprobs: NDArray[np.float32]
    """float32 [K], of the distribution that was sampled from; 0 where not sampled."""
    versions: NDArray[np.int32]
    """int32 [K], the weight version that sampled the token; NOT_SAMPLED elsewhere."""
    routes: NDArray[np.unsignedinteger[Any]] | None
    """uint8 or uint16 [K, L, k], the experts each token was sent to; a row of the dtype's largest value means
    "no route", and the trainer's own router decides. None: the policy has no MoE layers."""
    turns: tuple[Turn, ...]
    branch: int = 0

    @property
    def reward(self) -> float:
        """The sum of the turns' rewards."""
        return sum(turn.reward for turn in self.turns)

    def check(self) -> None:
        """Raise IntegrityError where the arrays do not fit together."""
        K = len(self.tokens)
        for name in ("loss_mask", "logprobs", "versions"):
            if len(getattr(self, name)) != K:
                raise IntegrityError(f"{name} has {len(getattr(self, name))} entries for {K} tokens")
        if self.routes is not None and (self.routes.ndim != 3 or len(self.routes) != K):
            raise IntegrityError(f"routes have shape {self.routes.shape} for {K} tokens; expected [K, L, k]")
        spans = np.zeros(K, dtype=np.bool_)
        end = 0
        for turn in self.turns:
            if not end <= turn.start < turn.end <= K:
                raise IntegrityError(
                    f"turn [{turn.start}, {turn.end}) after {end} is empty or does not fit into {K} tokens"
                )
            end = turn.end
            spans[turn.start : end] = True
        if not np.array_equal(spans, self.loss_mask):
            raise IntegrityError("the loss mask is not true exactly on the tokens of the turns")

    def checksum(self) -> int:
        """Return `recorded_checksum` of its arrays."""
        return recorded_checksum(self.tokens, self.loss_mask, self.logprobs, self.versions, self.routes)


def checksum(*arrays: NDArray[Any] | None) -> int:
    """Return the CRC-32 over the bytes of the arrays, dtypes and shapes included."""
    crc = 0
    for array in arrays:
        if array is not None:
            crc = zlib.crc32(f"{array.dtype.str}{array.shape}".encode(), crc)
            crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
    return crc


def recorded_checksum(
    tokens: NDArray[np.int32],
    loss_mask: NDArray[np.bool_],
    logprobs: NDArray[np.float32],
    versions: NDArray[np.int32],
    routes: NDArray[Any] | None,
) -> int:
    """Return the checksum of a trajectory: that of its routes in the upper 32 of 64 bits, of all the rest in the lower.

    So the coordinator, which does not look at the routes, can check what it works with.
    """
    return checksum(routes) << 32 | checksum(tokens, loss_mask, logprobs, versions)


@dataclass(frozen=True, slots=True)
class Episode:
    """One play of one task by all its agents."""

    env_id: str
    task_index: int
    """Which task; equal for all members of a group."""
    seed: int
    """The seed given to `env.reset`; equal for all members of a group."""
    group_id: int
    member: int
    """Position inside the group, 0 to group_size - 1."""
    end_reason: EndReason
    trajectories: tuple[Trajectory, ...]
    checksums: tuple[int, ...] = ()
    """`Trajectory.checksum` of each trajectory, made by the worker."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers of the whole episode ("seconds", counters), not per agent."""
    agent_metrics: dict[AgentId, dict[str, float]] = field(default_factory=dict)
    """Numbers per agent: "success" (0 to 1, where the environment says it) and what `info["metrics"]` named."""
    error: str = ""
    """For failed episodes: the boundary, the exception's type and its text."""
    sampling_seed: int = 0
    """The seed of its scripted players."""

    @property
    def status(self) -> Status:
        """What became of the episode."""
        return status_of(self.end_reason)

    def verify(self, *, routes: bool = True) -> None:
        """Raise IntegrityError where a trajectory, with or without its `routes`, is not what the worker recorded."""
        for number, (trajectory, whole) in enumerate(zip(self.trajectories, self.checksums, strict=True)):
            t = trajectory
            if routes:
                found, recorded = t.checksum(), whole
            else:
                found, recorded = checksum(t.tokens, t.loss_mask, t.logprobs, t.versions), whole & 0xFFFFFFFF
            if found != recorded:
                raise IntegrityError(
                    f"trajectory {number} (agent {trajectory.agent!r}, {len(trajectory.tokens)} tokens) of member "
                    f"{self.member} of group {self.group_id} has checksum {found:#010x}, its worker recorded "
                    f"{recorded:#010x}: it was changed on the way"
                )

    def reward(self, agent: AgentId) -> float:
        """Return what an agent got in the whole episode."""
        return sum(t.reward for t in self.trajectories if t.agent == agent)

    @property
    def agents(self) -> list[AgentId]:
        """The agents that took part, in the order of their first trajectory."""
        return list(dict.fromkeys(t.agent for t in self.trajectories))


PER_TOKEN = {"tokens": "int32", "loss_mask": "bool", "logprobs": "float32", "versions": "int32"}
"""The arrays [K] of every trajectory, and their dtypes."""


def joined(records: Sequence[Any], dtypes: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    """Return the arrays of some trajectories or samples as one message has them: concatenated along the tokens."""
    return {name: _concatenated([getattr(record, name) for record in records]) for name in dtypes}


def joined_routes(records: Sequence[Any]) -> NDArray[Any] | None:
    """Return the routes of those records that have some; None: none has."""
    routes = [record.routes for record in records if record.routes is not None]
    return _concatenated(routes) if routes else None


def _concatenated(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def check_joined(
    arrays: Mapping[str, NDArray[Any]], dtypes: Mapping[str, str], tokens: int, routed: int
) -> None:
    """Raise IntegrityError where the arrays of a message are not [tokens], or the routes not [routed, L, k]."""
    for name, dtype in dtypes.items():
        array = arrays.get(name)
        if array is None or array.dtype != dtype or array.shape != (tokens,):
            raise IntegrityError(f"{name} is {_shape(array)}; expected {dtype}[{tokens}]")
    routes = arrays.get("routes")
    if (routes is None and routed) or (
        routes is not None
        and (routes.dtype not in ("uint8", "uint16") or routes.ndim != 3 or len(routes) != routed)
    ):
        raise IntegrityError(f"routes is {_shape(routes)}; expected uint8 or uint16 [{routed}, L, k]")


def _shape(array: NDArray[Any] | None) -> str:
    return "missing" if array is None else f"{array.dtype}{list(array.shape)}"


def no_route(dtype: np.dtype[Any]) -> int:
    """Return the value whose rows mean "no route" in an array of this dtype."""
    return int(np.iinfo(dtype).max)


def sampled_tokens(trajectory: Trajectory) -> int:
    """Count the tokens of the answers that are a trajectory's own; a fork repeats those of another one."""
    return sum([turn.end - turn.start for turn in trajectory.turns if turn.finish_reason != REPLAYED])


def turns_of(trajectories: Sequence[Trajectory]) -> int:
    """Count the turns of some trajectories."""
    return sum(len(t.turns) for t in trajectories)
