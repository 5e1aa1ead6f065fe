"""The routes of episodes, which a worker leaves on the disk.

They are most of an episode's bytes (layers x experts for a token, where all the rest is 13), and the coordinator has no
use for them. So a worker on its machine leaves them in a file among the run's episodes; one on another machine sends
them along, and then they are in the episode's message. What is not what the worker recorded is found by the checksum of
the trajectory.

    RUN/episodes/routes-000017    of the episode of lease 17: those of its trajectories, joined; the bytes of the array
"""

import contextlib
import math
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgym.episode import Episode
from agentgym.episode_codec import decode_episode
from agentgym.errors import WireError
from agentgym.protocol import EpisodeDone, RoutesApart
from agentgym.segments import Place, begin_file, read_message, sync_file, sync_path
from agentgym.wire import unpack

APART_BYTES = 1 << 16
"""Size from which routes are worth a file of their own."""
_PREFIX = "routes-"


class RouteFiles:
    """The files with routes of a folder, which workers write, and the coordinator removes."""

    def __init__(self, folder: Path) -> None:
        """Look at what is there."""
        self._folder = folder
        self._sizes = {lease: os.stat(routes_file(folder, lease)).st_size for lease in self._found()}

    @property
    def bytes_used(self) -> int:
        """The size of all files that belong to episodes."""
        return sum(self._sizes.values())

    def add(self, lease_id: int, size: int) -> None:
        """Take note of the file of an episode."""
        self._sizes[lease_id] = size

    def remove_others(self, needed: Set[int], *, older_than: float) -> None:
        """Remove the files of leases that are not needed, nor out: those are not older than `older_than`."""
        for lease_id in self._found():
            if lease_id < older_than and lease_id not in needed:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(routes_file(self._folder, lease_id))
                self._sizes.pop(lease_id, None)

    def _found(self) -> list[int]:
        names = os.listdir(self._folder)  # a third of the time of Path.glob
        return [int(name.removeprefix(_PREFIX)) for name in names if name.startswith(_PREFIX)]


def routes_file(folder: Path, lease_id: int) -> str:
    """Return where the routes of an episode lie, if they lie apart from it."""
    return os.path.join(folder, f"{_PREFIX}{lease_id:06d}")  # a Path takes three times as long


def write_routes(folder: Path, lease_id: int, routes: NDArray[Any]) -> RoutesApart:
    """Write the routes of an episode apart from it; return, when they are on the disk, what its message says of them.

    Raises:
        OSError: it is there already, or cannot be written.
    """
    path = routes_file(folder, lease_id)
    with begin_file(path) as file:
        try:
            file.write(np.ascontiguousarray(routes).data)
            sync_file(file)
        except OSError:
            os.unlink(path)
            raise
    sync_path(folder)
    return RoutesApart(dtype="uint8" if routes.dtype == np.uint8 else "uint16", shape=list(routes.shape))


def apart_bytes(apart: RoutesApart | None) -> int:
    """Return the size of a file of routes; 0 where there is none."""
    return 0 if apart is None else np.dtype(apart["dtype"]).itemsize * math.prod(apart["shape"])


def decode_without_routes(message: EpisodeDone, arrays: Mapping[str, NDArray[Any]], folder: Path) -> Episode:
    """Return the episode in a worker's message; routes that lie apart in `folder` are not read.

    Raises:
        WireError: the message is wrong, or there is no file of the size that it says.
    """
    if message.apart is not None:
        path = routes_file(folder, message.lease_id)
        written = apart_bytes(message.apart)
        try:
            found = os.stat(path).st_size
        except FileNotFoundError:
            found = 0
        if found != written:
            raise WireError(f"{path} has {found} bytes, its worker wrote {written}")
    return decode_episode(message.episode, arrays, routes=message.apart is None)


def read_episode(folder: Path, place: Place, *, routes: bool = True) -> Episode:
    """Return a stored episode, not verified; routes that lie apart are read only if they are asked for.

    Raises:
        OSError: a segment is not there, or cannot be read.
        WireError: what is there is not what was written.
    """
    packet = unpack(read_message(folder, place))
    message = packet.expect(EpisodeDone)
    if message.apart is None:
        return decode_episode(message.episode, packet.arrays)
    if not routes:
        return decode_without_routes(message, packet.arrays, folder)
    path = routes_file(folder, message.lease_id)
    try:
        found = np.fromfile(path, message.apart["dtype"]).reshape(message.apart["shape"])
    except (OSError, ValueError) as error:
        raise WireError(f"{path} does not hold the routes of its episode: {error}") from error
    return decode_episode(message.episode, {**packet.arrays, "routes": found})
