"""What the answers of an agent were worth, compared with other plays. Pure functions over numpy.

Shapes: B groups of a step, G members of a group, T turns of one agent in one play. A function takes the rewards of
one agent, `rewards_B_G_T` (a list of groups, each a list of plays, each an array over the play's turns), and returns
advantages in the same nesting. R is the sum of a play's rewards, R_t its reward-to-go from turn t on:
R_t = sum over s >= t of discount^(s - t) * r_s.
"""

from collections.abc import Callable
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Nested = list[list[Floats]]


def reward_to_go(rewards_T: Floats, discount: float) -> Floats:
    """Return R_t for each turn."""
    out = np.zeros(len(rewards_T))
    running = 0.0
    for t in range(len(rewards_T) - 1, -1, -1):
        running = rewards_T[t] + discount * running
        out[t] = running
    return out


def group_mean(rewards_B_G_T: Nested, discount: float) -> Nested:
    """A = R - mean over the group of R, for every turn of a play. Dr. GRPO, arXiv:2503.20783."""
    return _by_episode(rewards_B_G_T, lambda R_G: R_G - R_G.mean())


def group_mean_std(rewards_B_G_T: Nested, discount: float) -> Nested:
    """A = (R - mean(R)) / (std(R) + 1e-6) over the group, the population's std. GRPO, arXiv:2402.03300."""
    return _by_episode(rewards_B_G_T, lambda R_G: (R_G - R_G.mean()) / (R_G.std() + 1e-6))


def leave_one_out(rewards_B_G_T: Nested, discount: float) -> Nested:
    """A_i = R_i - mean over j != i of R_j = G / (G - 1) * (R_i - mean(R)). RLOO, arXiv:2402.14740."""
    return _by_episode(rewards_B_G_T, lambda R_G: (R_G - R_G.mean()) * (len(R_G) / max(1, len(R_G) - 1)))


def turn_group_mean(rewards_B_G_T: Nested, discount: float) -> Nested:
    """A_t = R_t - mean of R_t over the plays of the group that reached turn t; 0 where one alone did."""
    return [_minus_turn_mean([reward_to_go(r_T, discount) for r_T in group]) for group in rewards_B_G_T]


def turn_batch_mean(rewards_B_G_T: Nested, discount: float) -> Nested:
    """A_t = R_t - mean of R_t over all plays of the step that reached turn t: no comparison inside groups.

    Turn-level credit as in arXiv:2505.11821, with a baseline per turn index.
    """
    flat = _minus_turn_mean([reward_to_go(r_T, discount) for r_T in chain.from_iterable(rewards_B_G_T)])
    rest = iter(flat)
    return [[next(rest) for _ in group] for group in rewards_B_G_T]


ADVANTAGES: dict[str, Callable[[Nested, float], Nested]] = {
    function.__name__: function
    for function in (group_mean, group_mean_std, leave_one_out, turn_group_mean, turn_batch_mean)
}
"""By the name in `algorithm.advantage`."""


def _by_episode(rewards_B_G_T: Nested, compare: Callable[[Floats], Floats]) -> Nested:
    """Compare whole plays inside each group; all turns of a play get its advantage."""
    out = []
    for group in rewards_B_G_T:
        advantages_G = compare(np.array([r_T.sum() for r_T in group]))
        out.append([np.full(len(r_T), a) for r_T, a in zip(group, advantages_G, strict=True)])
    return out


def _minus_turn_mean(returns_G_T: list[Floats]) -> list[Floats]:
    """Subtract from each turn the mean over the plays that have such a turn."""
    longest = max((len(r_T) for r_T in returns_G_T), default=0)
    sums, counts = np.zeros(longest), np.zeros(longest)
    for r_T in returns_G_T:
        sums[: len(r_T)] += r_T
        counts[: len(r_T)] += 1
    means = sums / np.maximum(counts, 1)
    return [r_T - means[: len(r_T)] for r_T in returns_G_T]
