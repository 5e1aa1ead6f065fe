"""One logger setup for every process: a line per record, with the process's name."""

import logging
import sys
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)-7s %(processName)s %(name)s: %(message)s"


def setup_logging(process: str, *, file: Path | None = None, level: int = logging.INFO) -> None:
    """Send the log of this process to `file`, or to stderr without one."""
    logging.raiseExceptions = False  # a full disk has an error of its own, not one for every line
    logging.basicConfig(
        level=level,
        format=FORMAT.replace("%(processName)s", process),
        datefmt="%H:%M:%S",
        handlers=[logging.FileHandler(file) if file else logging.StreamHandler(sys.stderr)],
        force=True,
    )


def worth_saying(count: int) -> bool:
    """Whether to log something that strangers can make happen: ten times, then ever more rarely; a disk is finite."""
    return count <= 10 or count & (count - 1) == 0
