"""Where weights wait between the trainer and the policy servers: safetensors files in shared memory.

The trainer writes `weights-<version>.safetensors` (Hugging Face names) beside its final name and renames it, so a
file that has the name is complete. The coordinator removes a version when every server has loaded a newer one.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIX, LOCK = "agentgym-weights-", "lock"


@contextlib.contextmanager
def exchange_folder() -> Iterator[Path]:
    """Make a private folder for weight files: in shared memory, or in the temporary folder where there is none.

    What else is of no use after the run may lie there too. Its lock is held as long as it is in use. A run that was
    killed could not remove its own, and nobody else would give that memory back: so folders whose lock is free are
    removed here.
    """
    root = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    for abandoned in root.glob(f"{PREFIX}*"):
        _remove_unless_in_use(abandoned)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    try:
        with (folder / f".{LOCK}").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / f".{LOCK}").rename(folder / LOCK)  # nobody finds it before it is held
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unless_in_use(folder: Path) -> None:
    # A folder without a lock file is being made, or another user's; a lock that is held raises too.
    with contextlib.suppress(OSError), (folder / LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)


def weights_file(folder: Path, version: int) -> Path:
    """Return the file of a version."""
    return folder / f"weights-{version}.safetensors"


def remove_older(folder: Path, version: int) -> None:
    """Remove the files of all versions before `version`."""
    for path in folder.glob("weights-*.safetensors"):
        if int(path.stem.removeprefix("weights-")) < version:
            path.unlink(missing_ok=True)
