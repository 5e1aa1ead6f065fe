"""The episodes of a run on disk: one is acknowledged to its worker only after it is here.

    RUN/episodes.sqlite   SQLite in write-ahead mode, synced with every transaction, readable by its owner only

    groups     group_id, task_index, size, step, place
    episodes   lease_id, group_id, message: the frames in which its worker sent the episode, as one msgpack list

A group is *pending* while its step is null, and *consumed* by the step that took it. It is marked before the batch
goes to the trainer, so that the checkpoint of step n stands for exactly the groups whose step is at most n. To go on
from it, the steps beyond n are set back to null: their groups are pending again and are taken in the order in which
they were taken before (`place`). No group is consumed by two steps that both survive, and none is lost.

Changes are queued; a thread writes all that have gathered in one transaction, in the order in which they were made,
and the callbacks that came with them run on the event loop after it.
"""

import asyncio
import contextlib
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from numpy.typing import NDArray

from agentgym.episode import Episode
from agentgym.episode_codec import decode_episode
from agentgym.errors import RunError, WireError
from agentgym.protocol import EpisodeDone
from agentgym.wire import pack, unpack

FILE = "episodes.sqlite"
"""In the run directory."""
FORMAT = 1
CLOSE_SECONDS = 30.0
"""For the changes that wait when a run ends."""

_SCHEMA = f"""
BEGIN;
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, task_index INTEGER NOT NULL, size INTEGER NOT NULL, step INTEGER, place INTEGER
);
CREATE TABLE episodes (
    arrival INTEGER PRIMARY KEY, lease_id INTEGER NOT NULL UNIQUE, group_id INTEGER NOT NULL, message BLOB NOT NULL
);
CREATE INDEX episodes_by_group ON episodes (group_id);
PRAGMA user_version = {FORMAT};
COMMIT;
"""

