"""An episode as a message: a header of plain values and the trajectories' arrays, concatenated along the tokens."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from agentgym.episode import EndReason, Episode, Trajectory, Turn
from agentgym.errors import IntegrityError, WireError

PER_TOKEN = ("tokens", "loss_mask", "logprobs", "versions")
_TURNS = TypeAdapter(tuple[Turn, ...])
_METRICS = TypeAdapter(dict[str, float])
_AGENT_METRICS = TypeAdapter(dict[str, dict[str, float]])


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
                "turns": [asdict(turn) for turn in t.turns],
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
        trajectories = tuple(_trajectories(header["trajectories"], arrays))
        episode = Episode(
            env_id=str(header["env_id"]),
            task_index=int(header["task_index"]),
            seed=int(header["seed"]),
            group_id=int(header["group_id"]),
            member=int(header["member"]),
            end_reason=EndReason(header["end_reason"]),
            trajectories=trajectories,
            checksums=tuple(int(c) for c in header["checksums"]),
            metrics=_METRICS.validate_python(header["metrics"]),
            agent_metrics=_AGENT_METRICS.validate_python(header["agent_metrics"]),
            error=str(header["error"]),
        )
        for trajectory in trajectories:
            trajectory.check()
    except (KeyError, TypeError, ValueError, ValidationError, IntegrityError) as error:
        raise WireError(f"an episode message is wrong: {type(error).__name__}: {error}") from error
    if len(episode.checksums) != len(trajectories):
        raise WireError(f"an episode has {len(trajectories)} trajectories and {len(episode.checksums)} checksums")
    return episode


def _trajectories(described: list[dict[str, Any]], arrays: Mapping[str, NDArray[Any]]) -> list[Trajectory]:
    total = sum(d["length"] for d in described)
    routed = sum(d["length"] for d in described if d["routed"])
    for name in PER_TOKEN if described else ():
        if len(arrays[name]) != total:
            raise ValueError(f"{name} has {len(arrays[name])} entries, the trajectories {total} tokens")
    if routed != len(arrays.get("routes", ())):
        raise ValueError(f"routes have {len(arrays.get('routes', ()))} rows, the routed trajectories {routed} tokens")
    out, start, row = [], 0, 0
    for d in described:
        end, routes = start + d["length"], None
        if d["routed"]:
            routes = arrays["routes"][row : row + d["length"]]
            row += d["length"]
        out.append(
            Trajectory(
                agent=d["agent"],
                policy=d["policy"],
                trainable=bool(d["trainable"]),
                branch=int(d["branch"]),
                routes=routes,
                turns=_TURNS.validate_python(d["turns"]),
                **{name: arrays[name][start:end] for name in PER_TOKEN},
            )
        )
        start = end
    return out
