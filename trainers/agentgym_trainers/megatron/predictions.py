"""What the logits say about the trained tokens, where each tensor-parallel rank has a part of the vocabulary.

Shapes: N trained tokens, V words of the vocabulary on this rank.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from agentgym_trainers.megatron.microbatch import Microbatch


def read_logits(logits: Tensor, microbatch: Microbatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-probability [N] of each trained token and the entropy [N] of its distribution.

    `logits` are [1, T, V], of the last pipeline stage; `temperature` divides them, as it did where the tokens were
    sampled.
    """
    rows = logits[0].index_select(0, microbatch.rows).float() / temperature
    return log_probabilities(rows, microbatch.targets)


def log_probabilities(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability [N] of each target and the entropy [N] of its distribution.

    `logits` are float32 [N, V]. All tensor-parallel ranks return the same, with gradients for their own logits.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    highest = logits.detach().amax(dim=-1, keepdim=True)
    if group.size() > 1:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    logits = logits - highest
    log_total = _summed(logits.exp().sum(dim=-1)).log()
    probabilities = (logits - copy_to_tensor_model_parallel_region(log_total)[:, None]).exp()
    entropy = log_total - _summed((probabilities * logits).sum(dim=-1))
    places = targets - group.rank() * logits.shape[-1]
    here = (places >= 0) & (places < logits.shape[-1])
    chosen = logits.gather(1, places.where(here, 0)[:, None])[:, 0]
    return _summed(chosen.where(here, torch.zeros_like(chosen))) - log_total, entropy


def _summed(part: Tensor) -> Tensor:
    return reduce_from_tensor_model_parallel_region(part)  # type: ignore[no-any-return]
