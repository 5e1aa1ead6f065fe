"""The settings of a simulated cluster: the table `simulation`, of which a run takes no notice."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from agentgym.section import Probability, Section

NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"
SHAPES = {"lognormal": "(mean, sigma)", "pareto": "(mean, alpha)", "exponential": "(mean)"}
"""The distributions that have a name, and their parameters; a number is a constant."""


def parse_quantity(text: str) -> tuple[str, list[float]]:
    """Return the name of a distribution and its parameters.

    Raises:
        ValueError: it is none, or its parameters are out of range.
    """
    if re.fullmatch(NUMBER, text.strip()):
        return "constant", [float(text)]
    found = re.fullmatch(rf"\s*(\w+)\s*\(\s*({NUMBER}(?:\s*,\s*{NUMBER})*)\s*\)\s*", text)
    shape, values = (found[1], [float(v) for v in found[2].split(",")]) if found else ("", [])
    if shape not in SHAPES or len(values) != SHAPES[shape].count(",") + 1:
        known = ", ".join(f"{name}{parameters}" for name, parameters in SHAPES.items())
        raise ValueError(f"{text!r} is no quantity; write a number, or one of {known}")
    if shape == "pareto" and values[1] <= 1:
        raise ValueError(f"{text!r}: with an alpha of 1 or less there is no mean")
    return shape, values


def _checked(quantity: str | float) -> str | float:
    parse_quantity(str(quantity))
    return quantity


Quantity = Annotated[float | str, AfterValidator(_checked)]
"""A number, "lognormal(mean, sigma)" with the sigma of the logarithm, "pareto(mean, alpha)" or "exponential(mean)"."""
Rate = Annotated[float, Field(ge=0)]
Speed = Annotated[float, Field(gt=0)]


class SimulationConfig(Section):
    """How long things take in `agentgym simulate`.

    A quantity is a number, or drawn anew each time: "lognormal(mean, sigma)" with the sigma of the logarithm,
    "pareto(mean, alpha)", "exponential(mean)".
    """

    turns: Quantity = "lognormal(6, 0.5)"
    """Answers per agent in an episode; a number, "lognormal(mean, sigma)", "pareto(mean, alpha)" or
    "exponential(mean)", as all that is drawn."""
    answer_tokens: Quantity = "lognormal(300, 1)"
    """Tokens per answer, cut at `sampling.max_tokens`."""
    prompt_tokens: Quantity = 100.0
    """Tokens that an agent reads before each answer."""
    env_seconds: Quantity = "exponential(0.1)"
    """Seconds of a `reset` or a `step`."""
    failed_plays: Probability = 0.0
    """Share of the plays in which the environment fails."""
    tokens_per_second: Speed = 60.0
    """That a policy server gives to one request alone."""
    tokens_per_second_full: Speed = 4000.0
    """That it gives to `server.max_num_seqs` requests together."""
    prompt_cost: Probability = 0.02
    """What a prompt token costs a policy server, as a share of a sampled one."""
    load_seconds: Quantity = 2.0
    """Seconds in which a policy server loads weights and answers nobody."""
    trained_tokens_per_second: Speed = 20000.0
    """Tokens, prompts included, that the trainer passes through once."""
    step_seconds: Quantity = 1.0
    """Seconds of an optimizer step besides, with the publication of its weights."""
    checkpoint_seconds: Quantity = 5.0
    """Seconds to write a checkpoint."""
    start_seconds: Quantity = 20.0
    """Seconds from the start of a process to its hello."""
    latency: Quantity = 0.001
    """Seconds that a message to or from the coordinator takes."""
    worker_crashes: Rate = 0.0
    """Deaths of a worker per hour."""
    server_crashes: Rate = 0.0
    """Deaths of a policy server per hour."""
    trainer_crashes: Rate = 0.0
    """Deaths of the trainer per hour; the run is resumed from its last checkpoint."""
    hangs: Probability = 0.25
    """Share of these deaths in which a process does not end, but falls silent."""

    @model_validator(mode="after")
    def _full_is_more(self) -> "SimulationConfig":
        if self.tokens_per_second_full < self.tokens_per_second:
            raise ValueError(
                f"tokens_per_second_full = {self.tokens_per_second_full:g} is less than the "
                f"tokens_per_second = {self.tokens_per_second:g} of one request alone"
            )
        return self
