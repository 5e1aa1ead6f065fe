import numpy as np
import pytest
from builders import config_of
from pydantic import ValidationError

from agentgym.simulation.quantity import draw_of


@pytest.mark.parametrize(
    ("quantity", "mean", "spread"),
    [
        (7, 7.0, 0.0),
        ("2.5", 2.5, 0.0),
        ("exponential(3)", 3.0, 3.0),
        ("lognormal(10, 0.5)", 10.0, 10.0 * (np.exp(0.25) - 1) ** 0.5),
        ("pareto(6, 3)", 6.0, 12**0.5),
    ],
)
def test_a_quantity_has_the_mean_that_it_names(quantity: str | float, mean: float, spread: float) -> None:
    draw, rng = draw_of(quantity), np.random.default_rng(1)
    values = [draw(rng) for _ in range(100_000)]
    assert np.mean(values) == pytest.approx(mean, rel=0.02)
    assert np.std(values) == pytest.approx(spread, rel=0.15)
    assert min(values) >= 0


@pytest.mark.parametrize(
    ("quantity", "why"),
    [
        ("normal(1, 2)", "is no quantity"),
        ("lognormal(3)", "is no quantity"),
        ("pareto(3, 1)", "there is no mean"),
        ("-2", "is no quantity"),
        ("exponential(1, 2)", "is no quantity"),
    ],
)
def test_what_is_no_quantity_is_refused_with_those_that_are(quantity: str, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        config_of(simulation={"turns": quantity})


def test_a_server_is_not_slower_when_it_is_full() -> None:
    with pytest.raises(ValidationError, match="of one request alone"):
        config_of(simulation={"tokens_per_second": 100.0, "tokens_per_second_full": 50.0})
