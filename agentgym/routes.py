"""The routes of a batch, which do not cross the wire a second time.

They are most of an episode's bytes (layers x experts for a token, where all the rest is 13), the coordinator has no use
for them, and they are on the disk before a step may take the episode. So a batch message says where the episodes of
its samples lie, and the trainer, which runs where the coordinator does, reads the routes there. What is not what the
worker recorded is found by the checksum of the sample.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentgym.episode_codec import decode_episode
from agentgym.errors import IntegrityError, WireError
from agentgym.protocol import BatchHeader, EpisodeDone
from agentgym.segments import Place, read_message
from agentgym.wire import unpack


class Origin(NamedTuple):
    """Which trajectory a sample is."""

    group_id: int
    member: int
    trajectory: int
    """Its number in the episode."""


def located(
    header: BatchHeader, origins: Sequence[Origin], folder: Path, places: Mapping[tuple[int, int], Place]
) -> BatchHeader:
    """Return a batch's header with where the routes of its samples are; `places` are those of the members of groups."""
    found = [(*places[origin.group_id, origin.member], origin.trajectory) for origin in origins]
    return header.model_copy(update={"episodes": str(folder), "routes": found})


def with_routes(header: BatchHeader, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a batch message, and the routes of its samples, one after another.

    Raises:
        IntegrityError: an episode cannot be read, or has not the routes of as many tokens.
    """
    if not header.routes:
        return dict(arrays)
    joined: NDArray[Any] | None = None
    end = 0
    for number, (length, (*place, trajectory)) in enumerate(zip(header.lengths, header.routes, strict=True)):
        try:
            routes = _routes(Path(header.episodes), Place(*place), trajectory)
        except (OSError, WireError, IndexError) as error:
            raise IntegrityError(
                f"the episode of sample {number} of step {header.step} cannot be read: {error}"
            ) from error
        if joined is None and routes is not None:
            joined = np.empty((sum(header.lengths), *routes.shape[1:]), routes.dtype)
        start, end = end, end + length
        if (
            routes is None
            or joined is None
            or (len(routes), routes.shape[1:], routes.dtype) != (length, joined.shape[1:], joined.dtype)
        ):
            raise IntegrityError(
                f"sample {number} of step {header.step} has no routes of {length} tokens like the others"
            )
        joined[start:end] = routes
    assert joined is not None
    return {**arrays, "routes": joined}


def _routes(folder: Path, place: Place, trajectory: int) -> NDArray[np.unsignedinteger[Any]] | None:
    packet = unpack(read_message(folder, place))
    return decode_episode(packet.expect(EpisodeDone).episode, packet.arrays).trajectories[trajectory].routes
