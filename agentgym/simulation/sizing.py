"""`agentgym simulate`: a run of the configured cluster in virtual time, and of others that differ in one thing each.

What holds a cluster up is not what is busiest, but what makes it faster when there is more of it.
"""

import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console

from agentgym.config import Config
from agentgym.coordinator.lineup import agents_of
from agentgym.errors import RunError
from agentgym.messages import AgentId
from agentgym.simulation.clock import run_virtually
from agentgym.simulation.cluster import Cluster
from agentgym.simulation.measure import Figures, figures
from agentgym.simulation.quantity import scaled

WORTH_IT = 1.05
"""Less speed than this is no reason to call something a bottleneck."""
ROW = "{:28} {:>7} {:>6} {:>8} {:>8} {:>6} {:>5} {:>7} {:>7} {:>7} {:>8}"
HEAD = ROW.format(
    "", "s/step", "speed", "trainer", "servers", "slots", "age", "oldest", "masked", "ep/s", "tok/s"
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A cluster that differs in one thing from the configured one."""

    change: str
    config: Config
    bottleneck: str = ""
    """What the configured cluster lacks, if this one is faster; empty: nothing that one can buy."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated run came to."""

    figures: Figures
    crashes: Counter[str]
    resumed: int


def size(config: Config, *, steps: int, console: Console) -> None:
    """Simulate a configuration and its variants, and print a line for each; that of a variant may say why it stops.

    Raises:
        ConfigError: there is no such environment.
        RunError: the run cannot go on as configured; the message says why.
    """
    logging.disable(logging.WARNING)  # stragglers and deaths are part of the picture
    config = _prepared(config, steps)
    agents = agents_of(config)
    rollout, workers = config.rollout, config.workers
    console.print(
        f"{steps} steps of {rollout.tasks_per_step} x {rollout.group_size} episodes, max_staleness "
        f"{rollout.max_staleness}; policy servers: {config.server.count}; slots: {workers.count} x {workers.slots}"
    )
    console.print(HEAD.rstrip())
    others = list(variants(config))
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        outcomes = pool.map(partial(_attempt, agents=agents), [config, *(v.config for v in others)])
        base = next(outcomes)
        if isinstance(base, RunError):
            raise base
        console.print(row("as configured", base.figures, base.figures))
        found = []
        for variant, outcome in zip(others, outcomes, strict=True):
            if isinstance(outcome, RunError):
                console.print(f"{variant.change:28} does not go on: {outcome}", markup=False)
                continue
            console.print(row(variant.change, outcome.figures, base.figures))
            if variant.bottleneck:
                found.append((base.figures.seconds_per_step / outcome.figures.seconds_per_step, variant))
    for line in (*_deaths(base), verdict(found)):
        console.print(line)


def simulate(config: Config, agents: Sequence[AgentId] = ()) -> Outcome:
    """Simulate a run to its last step. Raises RunError where it cannot go on."""

    async def scene(folder: Path) -> Outcome:
        cluster = Cluster(config, folder, agents=agents)
        await cluster.run()
        return Outcome(figures(cluster.site, cluster.measured), cluster.site.crashes, cluster.resumed)

    with tempfile.TemporaryDirectory(prefix="agentgym-simulation-") as folder:
        return run_virtually(scene(Path(folder)))


def _attempt(config: Config, agents: Sequence[AgentId]) -> Outcome | RunError:
    try:
        return simulate(config, agents)
    except RunError as error:
        return error


def variants(config: Config) -> Iterator[Variant]:
    """Yield what could be changed about a cluster."""
    settings, staleness = config.simulation, config.rollout.max_staleness
    faster = {
        "trained_tokens_per_second": 2 * settings.trained_tokens_per_second,
        "step_seconds": scaled(settings.step_seconds, 0.5),
    }
    yield Variant("trainer twice as fast", _with(config, "simulation", **faster), "the trainer")
    servers = _with(config, "server", count=2 * config.server.count)
    yield Variant("twice the policy servers", servers, "the policy servers")
    yield Variant(
        "twice the workers", _with(config, "workers", count=2 * config.workers.count), "the workers"
    )
    quick = scaled(settings.env_seconds, 0.5)
    yield Variant(
        "environment twice as fast", _with(config, "simulation", env_seconds=quick), "the environment"
    )
    older = _with(config, "rollout", max_staleness=staleness + 1)
    yield Variant(f"max_staleness {staleness + 1}", older, "rollout.max_staleness")
    if staleness:
        yield Variant("max_staleness 0", _with(config, "rollout", max_staleness=0))


def row(name: str, found: Figures, base: Figures) -> str:
    """Return a line of the table; the speed is that of `base` times so much."""
    return ROW.format(
        name,
        f"{found.seconds_per_step:.1f}",
        f"{base.seconds_per_step / found.seconds_per_step:.2f}",
        f"{found.trainer:.0%}",
        f"{found.servers:.0%}",
        f"{found.workers:.0%}",
        f"{found.age_mean:.2f}",
        found.age_max,
        f"{found.masked:.1%}",
        f"{found.episodes_per_second:.1f}",
        f"{found.tokens_per_second:.0f}",
    )


def verdict(found: Sequence[tuple[float, Variant]]) -> str:
    """Return which change gives most; `found` has the speed of each."""
    speed, best = max(found, key=lambda pair: pair[0], default=(0.0, None))
    if best is None or speed < WORTH_IT:
        return "bottleneck: none; no change of one thing makes it 5 % faster"
    return f"bottleneck: {best.bottleneck}; with {best.change} it is {speed:.2f} times as fast"


def _deaths(outcome: Outcome) -> Iterator[str]:
    if outcome.crashes:
        died = ", ".join(f"{kind} {count}" for kind, count in sorted(outcome.crashes.items()))
        yield f"died, as configured: {died}; resumed {outcome.resumed} times"


def _prepared(config: Config, steps: int) -> Config:
    """Return a run of some steps of reinforcement learning alone; nothing is there that could be scored."""
    config = _with(_with(config, "run", steps=steps), "warmup", steps=0)
    return _with(config, "rollout", group_rewards=[])


def _with(config: Config, section: str, **values: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
