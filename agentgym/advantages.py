"""What an episode was worth, compared with the other members of its group. Pure functions over numpy.

Shapes: G members of a group. Each function takes the rewards of one agent in the members of one group and returns
as many advantages; R is a reward, A an advantage.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def group_mean(rewards_G: Floats) -> Floats:
    """A_i = R_i - mean(R). Dr. GRPO, arXiv:2503.20783."""
    return rewards_G - rewards_G.mean()


def group_mean_std(rewards_G: Floats) -> Floats:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6), the population's standard deviation. GRPO, arXiv:2402.03300."""
    return (rewards_G - rewards_G.mean()) / (rewards_G.std() + 1e-6)


def leave_one_out(rewards_G: Floats) -> Floats:
    """A_i = R_i - mean over j != i of R_j = G / (G - 1) * (R_i - mean(R)). RLOO, arXiv:2402.14740.

    Raises:
        ValueError: the group has fewer than two members.
    """
    if len(rewards_G) < 2:
        raise ValueError(f"leave_one_out compares members of a group; this one has {len(rewards_G)}")
    return (rewards_G - rewards_G.mean()) * (len(rewards_G) / (len(rewards_G) - 1))


ADVANTAGES: dict[str, Callable[[Floats], Floats]] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
}
"""By the name in `algorithm.advantage`."""
