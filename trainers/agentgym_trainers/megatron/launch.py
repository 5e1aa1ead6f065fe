"""Starting the trainer: its imports, and several of it. Nothing here imports torch before it is needed."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
