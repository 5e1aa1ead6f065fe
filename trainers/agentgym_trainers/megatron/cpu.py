"""What megatron-core asks of CUDA, answered where there is none.

megatron-core 0.16.1 names CUDA in a few places that have neither a switch nor a class in the layer spec: it receives
into buffers on `torch.cuda.current_device()`, activation recompute saves the generator of the GPU, and the all-to-all
dispatcher copies the numbers of tokens on a CUDA stream. `without_cuda` gives these names a meaning on a CPU, in a
process that trains and as long as it does; with a GPU nothing is replaced.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


def _splits_to_numpy(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Take the place of the copy from the GPU: nothing moves, but the dispatcher's later steps expect numpy."""
    if point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            splits = getattr(dispatcher, name)
            if isinstance(splits, torch.Tensor):
                setattr(dispatcher, name, splits.numpy())
    return tokens_per_expert


REPLACED: tuple[tuple[Any, str, Any], ...] = (
    (torch.cuda, "current_device", lambda: torch.device("cpu")),
    (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
    (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
    (MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", object()),
    (MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", _splits_to_numpy),
)
"""Where, which name, and what it is on a CPU."""


@contextmanager
def without_cuda() -> Iterator[None]:
    """Run a block in which megatron-core works on a CPU; it changes nothing where there is a GPU."""
    with ExitStack() as undo:
        for owner, name, value in () if torch.cuda.is_available() else REPLACED:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
