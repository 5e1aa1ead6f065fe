"""What workers recorded of a batch, which does not cross the wire a second time.

It is on the disk before a step may take the episode. So a batch message has only what the coordinator made, and says
where the episodes of its samples lie; the trainer, which runs where the coordinator does, reads the rest there. What is
not what the worker recorded is found by the checksum of the sample.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentgym.batch import RECORDED
from agentgym.episode import PER_TOKEN, Episode
from agentgym.errors import IntegrityError, WireError
from agentgym.protocol import BatchHeader
from agentgym.routes import read_episode
from agentgym.segments import Place


class Origin(NamedTuple):
    """Which trajectory a sample is."""

    group_id: int
    member: int
    trajectory: int
    """Its number in the episode."""


def located(
    header: BatchHeader, origins: Sequence[Origin], folder: Path, places: Mapping[tuple[int, int], Place]
) -> BatchHeader:
    """Return a batch's header with where its samples were recorded; `places` are those of the members of groups."""
    found = [(*places[origin.group_id, origin.member], origin.trajectory) for origin in origins]
    return header.model_copy(update={"episodes": str(folder), "recorded": found})


def with_recorded(header: BatchHeader, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a batch message, and those that the workers recorded, one sample after another.

    Raises:
        IntegrityError: an episode cannot be read, or is of another length, or has not the routes that others have.
    """
    if not header.recorded:
        return dict(arrays)
    if len(header.recorded) != len(header.lengths):
        raise IntegrityError(
            f"step {header.step} says where {len(header.recorded)} samples lie and how long {len(header.lengths)} are"
        )
    total = sum(header.lengths)
    found: dict[str, NDArray[Any]] = {
        name: np.empty(total, PER_TOKEN[theirs]) for name, theirs in RECORDED.items()
    }
    ends = np.cumsum(header.lengths)
    read: tuple[Place, Episode] | None = None
    # In the order in which they lie there, so that the trajectories of an episode are read together.
    for count, number in enumerate(sorted(range(len(header.recorded)), key=header.recorded.__getitem__)):
        *where, index = header.recorded[number]
        place, length, what = Place(*where), header.lengths[number], f"sample {number} of step {header.step}"
        try:
            if read is None or read[0] != place:
                read = place, read_episode(Path(header.episodes), place)
            trajectory = read[1].trajectories[index]
        except (OSError, WireError, IndexError) as error:
            raise IntegrityError(f"the episode of {what} cannot be read: {error}") from error
        if len(trajectory.tokens) != length:
            raise IntegrityError(
                f"{what} has {length} tokens, where its worker recorded {len(trajectory.tokens)}"
            )
        span = slice(ends[number] - length, ends[number])
        for name, theirs in RECORDED.items():
            found[name][span] = getattr(trajectory, theirs)
        routes = trajectory.routes
        if count == 0 and routes is not None:
            found["routes"] = np.empty((total, *routes.shape[1:]), routes.dtype)
        if _kind(routes) != _kind(found.get("routes")):
            raise IntegrityError(f"{what} has not the routes that the others have")
        if routes is not None:
            found["routes"][span] = routes
    return {**arrays, **found}


def _kind(routes: NDArray[Any] | None) -> object:
    return None if routes is None else (routes.shape[1:], routes.dtype)
