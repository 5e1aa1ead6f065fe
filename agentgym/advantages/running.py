"""Advantages against a mean that runs on from step to step."""

import numpy as np

from agentgym.advantages.returns import Nested


def rae(rewards_B_G_T: Nested, baseline: float, decay: float) -> tuple[Nested, float]:
    """Return A = R - b for each play, and b after the last one.

    After each play b becomes decay * b + (1 - decay) * R. It belongs to an agent (a role in a game), begins at 0
    and moves from play to play in the order given, so that no play is compared with itself.

    Role-conditioned advantage estimation of SPIRAL, arXiv:2506.24119, where decay = 0.95.
    """
    out: Nested = []
    for group in rewards_B_G_T:
        out.append([])
        for r_T in group:
            R = float(r_T.sum())
            out[-1].append(np.full(len(r_T), R - baseline))
            baseline = decay * baseline + (1.0 - decay) * R
    return out, baseline
