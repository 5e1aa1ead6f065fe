"""Whole plays of one agent, compared in their group: every turn of a play gets the advantage of the play."""

from collections.abc import Callable

import numpy as np

from agentgym.advantages.returns import Floats, Nested


def group_mean(rewards_B_G_T: Nested) -> Nested:
    """A = R - mean over the group of R. Dr. GRPO, arXiv:2503.20783."""
    return _by_play(rewards_B_G_T, lambda R_G: R_G - R_G.mean())


def group_mean_std(rewards_B_G_T: Nested) -> Nested:
    """A = (R - mean(R)) / (std(R) + 1e-6) over the group, the population's std. GRPO, arXiv:2402.03300."""
    return _by_play(rewards_B_G_T, lambda R_G: (R_G - R_G.mean()) / (R_G.std() + 1e-6))


def leave_one_out(rewards_B_G_T: Nested) -> Nested:
    """A_i = R_i - mean over j != i of R_j = G / (G - 1) * (R_i - mean(R)). RLOO, arXiv:2402.14740."""
    return _by_play(rewards_B_G_T, lambda R_G: (R_G - R_G.mean()) * (len(R_G) / max(1, len(R_G) - 1)))


def dr_mas(rewards_B_G_T: Nested) -> Nested:
    """A = (R - mean_k(R)) / (std_k(R) + 1e-6), with the statistics of agent k alone, over its turns in the group.

    A play counts once for each of the agent's turns in it, so that the gradients of agents that speak rarely and of
    those that speak often have one scale. Dr. MAS, arXiv:2602.08847, eq. 5, where R is the outcome of the play; its
    authors' code (langfengQ/DrMAS, `compute_grpo_outcome_advantage`) divides by the sample's deviation, here it is the
    population's as in `group_mean_std`.
    """
    out = []
    for group in rewards_B_G_T:
        R_N = np.repeat([r_T.sum() for r_T in group], [len(r_T) for r_T in group])
        mean, std = R_N.mean(), R_N.std()
        out.append([np.full(len(r_T), (r_T.sum() - mean) / (std + 1e-6)) for r_T in group])
    return out


def _by_play(rewards_B_G_T: Nested, compare: Callable[[Floats], Floats]) -> Nested:
    out = []
    for group in rewards_B_G_T:
        advantages_G = compare(np.array([r_T.sum() for r_T in group]))
        out.append([np.full(len(r_T), a) for r_T, a in zip(group, advantages_G, strict=True)])
    return out
