"""Changes of rewards before they are compared."""

import numpy as np

from agentgym.advantages.returns import Floats


def overlong(tokens_T: Floats, *, longest: int, buffer: int, penalty: float) -> Floats:
    """Return what is added to the reward of an answer for its length in tokens.

    0 up to `longest` - `buffer` tokens, from there linearly down to -penalty at `longest`: soft overlong
    punishment, DAPO, arXiv:2503.14476.
    """
    return -penalty * np.clip((tokens_T - (longest - buffer)) / buffer, 0.0, 1.0)
