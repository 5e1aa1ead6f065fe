"""A forward pass over a microbatch. Shapes: N trained tokens, V vocabulary."""

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from agentgym_trainers.megatron.microbatch import Microbatch


def log_distributions(model: GPTModel, microbatch: Microbatch, temperature: float) -> Tensor:
    """Return the log-probabilities [N, V] of what could have stood in the place of each trained token.

    `temperature` divides the logits, as it did where the tokens were sampled.
    """
    logits = model(microbatch.tokens, microbatch.positions, None, packed_seq_params=microbatch.sequences)
    rows: Tensor = logits[0].index_select(0, microbatch.rows).float() / temperature
    return rows.log_softmax(dim=-1)


def of_targets(log_distributions: Tensor, microbatch: Microbatch) -> Tensor:
    """Return the log-probability [N] of each trained token."""
    return log_distributions.gather(1, microbatch.targets[:, None])[:, 0]
