"""Where weights wait between the trainer and the policy servers: safetensors files in shared memory.

The trainer writes `weights-<version>.safetensors` (Hugging Face names) beside its final name and renames it, so a
file that has the name is complete. The coordinator removes a version when every server has loaded a newer one.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from agentgym.scratch import TEMPORARY, scratch_folder

SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def exchange_folder() -> Iterator[Path]:
    """Make a private folder for weight files: in shared memory, or in the temporary folder where there is none.

    What else is of no use after the run may lie there too.
    """
    root = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else TEMPORARY
    with scratch_folder("weights", root) as folder:
        yield folder


def weights_file(folder: Path, version: int) -> Path:
    """Return the file of a version."""
    return folder / f"weights-{version}.safetensors"


def remove_older(folder: Path, version: int) -> None:
    """Remove the files of all versions before `version`."""
    for path in folder.glob("weights-*.safetensors"):
        if int(path.stem.removeprefix("weights-")) < version:
            path.unlink(missing_ok=True)
