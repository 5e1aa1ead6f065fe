"""Starting the trainer: its ranks, several processes of one machine, by torchrun; its imports.

torchrun's own meeting place is a file, as is that of the ranks, both in a folder that only their user can enter: over
TCP it would listen on every interface, and unpickle what comes there. Connections of ranks on CPUs stay on the loopback
interface. torch is imported when it is needed.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MEETING = "AGENTGYM_MEETING"
"""The environment variable that names the file, in every rank."""
GRACE = 5
"""Seconds that the others have to end by themselves when one has failed."""


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


def run_ranks(count: int, command: Sequence[str], folder: Path) -> int:
    """Run a command as `count` ranks, which meet in `folder`; return 0 when all have ended well, else 1.

    When one of them fails, the others are ended.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix=".ranks-", dir=folder) as private:
        torchrun = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id="trainer",
            rdzv_backend="c10d",
            rdzv_endpoint=f"{private}/torchrun",
            rdzv_configs={"store_type": "file"},
            max_restarts=0,
            signals_to_handle="SIGTERM",  # Ctrl-C is the coordinator's
            shutdown_timeout=GRACE,
            logs_specs=DefaultLogsSpecs(log_dir=private),
        )
        ours = {MEETING: f"{private}/meeting", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        os.environ.update(ours)
        try:
            elastic_launch(torchrun, command[0])(*command[1:])
        except ChildFailedError as error:
            number, failure = error.get_first_failure()
            end = failure.signal_name() if failure.exitcode < 0 else f"status {failure.exitcode}"
            logger.error("rank %d of the trainer ended with %s; the others were ended", number, end)
            return 1
        finally:
            for name in ours:
                del os.environ[name]
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
