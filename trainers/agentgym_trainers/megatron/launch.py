"""Starting the trainer: its ranks, several processes of one machine; its imports. torch is imported when needed.

The ranks find each other through a file in a folder that only their user can enter, and connections on CPUs stay on the
loopback interface. (torchrun would start them just as well, but it opens a port and unpickles what comes there.)
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentgym.errors import RunError

logger = logging.getLogger(__name__)

MEETING = "AGENTGYM_MEETING"
"""The environment variable that names the file, in every rank."""
GRACE = 5.0
"""Seconds that the others have to end by themselves, and to say why, when one has failed."""


def launched() -> bool:
    """Say whether this process is one of several ranks."""
    return MEETING in os.environ


def meeting() -> str:
    """Return the file through which the ranks find each other."""
    return os.environ[MEETING]


def rank() -> int:
    """Return the number of this process, and of its GPU, among those of the trainer."""
    return int(os.environ["RANK"]) if launched() else 0


def world_size() -> int:
    """Return how many processes the trainer was started as."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def run_ranks(count: int, command: Sequence[str], folder: Path, *, grace: float = GRACE) -> int:
    """Run a command as `count` ranks, which meet in `folder`; return 0 when all have ended well, else 1.

    When one of them fails, the others are ended, `grace` seconds later.
    """
    with (
        tempfile.TemporaryDirectory(prefix=".ranks-", dir=folder) as private,
        ThreadPoolExecutor(count) as threads,
    ):
        places = [_place(number, count, Path(private)) for number in range(count)]
        ranks = [subprocess.Popen(command, env={**os.environ, **place}) for place in places]
        try:
            ends = {threads.submit(_end_of, process): number for number, process in enumerate(ranks)}
            ended, _ = wait(ends, return_when=FIRST_EXCEPTION)
            failed = [(ends[end], error) for end in ended if (error := end.exception()) is not None]
            for number, error in failed:
                logger.error("rank %d of the trainer %s; the others are ended", number, error)
            wait(ends, timeout=grace)
        finally:
            for process in ranks:
                process.kill()
    return 1 if failed else 0


def _place(number: int, count: int, private: Path) -> dict[str, str]:
    """Return the environment variables of a rank; the names are those that torch's libraries know, too."""
    numbers = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count)}
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**loopback, **numbers, MEETING: str(private / "meeting")}


def _end_of(process: subprocess.Popen[bytes]) -> None:
    status = process.wait()
    if status < 0:
        raise RunError(f"was killed by {signal.Signals(-status).name}")
    if status > 0:
        raise RunError(f"ended with status {status}")


@contextmanager
def without_compiler() -> Iterator[None]:
    """Import megatron-core in this block without torch's compiler where there is no GPU: in two thirds of the time.

    megatron-core hands functions to `torch.compile` when it is imported, which imports the compiler. They belong to
    fusions, all of which are off on a CPU (`model.py`), so that none of them is called.
    """
    import torch

    compiler = torch.compile
    if not torch.cuda.is_available():
        setattr(torch, "compile", _as_it_is)  # noqa: B010  mypy refuses an assignment
    try:
        yield
    finally:
        setattr(torch, "compile", compiler)  # noqa: B010


def _as_it_is(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    """Take the place of `torch.compile`, with and without arguments of the decorator."""
    return _as_it_is if function is None else function
