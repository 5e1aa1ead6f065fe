"""Estimators of a divergence from sampled tokens: Schulman 2020, "Approximating KL divergence"."""

from torch import Tensor

from agentgym_trainers.losses.terms import Stats, ratio_of


def kl_to_rollout(logprobs: Tensor, rollout: Tensor) -> Stats:
    """Return estimators of KL(mu || pi_theta) on tokens that mu sampled, with x = log pi_theta - log mu.

    k1 = -x is unbiased; k3 = exp(x) - 1 - x is unbiased, never negative and varies less.
    """
    log_ratio = (logprobs - rollout).detach()
    return {"kl_rollout_k1": -log_ratio, "kl_rollout": log_ratio.expm1() - log_ratio}


def kl_estimate(name: str, log_ratio: Tensor) -> Tensor:
    """Return the estimate k1, k2 or k3 of KL(pi || pi_ref) for each token that pi sampled, x = log pi - log pi_ref.

    k1 = x is unbiased; k2 = x^2 / 2 is not, and its gradient is that of the divergence; k3 = exp(-x) - 1 + x is
    unbiased, never negative and varies less, and its gradient is that of the divergence only where the two are close.
    """
    match name:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case _:
            return ratio_of(-log_ratio) - 1 + log_ratio
