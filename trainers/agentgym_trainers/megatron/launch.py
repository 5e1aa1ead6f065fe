"""Starting the trainer as several processes. Nothing here imports torch before it is needed."""

import logging
import os
from collections.abc import Sequence

logger = logging.getLogger(__name__)


def launched() -> bool:
    """Say whether this process was started by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    """Return the number of this process among those of the trainer."""
    return int(os.environ["RANK"]) if launched() else 0


def world_size() -> int:
    """Return how many processes the trainer was started as."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def local_rank() -> int:
    """Return the number of this process, and of its GPU, among those on this machine."""
    return int(os.environ["LOCAL_RANK"]) if launched() else 0


def become_torchrun(nproc: int, module: str, arguments: Sequence[str]) -> int:
    """Run a module as `nproc` processes on this machine, and return the exit status when all have ended.

    When one of them fails, torchrun ends the others.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(["--standalone", f"--nproc-per-node={nproc}", "-m", module, *arguments])
    except ChildFailedError as error:
        logger.error("a rank of the trainer failed: %s", error)
        return 1
    return 0
