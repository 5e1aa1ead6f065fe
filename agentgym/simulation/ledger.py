"""The store of a simulated run: the same promises as the one on disk, kept in memory."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgym.coordinator.groups import SetAside
from agentgym.coordinator.store import Places, StoredGroup
from agentgym.episode import Episode
from agentgym.episode_codec import decode_episode
from agentgym.errors import RunError
from agentgym.protocol import EpisodeDone
from agentgym.segments import Place
from agentgym.wire import Packet

Message = tuple[Mapping[str, Any], Mapping[str, Any]]
"""An episode as it was sent: header and arrays."""


@dataclass(slots=True)
class Entry:
    """A group and what became of it."""

    group: StoredGroup
    leases: dict[int, int] = field(default_factory=dict)
    """By member: of its episode."""
    episodes: dict[int, Message] = field(default_factory=dict)
    """By member; empty when they are forgotten."""
    step: int | None = None
    """That took it; None: it waits."""
    place: int | None = None
    """In the order in which groups were taken."""


class Ledger:
    """Every group of a run, in the order in which its first episode came."""

    folder = Path()

    def __init__(self) -> None:
        """Make an empty ledger; it outlives the coordinators of a run that is resumed."""
        self.entries: dict[int, Entry] = {}
        """By group; those that are dropped are gone."""
        self.dropped: list[int] = []
        self.replaced: list[int] = []
        """Leases whose episode gave way to another one of the same member."""
        self._places = 0
        self._last_lease = 0

    def open(self, _run: Path, _failed: Callable[[RunError], None]) -> "Ledger":
        """Return itself, as the store of a coordinator."""
        return self

    @property
    def bytes_used(self) -> int:
        """Nothing: memory is not what is simulated."""
        return 0

    def go_on(self, step: int) -> list[StoredGroup]:
        """See `EpisodeStore.go_on`."""
        pending = []
        for entry in self.entries.values():
            if entry.step is not None and entry.step > step:
                entry.step = None
            if entry.step is None:
                pending.append(entry)
        taken = sorted((e for e in pending if e.place is not None), key=lambda e: e.place or 0)
        others = sorted((e for e in pending if e.place is None), key=lambda e: not self._complete(e))
        return [
            StoredGroup(e.group.group_id, e.group.task_index, e.group.size, self._complete(e))
            for e in (*taken, *others)
        ]

    def _complete(self, entry: Entry) -> bool:
        return entry.place is not None or len(entry.leases) >= entry.group.size

    def next_lease(self) -> int:
        """See `EpisodeStore.next_lease`."""
        return self._last_lease + 1

    def members(self, group_id: int) -> dict[int, Episode]:
        """See `EpisodeStore.members`."""
        episodes = self.entries[group_id].episodes
        return {member: decode_episode(header, arrays) for member, (header, arrays) in episodes.items()}

    def add(self, group: StoredGroup, packet: Packet, done: Callable[[], None]) -> None:
        """See `EpisodeStore.add`."""
        entry = self.entries.setdefault(group.group_id, Entry(group))
        message = packet.expect(EpisodeDone)
        lease_id, member = message.lease_id, message.episode["member"]
        if member in entry.leases:
            self.replaced.append(entry.leases[member])
        entry.leases[member], entry.episodes[member] = lease_id, (message.episode, packet.arrays)
        self._last_lease = max(self._last_lease, lease_id)
        asyncio.get_running_loop().call_soon(done)

    def consume(self, step: int, group_ids: Sequence[int], done: Callable[[Places], None]) -> None:
        """See `EpisodeStore.consume`."""
        for group_id in group_ids:
            entry = self.entries[group_id]
            if entry.step is not None:
                raise RunError(f"group {group_id} is consumed by steps {entry.step} and {step}")
            self._places += 1
            entry.step, entry.place = step, entry.place or self._places
        taken = [(group_id, member) for group_id in group_ids for member in self.entries[group_id].episodes]
        places = {(group_id, member): Place(group_id, member, 0, 0) for group_id, member in taken}
        asyncio.get_running_loop().call_soon(done, places)

    def versions(self, place: Place, trajectory: int) -> NDArray[np.int32]:
        """Return what a trainer reads at a place of `consume`: the versions [K] of a trajectory."""
        header, arrays = self.entries[place.segment].episodes[place.offset]
        lengths = [described["length"] for described in header["trajectories"]]
        start = sum(lengths[:trajectory])
        versions: NDArray[np.int32] = arrays["versions"][start : start + lengths[trajectory]]
        return versions

    def drop(self, group_ids: Iterable[int]) -> None:
        """See `EpisodeStore.drop`."""
        for group_id in group_ids:
            self.entries.pop(group_id, None)
            self.dropped.append(group_id)

    def set_aside(self, tasks: Sequence[SetAside]) -> None:
        """See `EpisodeStore.set_aside`."""
        self.drop([task.group_id for task in tasks])

    def forget(self, step: int, *, keep: int, oldest_lease: int) -> None:
        """Forget the episodes that steps until `step` consumed; what became of their groups is kept."""
        for entry in self.entries.values():
            if entry.step is not None and entry.step <= step:
                entry.episodes = {}

    def close(self) -> None:
        """Nothing waits here."""
