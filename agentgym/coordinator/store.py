"""The episodes of a run on disk: one is acknowledged to its worker only after it is here.

    RUN/episodes/ledger.sqlite    SQLite in write-ahead mode, synced with every transaction
        groups      group_id, task_index, size, step, place
        episodes    lease_id, group_id, member, where its message lies, and the size of the file with its routes,
                    0 where it has none; one for each member
        set_aside   tasks that nothing could be learned from: task_index, size, given_up, error
    RUN/episodes/segment-000001   the messages in which workers sent their episodes (`agentgym.segments`)
    RUN/episodes/routes-...       what workers have left there of them (`agentgym.routes`)

Only the user who runs it may read them.

A group is *pending* while its step is null, and *consumed* by the step that took it. It is marked before the batch
goes to the trainer, so that the checkpoint of step n stands for exactly the groups whose step is at most n. To go on
from it, the steps beyond n are set back to null: their groups are pending again and are taken in the order in which
they were taken before (`place`). No group is consumed by two steps that both survive, and none is lost.

Changes are queued; a thread writes all that have gathered in one transaction, in the order in which they were made,
and the callbacks that came with them run on the event loop after it.
"""

import asyncio
import contextlib
import logging
import math
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentgym.coordinator.groups import SetAside
from agentgym.coordinator.ledger import check_format, connect, explained, lock, open_ledger
from agentgym.episode import Episode
from agentgym.errors import IntegrityError, RunError, WireError
from agentgym.protocol import EpisodeDone
from agentgym.routes import RouteFiles, apart_bytes, read_episode
from agentgym.segments import Place, Segments
from agentgym.wire import Packet

FOLDER = "episodes"
"""In the run directory."""
MAX_ERROR = 2000
"""Characters of an error that are kept."""
CLOSE_SECONDS = 30.0
"""For the changes that wait when a run ends."""

_PLACE = ", ".join(Place._fields)
_MESSAGE = f"{_PLACE}, routes"
_logger = logging.getLogger(__name__)

