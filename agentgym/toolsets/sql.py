"""SQL for reading: a tool that runs one SELECT on an SQLite database, of which nothing can be changed.

def fill(db, context):
    db.execute("create table sales (region text, amount int)")
    rows = [("north", int(context.env.np_random.integers(50))) for _ in range(20)]
    db.executemany("insert into sales values (?, ?)", rows)


class Sales(ToolEnv):
    toolsets = [Sql(fill)]  # or Sql("shop.db")
"""

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.request import pathname2url

from agentgym.errors import EnvError
from agentgym.tool_runner import Toolset
from agentgym.tool_schema import Context, ToolError
from agentgym.tools import tool

_STEPS = 10_000
"""Virtual machine instructions between two looks at the clock: well below a millisecond."""
_MAX_VALUE_BYTES = 1_000_000
"""The longest text or blob that a query may build, and the longest query."""

_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_UNSEEDED = {"load_extension", "random", "randomblob"}
"""Functions that reach outside, or that make two episodes of one seed differ."""

Fill = Callable[[sqlite3.Connection, Context], None]


class Sql(Toolset):
    """One database per episode: a file that is only read, or one in memory that a function fills."""

    db: sqlite3.Connection | None = None
    """The database while an episode lasts, as read-only for the environment as for the model."""

    def __init__(self, source: str | Path | Fill, *, timeout: float = 2.0, max_rows: int = 50) -> None:
        """Take the database, the seconds a query may take, and the rows that are shown."""
        self._source = source
        self._timeout = timeout
        self._max_rows = max_rows

    def open(self, context: Context) -> None:
        """Open the database. Raises EnvError where its file cannot be opened."""
        if callable(self._source):
            self.db = sqlite3.connect(":memory:", check_same_thread=False)
            self._source(self.db, context)
            self.db.commit()
        else:
            uri = f"file:{pathname2url(str(self._source))}?mode=ro"
            try:
                self.db = sqlite3.connect(uri, uri=True, check_same_thread=False)
                self.db.execute("select 1 from sqlite_master")
            except sqlite3.Error as error:
                raise EnvError(f"the database {self._source} cannot be opened: {error}") from error
        self.db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        self.db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        self.db.set_authorizer(_only_reading)

    def close(self) -> None:
        """Close the database."""
        if self.db is not None:
            self.db.close()
            self.db = None

    @tool
    def sql(self, query: str) -> str:
        """Run one SELECT statement (SQLite) and read its rows.

        Args:
            query: The statement.
        """
        if self.db is None:
            raise EnvError("Sql: the database is not open; call super().reset() before tools are used")
        deadline = time.monotonic() + self._timeout
        self.db.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
        try:
            with closing(self.db.execute(query)) as cursor:
                names = [column[0] for column in cursor.description or ()]
                rows = cursor.fetchmany(self._max_rows + 1)
        except (sqlite3.Error, sqlite3.Warning) as error:
            if time.monotonic() > deadline:
                raise ToolError(f"the query took longer than {self._timeout:g} s") from error
            raise ToolError(f"{error}") from error
        finally:
            self.db.set_progress_handler(None, 0)
        lines = [" | ".join(names), *(" | ".join(map(_shown, row)) for row in rows[: self._max_rows])]
        more = (
            f"first {self._max_rows} rows; there are more"
            if len(rows) > self._max_rows
            else f"{len(rows)} rows"
        )
        return "\n".join([*lines, f"({more})"])


def _only_reading(action: int, _first: str | None, second: str | None, *_where: str | None) -> int:
    """Allow what reads; SQLite asks while it compiles a statement."""
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _UNSEEDED:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY


def _shown(value: object) -> str:
    if value is None:
        return "NULL"
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else str(value)
