"""A trust region in total variation instead of in ratios: DPPO."""

import torch
from torch import Tensor

from agentgym_trainers.losses.terms import Stats, ratio_of


def dppo_tv(
    logprobs: Tensor, rollout: Tensor, advantages: Tensor, *, tv_threshold: float, kl_coefficient: float
) -> tuple[Tensor, Stats]:
    """Return -A w + kl_coefficient (log w)^2 with w = pi_theta / mu; the first only in the trust region.

    With d = pi_theta - mu (the probabilities of the sampled token: its share of the total variation), a token has
    no first term if A > 0 and d > tv_threshold, or A < 0 and d < -tv_threshold. The second term is on all tokens.

    DPPO, arXiv:2602.04879; the squared log-ratio as in arXiv:2602.02276.
    """
    log_ratio = logprobs - rollout
    ratio = ratio_of(log_ratio)
    with torch.no_grad():
        moved = logprobs.exp() - rollout.exp()
        masked = ((advantages > 0) & (moved > tv_threshold)) | ((advantages < 0) & (moved < -tv_threshold))
        stats = {"mask_share": masked.float(), "ratio": ratio.detach()}
    policy_term = -advantages * ratio * ~masked
    return policy_term + kl_coefficient * log_ratio.square(), stats
