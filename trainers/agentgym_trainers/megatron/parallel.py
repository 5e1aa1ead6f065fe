"""Start and stop torch.distributed and megatron-core's process groups.

One process for now: every group has one rank, so the parts that ask `parallel_state` for their group work as
they will with more.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core import parallel_state, tensor_parallel

from agentgym.errors import ConfigError


def device() -> torch.device:
    """Return where the model lives: the GPU of this process, or the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def initialize(seed: int) -> None:
    """Make the process groups and seed the random generators.

    Raises:
        ConfigError: the process was started as one of several ranks.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != 1:
        raise ConfigError(
            f"the trainer was started as one of {world} ranks (WORLD_SIZE); it runs as one process"
        )
    torch.distributed.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        # One process needs no rendezvous and no port.
        store=torch.distributed.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
    )
    parallel_state.initialize_model_parallel()
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    else:
        # The tracker without CUDA generators. It is only asked for dropout, which is refused.
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def shut_down() -> None:
    """Destroy the process groups; a second `initialize` may follow."""
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextmanager
def single_process(seed: int) -> Iterator[None]:
    """Run a block between `initialize` and `shut_down`."""
    initialize(seed)
    try:
        yield
    finally:
        shut_down()
