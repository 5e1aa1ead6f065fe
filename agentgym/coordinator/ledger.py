"""The SQLite file of a run's episodes: how it is opened, locked and laid out, and how its faults read.

See `agentgym.coordinator.store` for what its tables mean.
"""

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from agentgym.errors import IntegrityError, RunError, WireError

LEDGER = "ledger.sqlite"
FORMAT = 4

_SCHEMA = f"""
BEGIN;
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, task_index INTEGER NOT NULL, size INTEGER NOT NULL, step INTEGER, place INTEGER
);
CREATE TABLE episodes (
    arrival INTEGER PRIMARY KEY, lease_id INTEGER NOT NULL UNIQUE,
    group_id INTEGER NOT NULL, member INTEGER NOT NULL,
    segment INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL, crc INTEGER NOT NULL,
    routes INTEGER NOT NULL,
    UNIQUE (group_id, member)
);
CREATE TABLE set_aside (
    task_index INTEGER PRIMARY KEY, size INTEGER NOT NULL, given_up INTEGER NOT NULL, error TEXT NOT NULL
);
PRAGMA user_version = {FORMAT};
COMMIT;
"""


def open_ledger(folder: Path) -> sqlite3.Connection:
    """Open the ledger of a folder for writing, or make it. Raises RunError where it is of another version."""
    path = folder / LEDGER
    if not path.exists():  # SQLite's other files get the same mode
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    connection = connect(folder, "rw")
    connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL")
    if not connection.execute("PRAGMA user_version").fetchone()[0]:
        connection.executescript(_SCHEMA)
    check_format(connection, folder)
    return connection


def connect(folder: Path, mode: str) -> sqlite3.Connection:
    """Open the ledger of a folder in a mode of SQLite's ("rw", "ro").

    Raises:
        sqlite3.OperationalError: it is not there.
    """
    address = f"{(folder / LEDGER).absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(address, uri=True, timeout=10.0, isolation_level=None, check_same_thread=False)


def lock(folder: Path) -> int:
    """Return a descriptor that keeps others from writing there until it is closed, or its process is dead."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunError(f"another process writes into {folder}; is the run still going on?") from None
    return descriptor


def check_format(ledger: sqlite3.Connection, folder: Path) -> None:
    """Raise RunError where a ledger is of another version."""
    (version,) = ledger.execute("PRAGMA user_version").fetchone()
    if version != FORMAT:
        raise RunError(f"{folder / LEDGER} has format {version}; this version of agentgym reads {FORMAT}")


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn what goes wrong with the files into one sentence."""
    try:
        yield
    except (sqlite3.OperationalError, OSError) as error:
        raise RunError(
            f"{folder} cannot be read or written: {error}; go on with --resume when it can"
        ) from error
    except (sqlite3.Error, WireError, IntegrityError) as error:
        raise RunError(
            f"{folder} is damaged: {error}; bring a copy back, or move it away and --resume: "
            "the tasks of the episodes in it are then played again"
        ) from error
