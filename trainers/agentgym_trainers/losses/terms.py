"""What a loss may look at, and what several losses compute from it."""

from dataclasses import dataclass

import torch
from torch import Tensor

Stats = dict[str, Tensor]
"""By name: a number for each token, without gradient."""

MAX_LOG_RATIO = 20.0
"""Further apart, two log-probabilities count as this far apart in a ratio."""


@dataclass(frozen=True, slots=True)
class Owners:
    """Which sample each token belongs to."""

    index: Tensor
    """int64 [N], ascending, from 0 to `count` - 1."""
    count: int

    def sum(self, values: Tensor) -> Tensor:
        """Return for each token [N] the sum over the tokens of its sample."""
        return values.new_zeros(self.count).index_add(0, self.index, values)[self.index]

    def mean(self, values: Tensor) -> Tensor:
        """Return for each token [N] the mean over the tokens of its sample."""
        return self.sum(values) / self.sum(values.new_ones(values.shape))

    def to_go(self, values: Tensor) -> Tensor:
        """Return for each token [N] the sum over it and the later tokens of its sample."""
        wide = values.double()  # differences of long sums
        before = wide.cumsum(0) - wide
        counts = torch.bincount(self.index, minlength=self.count)
        first = (counts.cumsum(0) - counts)[self.index]  # [N], the first token of its sample
        return (self.sum(wide) - (before - before[first])).to(values.dtype)


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """What a loss may look at. The tensors are float32 [N]."""

    logprobs: Tensor
    """log pi_theta of the token, with gradient."""
    entropy: Tensor
    """Entropy of pi_theta at the token, in nats, with gradient."""
    old: Tensor
    """log pi_old of the token: `sg(logprobs)` at the first update of a batch."""
    rollout: Tensor
    """log mu of the token."""
    advantages: Tensor
    owners: Owners
    reference: Tensor | None = None
    """log of the reference policy's probability of the token, where one is configured."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), within what a gradient survives.

    An infinite ratio would make the gradient of a clipped or masked token 0 * inf.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
