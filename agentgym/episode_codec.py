"""An episode as a message: a header of plain values and the trajectories' arrays, concatenated along the tokens.

A turn is the list of its values in the order of `Turn`: with a name for each of them, the names would be most of the
header.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentgym.episode import (
    PER_TOKEN,
    EndReason,
    Episode,
    Trajectory,
    Turn,
    check_joined,
    joined,
    joined_routes,
    no_route,
)
from agentgym.errors import IntegrityError, WireError

_NO_ROUTES = np.broadcast_to(np.array(no_route(np.dtype(np.uint8)), np.uint8), (1 << 62, 1, 1))
"""Rows "no route", which take no memory: more than anybody needs."""


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
    sampling_seed: int
    checksums: tuple[int, ...]
    trajectories: tuple[_TrajectoryFields, ...]


def encode_episode(episode: Episode) -> tuple[dict[str, Any], dict[str, NDArray[Any] | None]]:
    """Return the header fields and arrays of an episode."""
    trajectories = episode.trajectories
    arrays: dict[str, NDArray[Any] | None] = {}
    if trajectories:
        arrays = {**joined(trajectories, PER_TOKEN), "routes": joined_routes(trajectories)}
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
        "sampling_seed": episode.sampling_seed,
        "checksums": list(episode.checksums),
        "trajectories": [
            {
                "agent": t.agent,
                "policy": t.policy,
                "trainable": t.trainable,
                "branch": t.branch,
                "length": len(t.tokens),
                "routed": t.routes is not None,
                "turns": list(t.turns),
            }
            for t in trajectories
        ],
    }
    return header, arrays


def decode_episode(
    header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], *, routes: bool = True
) -> Episode:
    """Return the episode in a message, checked.

    Args:
        header: its plain values.
        arrays: its arrays.
        routes: whether the routes are among them. Otherwise each trajectory that has some gets a row "no route" for
            each token, which takes no memory.

    Raises:
        WireError: a field is missing or of the wrong type, or the arrays do not fit to it.
    """
    try:
        fields = _EpisodeFields.model_validate(header)
        if not routes:
            count = sum(d.length for d in fields.trajectories if d.routed)
            arrays = {**arrays, "routes": _NO_ROUTES[:count]}
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
    return Episode(**{**fields.__dict__, "trajectories": trajectories})


def _trajectories(
    described: Sequence[_TrajectoryFields], arrays: Mapping[str, NDArray[Any]]
) -> Iterator[Trajectory]:
    check_joined(
        arrays,
        PER_TOKEN if described else {},
        tokens=sum(d.length for d in described),
        routed=sum(d.length for d in described if d.routed),
    )
    routes = arrays.get("routes")
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
