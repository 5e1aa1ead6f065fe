"""Turns of one agent by their reward-to-go, compared with the same turn of other plays."""

from itertools import chain

from agentgym.advantages.returns import Nested, over_turns, reward_to_go


def turn_group_mean(rewards_B_G_T: Nested, discount: float) -> Nested:
    """A_t = R_t - mean of R_t over the plays of the group that reached turn t; 0 where one alone did."""
    return [over_turns([reward_to_go(r_T, discount) for r_T in group]) for group in rewards_B_G_T]


def turn_group_mean_std(rewards_B_G_T: Nested, discount: float) -> Nested:
    """A_t = (R_t - mean(R_t)) / (std(R_t) + 1e-6) over the plays of the group that reached turn t.

    Turn-level credit, arXiv:2505.11821.
    """
    return [over_turns([reward_to_go(r_T, discount) for r_T in group], std=True) for group in rewards_B_G_T]


def turn_batch_mean(rewards_B_G_T: Nested, discount: float) -> Nested:
    """A_t = R_t - mean of R_t over all plays of the step that reached turn t: no comparison inside groups.

    Turn-level credit as in arXiv:2505.11821, with a baseline per turn index. The plays that `menu.estimate` hands in
    are those of one line-up: with other players an agent earns more or less, whatever it does.
    """
    flat = over_turns([reward_to_go(r_T, discount) for r_T in chain.from_iterable(rewards_B_G_T)])
    rest = iter(flat)
    return [[next(rest) for _ in group] for group in rewards_B_G_T]
