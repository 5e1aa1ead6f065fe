"""Rewards of plays, and their sums."""

import numpy as np
from numpy.typing import NDArray

from agentgym.messages import AgentId

Floats = NDArray[np.float64]
Nested = list[list[Floats]]
"""One agent's rewards or advantages: groups, their plays, an array over the turns of each."""
Joint = list[list[dict[AgentId, Floats]]]
"""All agents' rewards or advantages: groups, their plays, the turns of each agent that took part."""


def reward_to_go(rewards_T: Floats, discount: float) -> Floats:
    """Return R_t for each turn."""
    out = np.zeros(len(rewards_T))
    running = 0.0
    for t in range(len(rewards_T) - 1, -1, -1):
        running = rewards_T[t] + discount * running
        out[t] = running
    return out


def over_turns(returns_G_T: list[Floats], *, std: bool = False) -> list[Floats]:
    """Subtract from each turn the mean over the plays that have such a turn; `std`: divide by their deviation too.

    The deviation is the population's, plus 1e-6.
    """
    longest = max((len(r_T) for r_T in returns_G_T), default=0)
    table = np.full((len(returns_G_T), longest), np.nan)  # (G, T), without the turns that a play has not
    for row, r_T in zip(table, returns_G_T, strict=True):
        row[: len(r_T)] = r_T
    counts = np.maximum((~np.isnan(table)).sum(axis=0), 1)
    centred = table - np.nansum(table, axis=0) / counts
    if std:
        centred = centred / (np.sqrt(np.nansum(centred**2, axis=0) / counts) + 1e-6)
    return [row[: len(r_T)] for row, r_T in zip(centred, returns_G_T, strict=True)]
