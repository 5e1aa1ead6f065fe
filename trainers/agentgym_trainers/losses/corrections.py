"""What a loss is multiplied by because another engine sampled than the one that trains: rho = pi_old / mu.

The weights [N] have no gradient. `log_rho` [N] is that of the tokens, or `log_rho_at` of whole samples. The
statistics are rho itself, and whether it is outside of the bounds.
"""

from torch import Tensor

from agentgym_trainers.losses.terms import Owners, Stats, ratio_of


def log_rho_at(level: str, log_rho: Tensor, owners: Owners) -> Tensor:
    """Return log rho of each "token"; or of its sample: of the product ("sequence") or the "geometric" mean.

    The last two are the same for all tokens of a sample, and bounds on them keep or drop it as a whole.
    """
    if level == "sequence":
        return owners.sum(log_rho)
    return owners.mean(log_rho) if level == "geometric" else log_rho


def tis(log_rho: Tensor, high: float) -> tuple[Tensor, Stats]:
    """Return min(rho, high): truncated importance sampling.

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    rho = ratio_of(log_rho).detach()
    return rho.clamp(max=high), _stats(rho, rho > high)


def mis(log_rho: Tensor, low: float, high: float) -> tuple[Tensor, Stats]:
    """Return 1 where low <= rho <= high, else 0: masked importance sampling, or rejection. arXiv:2512.23075."""
    rho = ratio_of(log_rho).detach()
    outside = (rho < low) | (rho > high)
    return (~outside).to(rho.dtype), _stats(rho, outside)


def icepop(log_rho: Tensor, low: float, high: float) -> tuple[Tensor, Stats]:
    """Return rho where low <= rho <= high, else 0. Ring-1T, arXiv:2510.18855."""
    inside, stats = mis(log_rho, low, high)
    return inside * stats["rho"], stats


def _stats(rho: Tensor, outside: Tensor) -> Stats:
    return {"rho": rho, "rho_outside_share": outside.float()}
