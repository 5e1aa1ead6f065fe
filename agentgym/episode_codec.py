"""An episode as a message: a header of plain values and the trajectories' arrays, concatenated along the tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentgym.episode import EndReason, Episode, Trajectory, Turn
from agentgym.errors import IntegrityError, WireError

PER_TOKEN = {"tokens": "int32", "loss_mask": "bool", "logprobs": "float32", "versions": "int32"}
"""The arrays [K] of every trajectory, and their dtypes."""
ROUTES = ("uint8", "uint16")
TURN_FIELDS = tuple(field.name for field in fields(Turn))


class _TrajectoryFields(BaseModel):
    """A trajectory without its arrays."""

    model_config = ConfigDict(extra="forbid")
    agent: str
    policy: str
    trainable: bool
    branch: int = Field(ge=0)
    length: int = Field(ge=0)
    routed: bool
    turns: tuple[Turn, ...]


class _EpisodeFields(BaseModel):
    """An episode without its arrays."""

    model_config = ConfigDict(extra="forbid")
    env_id: str
    task_index: int
    seed: int
    group_id: int
    member: int
    end_reason: EndReason
    metrics: dict[str, float]
    agent_metrics: dict[str, dict[str, float]]
    error: str
    checksums: tuple[int, ...]
    trajectories: tuple[_TrajectoryFields, ...]


def encode_episode(episode: Episode) -> tuple[dict[str, Any], dict[str, NDArray[Any] | None]]:
    """Return the header fields and arrays of an episode."""
    trajectories = episode.trajectories
    arrays: dict[str, NDArray[Any] | None] = {}
    if trajectories:
        arrays = {name: np.concatenate([getattr(t, name) for t in trajectories]) for name in PER_TOKEN}
        routes = [t.routes for t in trajectories if t.routes is not None]
        arrays["routes"] = np.concatenate(routes) if routes else None
    header = {
        "env_id": episode.env_id,
        "task_index": episode.task_index,
        "seed": episode.seed,
        "group_id": episode.group_id,
        "member": episode.member,
        "end_reason": episode.end_reason.value,
        "metrics": episode.metrics,
        "agent_metrics": episode.agent_metrics,
        "error": episode.error,
        "checksums": list(episode.checksums),
        "trajectories": [
            {
                "agent": t.agent,
                "policy": t.policy,
                "trainable": t.trainable,
                "branch": t.branch,
                "length": len(t.tokens),
                "routed": t.routes is not None,
                "turns": [{name: getattr(turn, name) for name in TURN_FIELDS} for turn in t.turns],
            }
            for t in trajectories
        ],
    }
    return header, arrays


def decode_episode(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Episode:
    """Return the episode in a message, checked.

    Raises:
        WireError: a field is missing or of the wrong type, or the arrays do not fit to it.
    """
    try:
        fields = _EpisodeFields.model_validate(header)
        trajectories = tuple(_trajectories(fields.trajectories, arrays))
        for trajectory in trajectories:
            trajectory.check()
    except (ValueError, IntegrityError) as error:
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            error = ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
        raise WireError(f"an episode message is wrong: {error}") from error
    if len(fields.checksums) != len(trajectories):
        raise WireError(
            f"an episode has {len(trajectories)} trajectories and {len(fields.checksums)} checksums"
        )
    plain = {name: getattr(fields, name) for name in _EpisodeFields.model_fields if name != "trajectories"}
    return Episode(**plain, trajectories=trajectories)


def _trajectories(
    described: Sequence[_TrajectoryFields], arrays: Mapping[str, NDArray[Any]]
) -> Iterator[Trajectory]:
    total = sum(d.length for d in described)
    routed = sum(d.length for d in described if d.routed)
    for name, dtype in PER_TOKEN.items() if described else ():
        if name not in arrays or arrays[name].dtype != dtype or arrays[name].shape != (total,):
            raise ValueError(f"{name} is {_shape(arrays.get(name))}; expected {dtype}[{total}]")
    routes = arrays.get("routes")
    if routes is None and routed:
        raise ValueError(f"there are no routes for the {routed} tokens of routed trajectories")
    if routes is not None and (routes.dtype not in ROUTES or routes.ndim != 3 or len(routes) != routed):
        raise ValueError(f"routes are {_shape(routes)}; expected uint8 or uint16 [{routed}, L, k]")
    start, row = 0, 0
    for d in described:
        end, next_row = start + d.length, row + d.length * d.routed
        yield Trajectory(
            agent=d.agent,
            policy=d.policy,
            trainable=d.trainable,
            branch=d.branch,
            routes=routes[row:next_row] if routes is not None and d.routed else None,
            turns=d.turns,
            **{name: arrays[name][start:end] for name in PER_TOKEN},
        )
        start, row = end, next_row


def _shape(array: NDArray[Any] | None) -> str:
    return "missing" if array is None else f"{array.dtype}{list(array.shape)}"
