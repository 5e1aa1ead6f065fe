"""The gradient of the log-probability, times a weight that has none: REINFORCE, CISPO, TOPR."""

import torch
from torch import Tensor

from agentgym_trainers.losses.terms import Owners, Stats, ratio_of


def reinforce(logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Stats]:
    """Return -A log pi_theta. Williams 1992, doi:10.1007/BF00992696."""
    return -advantages * logprobs, {}


def cispo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Stats]:
    """Return -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi_theta with r = pi_theta / pi_old.

    A token outside of the bounds goes on to learn, with a bounded weight. MiniMax-M1, arXiv:2506.13585, which has
    no lower bound. With the rollout policy for old and only the upper bound it is the truncated importance
    weighting of LlamaRL (AIPO, arXiv:2505.24034) and of PipelineRL (arXiv:2509.19128).
    """
    ratio = ratio_of(logprobs - old).detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * logprobs, {"clip_share": (weight != ratio).float(), "ratio": ratio}


def topr(logprobs: Tensor, rollout: Tensor, advantages: Tensor, owners: Owners) -> tuple[Tensor, Stats]:
    """Return -A log pi_theta where A >= 0, and sg(min(w, 1)) times that where A < 0.

    w = product over the tokens of a sample of pi_theta / mu: a bad play that the policy has left behind is not
    pushed away any further, a good one is imitated however unlikely it has become. Le Roux et al. 2025,
    arXiv:2503.14286, whose w is clipped to [0, 1] for negative returns and left out for others; A is their return
    less a baseline.
    """
    ratio = ratio_of(owners.sum(logprobs - rollout)).detach()
    tapered = (advantages < 0) & (ratio < 1)
    weight = torch.where(tapered, ratio, 1.0)
    return -weight * advantages * logprobs, {"clip_share": tapered.float(), "ratio": ratio}
