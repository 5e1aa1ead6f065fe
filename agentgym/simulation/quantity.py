"""Numbers that are drawn: constant, lognormal, Pareto, exponential."""

import math
from collections.abc import Callable
from functools import cache

from numpy.random import Generator

from agentgym.simulation_config import Quantity, parse_quantity

Draw = Callable[[Generator], float]


def scaled(quantity: Quantity, factor: float) -> str:
    """Return a quantity of the same shape with `factor` times the mean."""
    shape, (mean, *spread) = parse_quantity(str(quantity))
    values = ", ".join(f"{value:.12g}" for value in (factor * mean, *spread))
    return values if shape == "constant" else f"{shape}({values})"


@cache
def draw_of(quantity: Quantity) -> Draw:
    """Return what draws a quantity from a generator; the mean of the draws is the mean that the quantity names."""
    shape, values = parse_quantity(str(quantity))
    mean, spread = values[0], values[-1]
    match shape:
        case "lognormal":
            mu = math.log(mean) - spread**2 / 2
            return lambda rng: rng.lognormal(mu, spread)
        case "pareto":
            least = mean * (spread - 1) / spread
            return lambda rng: least * (1 + rng.pareto(spread))
        case "exponential":
            return lambda rng: rng.exponential(mean)
        case _:
            return lambda rng: mean