Done = Callable[[], None]
Places = Mapping[tuple[int, int], Place]
"""By group and member."""
Change = Callable[[sqlite3.Connection], None]


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group as the disk knows it."""

    group_id: int
    task_index: int
    size: int
    complete: bool = False
    """Whether it has all its members, or had been taken by a step that is undone with those that it has."""


@dataclass(frozen=True, slots=True)
class StoredEpisode:
    """An episode and what became of it."""

    lease_id: int
    step: int | None
    """That trained on it; None: it waits."""
    episode: Episode


class EpisodeStore:
    """Writes the episodes of one run; belongs to a running event loop."""

    def __init__(self, run: Path, failed: Callable[[RunError], None]) -> None:
        """Open the store of a run directory, or make it; `failed` is told, on the loop, when nothing can be written.

        Raises:
            RunError: it is damaged, cannot be written, is of another version, or another process writes there.
        """
        self.folder = (run / FOLDER).absolute()
        """Where the messages lie."""
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        with explained(self.folder):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._lock = lock(self.folder)
            self._segments = Segments(self.folder)
            self._connection = open_ledger(self.folder)
            self._routes = RouteFiles(self.folder)
            self._remove_files(oldest_lease=math.inf)
        self._changes: queue.SimpleQueue[tuple[Change, Done | None] | None] = queue.SimpleQueue()
        self._removed = False
        self._oldest_lease = 0
        self._thread = threading.Thread(target=self._write_all, name="store", daemon=True)

    @property
    def bytes_used(self) -> int:
        """The size of the episodes on disk."""
        return self._segments.bytes_used + self._routes.bytes_used

    def go_on(self, step: int) -> list[StoredGroup]:
        """Undo what steps after `step` consumed, start writing, and return the groups that are pending.

        First come those that undone steps had taken, in their order, then those that are complete, then the others.
        Episodes that are not what their workers recorded are removed, so that they are played again.
        """
        with explained(self.folder), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute("UPDATE groups SET step = NULL WHERE step > ?", (step,))
            self._remove_damaged()
            rows = self._connection.execute(
                "SELECT group_id, task_index, size, place IS NOT NULL OR members >= size FROM groups "
                "JOIN (SELECT group_id, count(*) AS members, max(arrival) AS arrived FROM episodes GROUP BY group_id) "
                "USING (group_id) WHERE step IS NULL "
                "ORDER BY place IS NULL, place, members < size, arrived"
            ).fetchall()
        self._thread.start()
        return [StoredGroup(group, task, size, bool(complete)) for group, task, size, complete in rows]

    def _remove_damaged(self) -> None:
        rows = self._connection.execute(
            f"SELECT group_id, member, {_PLACE} FROM episodes JOIN groups USING (group_id) WHERE step IS NULL"
        ).fetchall()
        for group_id, member, *place in rows:
            try:
                _episode(self.folder, Place(*place))
            except (WireError, IntegrityError) as error:
                _logger.error("member %d of group %d is played again: %s", member, group_id, error)
                damaged = (group_id, member)
                self._connection.execute("DELETE FROM episodes WHERE group_id = ? AND member = ?", damaged)
                # Whatever took it, the group is not that any more.
                self._connection.execute("UPDATE groups SET place = NULL WHERE group_id = ?", (group_id,))

    def next_lease(self) -> int:
        """Return an id that no stored episode has, nor any after it."""
        with explained(self.folder):
            (last,) = self._connection.execute("SELECT max(lease_id) FROM episodes").fetchone()
        return int(last or 0) + 1

    def members(self, group_id: int) -> dict[int, Episode]:
        """Return the stored episodes of a group by member."""
        with explained(self.folder), contextlib.closing(connect(self.folder, "ro")) as ledger:
            rows = ledger.execute(f"SELECT {_PLACE} FROM episodes WHERE group_id = ?", (group_id,)).fetchall()
            # Who goes on from here needs no routes, and they were verified before.
            found = [read_episode(self.folder, Place(*row), routes=False) for row in rows]
        return {episode.member: episode for episode in found}

    def add(self, group: StoredGroup, packet: Packet, done: Done) -> None:
        """Keep an episode as its worker sent it; `done` is called when it is on the disk."""
        message = packet.expect(EpisodeDone)
        lease_id, member, routes = message.lease_id, message.episode["member"], apart_bytes(message.apart)

        def change(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT OR IGNORE INTO groups (group_id, task_index, size) VALUES (?, ?, ?)",
                (group.group_id, group.task_index, group.size),
            )
            connection.execute(
                # A member that is played again, since others met another opponent than it had, takes its own place.
                f"INSERT INTO episodes (lease_id, group_id, member, {_MESSAGE}) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
                f"ON CONFLICT (group_id, member) DO UPDATE SET (lease_id, {_MESSAGE}) = "
                f"(excluded.lease_id, {', '.join(f'excluded.{name}' for name in _MESSAGE.split(', '))})",
                (lease_id, group.group_id, member, *self._segments.append(packet.frames), routes),
            )
            if routes:
                self._routes.add(lease_id, routes)

        self._changes.put((change, done))

    def consume(self, step: int, group_ids: Sequence[int], done: Callable[[Places], None]) -> None:
        """Mark groups as taken by a step, in this order; `done` hears where they lie when that is on the disk."""
        places: dict[tuple[int, int], Place] = {}

        def change(connection: sqlite3.Connection) -> None:
            (last,) = connection.execute("SELECT coalesce(max(place), 0) FROM groups").fetchone()
            connection.executemany(
                # One that an undone step had taken keeps its place, before those that are still undone.
                "UPDATE groups SET step = ?, place = coalesce(place, ?) WHERE group_id = ?",
                [(step, place, group_id) for place, group_id in enumerate(group_ids, last + 1)],
            )
            for group_id in group_ids:
                rows = connection.execute(
                    f"SELECT member, {_PLACE} FROM episodes WHERE group_id = ?", (group_id,)
                )
                places.update({(group_id, member): Place(*place) for member, *place in rows})

        self._changes.put((change, partial(done, places)))

    def drop(self, group_ids: Sequence[int]) -> None:
        """Remove groups that no step will take."""
        if group_ids:
            self._changes.put((lambda connection: self._remove(connection, group_ids), None))

    def set_aside(self, tasks: Sequence[SetAside]) -> None:
        """Remove groups that were dropped, and keep the tasks that failed, with their errors."""
        rows = [
            (task.task_index, task.size, task.given_up, task.error[:MAX_ERROR])
            for task in tasks
            if task.error
        ]

        def change(connection: sqlite3.Connection) -> None:
            connection.executemany("INSERT OR REPLACE INTO set_aside VALUES (?, ?, ?, ?)", rows)
            self._remove(connection, [task.group_id for task in tasks])

        if tasks:
            self._changes.put((change, None))

    def forget(self, step: int, *, keep: int, oldest_lease: int) -> None:
        """Remove what steps up to `step`, which has a checkpoint, consumed; but for the last `keep` episodes or so.

        Routes go when nobody needs them and no lease that is out is as old: their worker may have died before it sent
        the episode.
        """

        def change(connection: sqlite3.Connection) -> None:
            taken = connection.execute(
                "SELECT group_id, count(*) FROM groups JOIN episodes USING (group_id) WHERE step <= ? "
                "GROUP BY group_id ORDER BY place DESC",
                (step,),
            )
            old, episodes = [], 0
            for group_id, members in taken.fetchall():
                episodes += members
                if episodes > keep:
                    old.append(group_id)
            self._remove(connection, old)
            self._oldest_lease = oldest_lease

        self._changes.put((change, None))

    def close(self) -> None:
        """Write what waits, and close the files."""
        self._changes.put(None)
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._connection.close()
            with contextlib.suppress(OSError):  # said before, by the change that could not be written
                self._segments.close()
            os.close(self._lock)

    def _write_all(self) -> None:
        going_on = True
        while going_on:
            gathered = [self._changes.get()]
            with contextlib.suppress(queue.Empty):
                while gathered[-1] is not None:
                    gathered.append(self._changes.get_nowait())
            going_on = gathered[-1] is not None
            changes = [entry for entry in gathered if entry is not None]
            try:
                with explained(self.folder):
                    self._write([change for change, _ in changes])
            except RunError as error:
                self._tell(self._failed, error)
                return
            self._tell(_call_all, [done for _, done in changes if done is not None])

    def _write(self, changes: Sequence[Change]) -> None:
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            for change in changes:
                change(self._connection)
            self._segments.sync()  # before the ledger says what they hold
        if self._removed:
            self._removed = False
            self._remove_files(self._oldest_lease)

    def _remove(self, connection: sqlite3.Connection, group_ids: Sequence[int]) -> None:
        rows = [(group_id,) for group_id in group_ids]
        connection.executemany("DELETE FROM episodes WHERE group_id = ?", rows)
        connection.executemany("DELETE FROM groups WHERE group_id = ?", rows)
        self._removed = True

    def _remove_files(self, oldest_lease: float) -> None:
        segments = self._connection.execute("SELECT DISTINCT segment FROM episodes").fetchall()
        self._segments.remove_others({segment for (segment,) in segments})
        routed = self._connection.execute("SELECT lease_id FROM episodes WHERE routes > 0").fetchall()
        self._routes.remove_others({lease_id for (lease_id,) in routed}, older_than=oldest_lease)

    def _tell(self, function: Callable[..., None], argument: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for it any more
            self._loop.call_soon_threadsafe(function, argument)


def count_episodes(run: Path) -> int:
    """Return how many episodes a run directory holds. Raises RunError as `stored_episodes` does."""
    with explained(run / FOLDER), contextlib.closing(connect(run / FOLDER, "ro")) as ledger:
        return int(ledger.execute("SELECT count(*) FROM episodes").fetchone()[0])


def tasks_set_aside(run: Path) -> list[SetAside]:
    """Return the tasks that a run has set aside. Raises RunError as `stored_episodes` does."""
    folder = run / FOLDER
    with explained(folder), contextlib.closing(connect(folder, "ro")) as ledger:
        check_format(ledger, folder)
        rows = ledger.execute("SELECT task_index, size, given_up, error FROM set_aside ORDER BY task_index")
        return [SetAside(*row) for row in rows]


def stored_episodes(run: Path, part: slice = slice(None)) -> Iterator[StoredEpisode]:
    """Yield the episodes in a run directory, or a part of them, in the order in which they came.

    The run may be going on. They are as their workers sent them: group rewards come later.

    Raises:
        RunError: there is no store, or it is damaged.
    """
    folder = run / FOLDER
    with explained(folder), contextlib.closing(connect(folder, "ro")) as ledger:
        check_format(ledger, folder)
        rows = ledger.execute(
            f"SELECT lease_id, step, {_PLACE} FROM episodes JOIN groups USING (group_id) ORDER BY arrival"
        ).fetchall()
        for lease_id, step, *place in rows[part]:
            try:
                episode = _episode(folder, Place(*place))
            except (FileNotFoundError, WireError):
                if ledger.execute("SELECT 1 FROM episodes WHERE lease_id = ?", (lease_id,)).fetchone():
                    raise
                continue  # the run has forgotten it meanwhile
            yield StoredEpisode(lease_id, step, episode)


def _episode(folder: Path, place: Place) -> Episode:
    """Read an episode. Raises WireError or IntegrityError where it is not what its worker recorded."""
    episode = read_episode(folder, place)
    episode.verify()
    return episode


def _call_all(functions: Sequence[Done]) -> None:
    for function in functions:
        function()
