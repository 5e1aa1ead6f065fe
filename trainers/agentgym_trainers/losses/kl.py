"""Estimators of a divergence from sampled tokens: Schulman 2020, "Approximating KL divergence"."""

from torch import Tensor

from agentgym_trainers.losses.terms import Stats


def kl_to_rollout(logprobs: Tensor, rollout: Tensor) -> Stats:
    """Return estimators of KL(mu || pi_theta) on tokens that mu sampled, with x = log pi_theta - log mu.

    k1 = -x is unbiased; k3 = exp(x) - 1 - x is unbiased, never negative and varies less.
    """
    log_ratio = (logprobs - rollout).detach()
    return {"kl_rollout_k1": -log_ratio, "kl_rollout": log_ratio.expm1() - log_ratio}
