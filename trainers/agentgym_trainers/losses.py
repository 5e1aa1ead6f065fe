"""Policy losses: pure functions over the trained tokens of a microbatch.

Shapes: N trained tokens; every tensor is float [N]. Notation: theta is the model that is trained, mu the
policy that sampled (its log-probabilities come from the policy server), old the trainer's own model before
the first update of the batch, A the advantage, sg() a stopped gradient. A loss is minimised. Each function
returns the loss per token (no weights, no sum) and statistics per token, without gradient: shares are 0 or 1
per token, so their mean is a share.

`token_loss` is what a step calls: the loss named in the batch, with the settings of `[algorithm]`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentgym.config import AlgorithmConfig
from agentgym.errors import ConfigError

Stats = dict[str, Tensor]

LOSSES = ("dppo_tv", "ppo_clip", "sft")
"""The names that `token_loss` knows."""

MAX_LOG_RATIO = 20.0
"""Further apart, two log-probabilities count as this far apart in a ratio."""


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """What a loss may look at. All tensors are float32 [N]."""

    logprobs: Tensor
    """log pi_theta of the token, with gradient."""
    entropy: Tensor
    """Entropy of pi_theta at the token, in nats, with gradient."""
    old: Tensor
    """log pi_old of the token: `sg(logprobs)` at the first update of a batch."""
    rollout: Tensor
    """log mu of the token."""
    advantages: Tensor


def token_loss(name: str, terms: TokenTerms, settings: AlgorithmConfig) -> tuple[Tensor, Stats]:
    """Return the loss per token and its statistics, for the loss of that name.

    The entropy bonus subtracts `entropy_coefficient` times the entropy; supervised steps have none.

    Raises:
        ConfigError: no loss has that name, or `tis_cap` is set for a loss that has no use for it.
    """
    match name:
        case "sft":
            return sft(terms.logprobs)
        case "dppo_tv":
            if settings.tis_cap is not None:
                raise ConfigError(
                    f"algorithm.tis_cap = {settings.tis_cap} with algorithm.loss = 'dppo_tv': its ratio is "
                    "against the rollout policy already; remove tis_cap, or set algorithm.loss = 'ppo_clip'"
                )
            loss, stats = dppo_tv(
                terms.logprobs,
                terms.rollout,
                terms.advantages,
                tv_threshold=settings.tv_threshold,
                kl_coefficient=settings.kl_coefficient,
            )
        case "ppo_clip":
            # Without the correction the rollout policy stands for the old one: one ratio bounds both how far
            # the weights moved and how far the two engines differ, and no second forward pass is needed
            # ("bypass").
            old = terms.rollout if settings.tis_cap is None else terms.old
            loss, stats = ppo_clip(
                terms.logprobs,
                old,
                terms.advantages,
                clip_low=settings.clip_low,
                clip_high=settings.clip_high,
            )
            if settings.tis_cap is not None:
                weight, tis_stats = tis_weight(terms.old, terms.rollout, settings.tis_cap)
                loss, stats = loss * weight, {**stats, **tis_stats}
        case _:
            raise ConfigError(f"there is no loss {name!r}; known: {', '.join(LOSSES)}")
    stats |= kl_to_rollout(terms.logprobs, terms.rollout)
    if settings.entropy_coefficient > 0:
        loss = loss - settings.entropy_coefficient * terms.entropy
    return loss, stats


def ppo_clip(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Stats]:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi_theta / pi_old.

    Schulman et al. 2017, arXiv:1707.06347; the two distances differ as in DAPO's clip-higher,
    arXiv:2503.14476.
    """
    ratio = _ratio(logprobs - old)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    with torch.no_grad():
        active = clipped * advantages < ratio * advantages
        stats = {"clip_share": active.float(), "ratio": ratio.detach()}
    return loss, stats


def dppo_tv(
    logprobs: Tensor, rollout: Tensor, advantages: Tensor, *, tv_threshold: float, kl_coefficient: float
) -> tuple[Tensor, Stats]:
    """Return -A w + kl_coefficient (log w)^2 with w = pi_theta / mu; the first only in the trust region.

    With d = pi_theta - mu (the probabilities of the sampled token: its share of the total variation), a token
    has no first term if A > 0 and d > tv_threshold, or A < 0 and d < -tv_threshold. The second term is on all
    tokens.

    DPPO, arXiv:2602.04879; the squared log-ratio as in arXiv:2602.02276.
    """
    log_ratio = logprobs - rollout
    ratio = _ratio(log_ratio)
    with torch.no_grad():
        moved = logprobs.exp() - rollout.exp()
        masked = ((advantages > 0) & (moved > tv_threshold)) | ((advantages < 0) & (moved < -tv_threshold))
        stats = {"mask_share": masked.float(), "ratio": ratio.detach()}
    policy_term = -advantages * ratio * ~masked
    return policy_term + kl_coefficient * log_ratio.square(), stats


def sft(logprobs: Tensor) -> tuple[Tensor, Stats]:
    """Return -log pi_theta: the cross-entropy of supervised training."""
    return -logprobs, {}


def tis_weight(old: Tensor, rollout: Tensor, cap: float) -> tuple[Tensor, Stats]:
    """Return sg(min(pi_old / mu, cap)): truncated importance sampling between the two engines.

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    weight = (old - rollout).exp().detach()
    return weight.clamp(max=cap), {"tis_share": (weight > cap).float()}


def _ratio(log_ratio: Tensor) -> Tensor:
    # An infinite ratio would make the gradient of a clipped or masked token 0 * inf.
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_to_rollout(logprobs: Tensor, rollout: Tensor) -> Stats:
    """Return estimators of KL(mu || pi_theta) on tokens that mu sampled, with x = log pi_theta - log mu.

    k1 = -x is unbiased; k3 = exp(x) - 1 - x is unbiased, never negative and varies less (Schulman 2020,
    "Approximating KL divergence").
    """
    log_ratio = (logprobs - rollout).detach()
    return {"kl_rollout_k1": -log_ratio, "kl_rollout": log_ratio.expm1() - log_ratio}
