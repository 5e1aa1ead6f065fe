"""Clipped ratios: PPO, with a second clip for bad tokens, with another policy than the sampling one, per sample."""

import torch
from torch import Tensor

from agentgym_trainers.losses.terms import Owners, Stats, ratio_of


def ppo_clip(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Stats]:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi_theta / pi_old.

    With `dual_clip` = c, where A < 0: -max(min(r A, clip(r, ...) A), c A), so that the loss of a bad token that has
    become likely is bounded too.

    Schulman et al. 2017, arXiv:1707.06347; the two distances differ as in DAPO's clip-higher, arXiv:2503.14476;
    dual clip: Ye et al. 2019, arXiv:1912.09729.
    """
    return _clipped(ratio_of(logprobs - old), advantages, clip_low, clip_high, dual_clip)


def decoupled_ppo(
    logprobs: Tensor,
    prox: Tensor,
    rollout: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Stats]:
    """Return sg(pi_prox / mu) times `ppo_clip` with the ratio u = pi_theta / pi_prox.

    The trust region is around a recent policy, here the one before the first update of the batch, and not around
    the older one that sampled. AReaL, arXiv:2505.24298; after Hilton et al. 2021, arXiv:2110.00641.
    """
    loss, stats = ppo_clip(
        logprobs, prox, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    weight = ratio_of(prox - rollout).detach()
    return weight * loss, {**stats, "behaviour_weight": weight}


def gspo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, owners: Owners, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Stats]:
    """Return the clipped loss with one ratio for a whole sample: s = exp(mean over its tokens of log r).

    A token's loss has the value of s and the gradient through its own log-probability, which is s_t = sg(s)
    pi_theta / sg(pi_theta) (the paper's GSPO-token): the advantages may differ from turn to turn, and where they do
    not, the mean over a sample's tokens is the paper's GSPO in value and gradient.

    Zheng et al. 2025, arXiv:2507.18071.
    """
    log_s = owners.mean((logprobs - old).detach())
    return _clipped(
        ratio_of(log_s + logprobs - logprobs.detach()), advantages, clip_low, clip_high, dual_clip=None
    )


def _clipped(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Stats]:
    gain, clipped = ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    objective = torch.minimum(gain, clipped)
    active = clipped < gain
    if dual_clip is not None:
        floor = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
        active = active | (objective < floor)
        objective = torch.maximum(objective, floor)
    return -objective, {"clip_share": active.float(), "ratio": ratio.detach()}