Done = Callable[[], None]
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

    def __init__(self, folder: Path, *, failed: Callable[[RunError], None]) -> None:
        """Open the file in a run's folder, or make it; `failed` is told, on the loop, when nothing can be written.

        Raises:
            RunError: the file is no store, is damaged, or is of another version.
        """
        self._path = folder / FILE
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        if not self._path.exists():
            os.close(
                os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600)
            )  # SQLite's other files get the same mode
        with _explained(self._path):
            self._connection = _connect(self._path, "rw")
            # Episodes are kilobytes to a megabyte; in pages of 4 KiB they would cost twice the time.
            self._connection.executescript(
                "PRAGMA page_size = 16384; PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL"
            )
            if not self._connection.execute("PRAGMA user_version").fetchone()[0]:
                self._connection.executescript(_SCHEMA)
        _check_format(self._connection, self._path)
        self.bytes = 0
        """Size of the file, as far as it is filled."""
        self._changes: queue.SimpleQueue[tuple[Change, Done | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="store", daemon=True)

    def go_on(self, step: int) -> list[StoredGroup]:
        """Undo what steps after `step` consumed, start writing, and return the groups that are pending.

        First come those that undone steps had taken, in their order, then those that are complete, then the others.
        """
        with _explained(self._path), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute("UPDATE groups SET step = NULL WHERE step > ?", (step,))
            rows = self._connection.execute(
                "SELECT group_id, task_index, size, place IS NOT NULL OR members >= size FROM groups "
                "JOIN (SELECT group_id, count(*) AS members, max(arrival) AS arrived FROM episodes GROUP BY group_id) "
                "USING (group_id) WHERE step IS NULL "
                "ORDER BY place IS NULL, place, members < size, arrived"
            ).fetchall()
        self._thread.start()
        return [StoredGroup(group, task, size, bool(complete)) for group, task, size, complete in rows]

    def next_lease(self) -> int:
        """Return an id that no stored episode has, nor any after it."""
        with _explained(self._path):
            (last,) = self._connection.execute("SELECT max(lease_id) FROM episodes").fetchone()
        return int(last or 0) + 1

    def members(self, group_id: int) -> dict[int, Episode]:
        """Return the stored episodes of a group by member."""
        with _explained(self._path), contextlib.closing(_connect(self._path, "ro")) as reader:
            rows = reader.execute("SELECT message FROM episodes WHERE group_id = ?", (group_id,)).fetchall()
            found = [_decode(message) for (message,) in rows]
        return {episode.member: episode for episode in found}

    def add(
        self,
        lease_id: int,
        group: StoredGroup,
        header: Mapping[str, Any],
        arrays: Mapping[str, NDArray[Any] | None],
        done: Done,
    ) -> None:
        """Keep an episode, in the form of `episode_codec`; `done` is called when it is on the disk."""
        frames = pack(EpisodeDone(lease_id=lease_id, episode=dict(header)), arrays)

        def change(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT OR IGNORE INTO groups (group_id, task_index, size) VALUES (?, ?, ?)",
                (group.group_id, group.task_index, group.size),
            )
            connection.execute(
                "INSERT INTO episodes (lease_id, group_id, message) VALUES (?, ?, ?)",
                (lease_id, group.group_id, msgpack.packb(frames)),
            )

        self._changes.put((change, done))

    def consume(self, step: int, group_ids: Sequence[int], done: Done) -> None:
        """Mark groups as taken by a step, in this order; `done` is called when that is on the disk."""

        def change(connection: sqlite3.Connection) -> None:
            (last,) = connection.execute("SELECT coalesce(max(place), 0) FROM groups").fetchone()
            connection.executemany(
                "UPDATE groups SET step = ?, place = ? WHERE group_id = ?",
                [(step, place, group_id) for place, group_id in enumerate(group_ids, last + 1)],
            )

        self._changes.put((change, done))

    def drop(self, group_ids: Sequence[int]) -> None:
        """Remove groups that no step will take."""
        if group_ids:
            self._changes.put((lambda connection: _remove(connection, group_ids), None))

    def forget(self, step: int, *, keep: int) -> None:
        """Remove what steps up to `step`, which has a checkpoint, consumed; but for the last `keep` episodes or so."""

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
            _remove(connection, old)

        self._changes.put((change, None))

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._changes.put(None)
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._connection.close()

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
                with _explained(self._path), self._connection:
                    self._connection.execute("BEGIN IMMEDIATE")
                    for change, _ in changes:
                        change(self._connection)
                with _explained(self._path):
                    self.bytes = _bytes_used(self._connection)
            except RunError as error:
                self._tell(self._failed, error)
                return
            self._tell(_call_all, [done for _, done in changes if done is not None])

    def _tell(self, function: Callable[..., None], argument: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for it any more
            self._loop.call_soon_threadsafe(function, argument)


def stored_episodes(folder: Path) -> Iterator[StoredEpisode]:
    """Yield the episodes that a run's folder holds, in the order in which they came; a run may be writing there.

    Raises:
        RunError: there is no store, or it is damaged.
    """
    path = folder / FILE
    with _explained(path), contextlib.closing(_connect(path, "ro")) as connection:
        _check_format(connection, path)
        rows = connection.execute(
            "SELECT lease_id, step, message FROM episodes JOIN groups USING (group_id) ORDER BY arrival"
        )
        for lease_id, step, message in rows:
            yield StoredEpisode(lease_id, step, _decode(message))


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    address = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(address, uri=True, timeout=10.0, isolation_level=None, check_same_thread=False)


def _check_format(connection: sqlite3.Connection, path: Path) -> None:
    with _explained(path):
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != FORMAT:
        raise RunError(f"{path} has format {version}; this version of agentgym reads {FORMAT}")


def _remove(connection: sqlite3.Connection, group_ids: Sequence[int]) -> None:
    rows = [(group_id,) for group_id in group_ids]
    connection.executemany("DELETE FROM episodes WHERE group_id = ?", rows)
    connection.executemany("DELETE FROM groups WHERE group_id = ?", rows)


def _bytes_used(connection: sqlite3.Connection) -> int:
    pages, free, size = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def _decode(message: bytes) -> Episode:
    """Return a stored episode. Raises WireError where it is not what its worker recorded."""
    try:
        packet = unpack(msgpack.unpackb(message))
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a message: {error}") from error
    episode = decode_episode(packet.expect(EpisodeDone).episode, packet.arrays)
    if episode.checksums != tuple(t.checksum() for t in episode.trajectories):
        raise WireError(f"member {episode.member} of group {episode.group_id} has another checksum")
    return episode


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what goes wrong with the file into one sentence."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise RunError(
            f"{path} cannot be read or written: {error}; go on with --resume when it can"
        ) from error
    except (sqlite3.Error, WireError) as error:
        raise RunError(
            f"{path} is damaged: {error}; bring a copy back, or move it away and --resume: "
            "the tasks of the episodes in it are then played again"
        ) from error


def _call_all(functions: Sequence[Done]) -> None:
    for function in functions:
        function()
