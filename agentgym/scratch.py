"""Private folders that go with the process that made them, even where it is killed."""

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

TEMPORARY = Path(tempfile.gettempdir())
_LOCK = "lock"


@contextlib.contextmanager
def scratch_folder(purpose: str, root: Path = TEMPORARY) -> Iterator[Path]:
    """Make a folder, and remove it at the end of the block.

    Its lock is held as long as it is in use. A process that was killed could not remove its own, and nobody else would
    give that memory or disk back: so the folders for the same purpose whose lock is free are removed first.
    """
    prefix = f"agentgym-{purpose}-"
    for abandoned in root.glob(f"{prefix}*"):
        _remove_unless_in_use(abandoned)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    try:
        with (folder / f".{_LOCK}").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / f".{_LOCK}").rename(folder / _LOCK)  # nobody finds it before it is held
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unless_in_use(folder: Path) -> None:
    # A folder without a lock file is being made, or another user's; a lock that is held raises too.
    with contextlib.suppress(OSError), (folder / _LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
