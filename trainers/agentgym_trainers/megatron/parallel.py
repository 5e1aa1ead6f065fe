"""The ranks of a trainer: torch.distributed, megatron-core's process groups, and what all ranks must know.

Rank 0 alone talks to the coordinator. Ranks tell each other tensors, and the little that has names as msgpack in one
(`from_all`): nothing is unpickled. They are counted tensor-parallel first, then data-parallel (the experts' ranks
among them), then pipeline stages, so that rank 0 is the first of everything.
"""

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from agentgym.errors import ConfigError
from agentgym.trainer_config import TrainerConfig
from agentgym_trainers.megatron import launch
from agentgym_trainers.megatron.cpu import without_cuda

FOREVER = timedelta(days=365)
"""Ranks wait for the next batch as long as rank 0 lives: when one has ended, all are."""


def device() -> torch.device:
    """Return where the model lives: the GPU of this process, or the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def data_rank() -> int:
    """Return which share of a batch this rank trains on."""
    return int(parallel_state.get_data_parallel_rank())


@contextmanager
def process_groups(config: TrainerConfig, seed: int, *, timeout: float = 1800.0) -> Iterator[None]:
    """Run a block in which the ranks are connected in the layout of the settings.

    `timeout` bounds, in seconds, how long a rank waits for the others inside a step.

    Raises:
        ConfigError: the number of processes is not `trainer.nproc`.
    """
    with without_cuda(), connected(config.nproc, timeout), layout(config, timeout):
        seed_all(seed)
        yield


def seed_all(seed: int) -> None:
    """Seed the random generators of this rank."""
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    else:
        # The tracker without CUDA generators. It is only asked for dropout, which is refused.
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


@contextmanager
def single_process(seed: int) -> Iterator[None]:
    """Run a block in which this process is the only rank."""
    with process_groups(TrainerConfig(), seed):
        yield


@contextmanager
def connected(nproc: int, timeout: float) -> Iterator[None]:
    """Connect the ranks, as many as `nproc`."""
    if launch.world_size() != nproc:
        raise ConfigError(
            f"trainer.nproc = {nproc}, but the trainer was started as {launch.world_size()} processes; let the "
            "coordinator start it"
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(launch.rank())
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store: Any = dist.FileStore(launch.meeting(), nproc) if launch.launched() else dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        timeout=timedelta(seconds=timeout),
        store=store,
        rank=launch.rank(),
        world_size=nproc,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def layout(config: TrainerConfig, timeout: float) -> Iterator[None]:
    """Divide the connected ranks into megatron-core's groups.

    Raises:
        ConfigError: gloo, which connects CPUs, cannot do what the layout needs.
    """
    if not torch.cuda.is_available() and config.ep > 1 and config.expert_tp > 1:
        raise ConfigError(
            f"ep = {config.ep} with etp = {config.expert_tp} gathers different numbers of tokens per rank, which only "
            "GPUs can (gloo cannot); set trainer.etp = 1"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=config.expert_tp,
        distributed_timeout_minutes=math.ceil(timeout / 60),
        create_gloo_process_groups=False,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def from_all(value: Any) -> list[Any]:
    """Return what each rank gives, in their order: None, numbers, texts, and lists and dictionaries of them.

    All ranks must call it. A tuple comes back as a list.
    """
    mine = torch.frombuffer(bytearray(msgpack.packb(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    longest = int(max(sizes))
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, torch.nn.functional.pad(mine, (0, longest - len(mine))))
    return [
        msgpack.unpackb(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)
    ]


class Channel:
    """How rank 0 passes on what the coordinator sent it."""

    def __init__(self) -> None:
        """Make the channel; all ranks do so at the same point."""
        self._group = dist.new_group(backend="gloo", timeout=FOREVER)

    def share(self, frames: Sequence[bytes] | None) -> list[bytes]:
        """Return on every rank the frames that rank 0 gives; the others give None and wait."""
        sizes = torch.tensor([len(frame) for frame in frames or ()], dtype=torch.int64)
        sizes = self._from_first(sizes, self._from_first(torch.tensor([len(sizes)]), 1).item())
        joined = torch.frombuffer(bytearray(b"".join(frames or ())) or bytearray(1), dtype=torch.uint8)
        joined = self._from_first(joined, max(int(sizes.sum()), 1))
        parts = torch.split(joined[: int(sizes.sum())], sizes.tolist())
        return [part.numpy().tobytes() for part in parts]

    def _from_first(self, tensor: torch.Tensor, size: int | float) -> torch.Tensor:
        if dist.get_rank() != 0:
            tensor = torch.empty(int(size), dtype=tensor.dtype)
        dist.broadcast(tensor, 0, group=self._group)
        return tensor
