"""What the hidden states of the last pipeline stage say about the trained tokens.

The logits of all tokens would be by far the largest tensors of a step. So only the rows that a trained token is read
from meet the output matrix, some of them at a time, and no logits are kept for the backward pass, which makes them
again. Each tensor-parallel rank has a part of the vocabulary.

Shapes: T packed tokens of this tensor-parallel rank, N trained tokens, H hidden, V words of this rank.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from agentgym_trainers.megatron.microbatch import Microbatch

LOGITS_AT_ONCE = 2**25
"""How many logits there are at a time: 128 MiB of float32."""


def predict(
    model: GPTModel, hidden: Tensor, microbatch: Microbatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the log-probability [N] of each trained token and the entropy [N] of its distribution.

    `hidden` [T, 1, H] are of the last pipeline stage. `temperature` divides the logits, as it did where the tokens were
    sampled. All tensor-parallel ranks return the same, with gradients for their own words.
    """
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        hidden = gather_from_sequence_parallel_region(hidden)
    rows = hidden[:, 0].index_select(0, microbatch.rows)
    first = _first_word(model)
    return log_probabilities(rows, words_of(model), microbatch.targets, temperature, first=first)


def words_of(model: GPTModel) -> Tensor:
    """Return the output matrix [V, H] of the last pipeline stage, which may be the embedding, without its padding."""
    tied = model.share_embeddings_and_output_weights
    matrix: Tensor = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    ours = model.words - _first_word(model)
    return matrix if len(matrix) <= ours else matrix[:ours]


def _first_word(model: GPTModel) -> int:
    """Return the number of the first word of this rank."""
    group = parallel_state.get_tensor_model_parallel_group()
    return int(model.vocab_size // group.size() * group.rank())


def log_probabilities(
    hidden: Tensor,
    words: Tensor,
    targets: Tensor,
    temperature: float,
    at_once: int = LOGITS_AT_ONCE,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability [N] of each target and the entropy [N] of its distribution.

    The logits are `hidden` [N, H] times `words` [V, H], divided by `temperature`; there are `at_once` at a time, or
    those of one row. `first` is the number of the first of the words.
    """
    return _LogProbabilities.apply(hidden, words, targets - first, temperature, at_once)  # type: ignore[no-any-return, no-untyped-call]


class _LogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, words: Tensor, targets: Tensor, temperature: float, at_once: int
    ) -> tuple[Tensor, Tensor]:
        group = parallel_state.get_tensor_model_parallel_group()
        places, here = _places(targets, len(words))
        logprobs, entropies, log_totals = [], [], []
        for part in _parts(len(hidden), at_once // len(words)):
            logits = _logits(hidden[part], words, temperature)
            highest = logits.amax(dim=-1)
            if group.size() > 1:
                dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
            logits -= highest[:, None]
            chosen = logits.gather(1, places[part, None])[:, 0] * here[part]
            weights = logits.exp()
            total = weights.sum(dim=-1)
            sums = torch.stack([chosen, total, weights.mul_(logits).sum(dim=-1)])
            if group.size() > 1:
                dist.all_reduce(sums, group=group)
            chosen, total, weighted = sums
            log_total = total.log()
            logprobs.append(chosen - log_total)
            entropies.append(log_total - weighted / total)
            log_totals.append(log_total + highest)
        logprob, entropy, log_total = torch.cat(logprobs), torch.cat(entropies), torch.cat(log_totals)
        ctx.save_for_backward(hidden, words, targets, entropy, log_total)
        ctx.temperature, ctx.at_once = temperature, at_once
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, of_logprob: Tensor | None, of_entropy: Tensor | None) -> Any:
        """With logits z: d log p_t / d z_v = [v = t] - p_v, and d entropy / d z_v = -p_v (log p_v + entropy)."""
        hidden, words, targets, entropy, log_total = ctx.saved_tensors
        places, here = _places(targets, len(words))
        of_logprob = torch.zeros_like(entropy) if of_logprob is None else of_logprob
        of_hidden = torch.empty_like(hidden)
        of_words = torch.zeros_like(words, dtype=entropy.dtype) if ctx.needs_input_grad[1] else None
        for part in _parts(len(hidden), ctx.at_once // len(words)):
            log_p = _logits(hidden[part], words, ctx.temperature).sub_(log_total[part, None])
            of_logits = log_p.exp()
            if of_entropy is None:
                of_logits *= -of_logprob[part, None]
            else:
                log_p += entropy[part, None]
                of_logits *= log_p.mul_(-of_entropy[part, None]).sub_(of_logprob[part, None])
            of_logits.scatter_add_(1, places[part, None], (of_logprob * here)[part, None])
            of_logits = of_logits.div_(ctx.temperature).to(hidden.dtype)
            torch.mm(of_logits, words, out=of_hidden[part])
            if of_words is not None:
                of_words += of_logits.T @ hidden[part]
        return of_hidden, None if of_words is None else of_words.to(words.dtype), None, None, None


def _parts(rows: int, most: int) -> Iterator[slice]:
    """Yield slices of at most so many rows; one of none if there are no rows."""
    for start in range(0, max(rows, 1), max(most, 1)):
        yield slice(start, min(start + max(most, 1), rows))


def _logits(hidden: Tensor, words: Tensor, temperature: float) -> Tensor:
    """Return the logits in float32 at least, in memory of their own."""
    logits = hidden @ words.T
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)


def _places(targets: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """Return the column of each target among the words of this rank, 0 for those of others, and which it has."""
    here = (targets >= 0) & (targets < words)
    return targets.where(here, 0), here
