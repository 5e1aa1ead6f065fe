"""Whole runs in virtual time, and what must hold in each of them."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builders import config_of

from agentgym.config import Config
from agentgym.coordinator.process import Coordinator
from agentgym.coordinator.schedule import Schedule
from agentgym.protocol import Ack, Header, Lease
from agentgym.simulation.clock import run_virtually
from agentgym.simulation.cluster import Cluster

CLUSTER: dict[str, Any] = {
    "run": {"steps": 12},
    "env": {"episode_timeout": 3600.0},
    "sampling": {"max_tokens": 8192},
    "server": {"count": 2, "max_model_len": 65536},
    "workers": {"count": 10, "slots": 8},
    "rollout": {"tasks_per_step": 5, "group_size": 4, "max_staleness": 1, "group_timeout": 1e6},
    "trainer": {"checkpoint_every": 4},
    "coordinator": {"max_restarts": 10_000, "step_timeout": 7200.0},
    "simulation": {
        "turns": "pareto(4, 1.6)",
        "answer_tokens": "pareto(80, 1.4)",
        "prompt_tokens": 20,
        "tokens_per_second": 100.0,
        "load_seconds": "lognormal(1, 0.5)",
        "start_seconds": "lognormal(5, 0.5)",
        "latency": "lognormal(0.005, 1)",
    },
}
"""A small cluster with heavy tails; nothing dies, no episode is cut and no group goes on without a member."""


def cluster_of(**sections: Any) -> Config:
    """The configuration above with other values."""
    tables = {name: value for name, value in sections.items() if name in CLUSTER}
    merged = {name: {**CLUSTER[name], **tables.get(name, {})} for name in CLUSTER}
    return config_of(**{**sections, **merged})


def any_cluster(seed: int) -> Config:
    """A small cluster whose sizes, speeds, delays, deadlines and deaths are drawn; two agents play."""
    rng = random.Random(seed)
    pick = rng.choice
    policies: dict[str, Any] = {"red": {"model": "a"}}
    rest: dict[str, Any] = {"policy_mapping": {"b": "red"}}
    match pick(["alone", "pool", "duel"]):
        case "pool":
            policies["past"] = {"pool": "red", "every": pick([1, 3]), "sample": pick(["uniform", "win_rate"])}
            rest = {"policy_mapping": {"b": pick(["past", {"past": 0.5, "red": 0.5}])}}
        case "duel":
            policies["blue"] = {"model": "b"}
            rest = {"policies_to_train": ["red", "blue"], "policy_mapping": {"a": "red", "b": "blue"}}
    return cluster_of(
        policies=policies,
        policies_to_train=rest.pop("policies_to_train", ["red"]),
        run={"seed": seed, "steps": pick([5, 15])},
        rollout={
            "tasks_per_step": pick([1, 3, 8]),
            "group_size": pick([2, 5]),
            "max_staleness": pick([0, 1, 3]),
            "max_playing": pick([None, 1, 10]),
            "group_timeout": pick([5.0, 60.0, 1e6]),
            "fork_share": pick([0.0, 0.5]),
        },
        env={"episode_timeout": pick([30.0, 3600.0]), "max_turns": pick([None, 3])},
        workers={"count": pick([1, 12]), "slots": pick([1, 4, 50])},
        server={"count": pick([1, 3]), "max_num_seqs": pick([1, 8, 256])},
        trainer={"checkpoint_every": pick([1, 3])},
        warmup={"steps": pick([0, 2]), "episodes": 5},
        coordinator={"max_retries": pick([3, 20]), "heartbeat_timeout": pick([5.0, 20.0])},
        simulation={
            "worker_crashes": pick([0.0, 30.0, 100.0]),
            "server_crashes": pick([0.0, 60.0]),
            "trainer_crashes": pick([0.0, 30.0]),
            "failed_plays": pick([0.0, 0.05]),
            "hangs": pick([0.0, 0.5]),
            "latency": pick([0.0, "lognormal(0.1, 1)"]),
        },
        **rest,
    )


@dataclass
class Simulated:
    """A run that is over."""

    config: Config
    cluster: Cluster
    leases: Counter[tuple[int, int]]
    """How often which lease was given, by how often the run had been resumed and the id."""
    acknowledged: Counter[tuple[int, int]]
    opponents: set[str]
    """Who played."""

    @property
    def ages(self) -> Counter[int]:
        """How many tokens of which age the trainer got."""
        return sum(self.cluster.site.ages.values(), Counter[int]())


def simulated(
    config: Config,
    folder: Path,
    *,
    agents: Sequence[str] = (),
    coordinator: type[Coordinator] = Coordinator,
) -> Simulated:
    """Run a configuration to its end."""

    async def scene() -> Simulated:
        cluster = Cluster(config, folder, agents=agents, coordinator=coordinator)
        seen = Simulated(config, cluster, Counter(), Counter(), set())

        def watch(_time: float, _peer: bytes, header: Header) -> None:
            match header:
                case Lease():
                    seen.leases[cluster.resumed, header.lease_id] += 1
                    seen.opponents.update(header.policies.values())
                case Ack():
                    seen.acknowledged[cluster.resumed, header.lease_id] += 1

        cluster.site.network.watchers.append(watch)
        await cluster.run()
        return seen

    return run_virtually(scene())


def broken(run: Simulated, *, max_staleness: int) -> set[str]:
    """Return the names of the invariants that a run broke."""
    ledger, schedule = run.cluster.ledger, Schedule(run.config)
    plan = {number: schedule.step(number) for number in range(1, schedule.last_step + 1)}
    found = set()
    if max(run.ages) > max_staleness or min(run.ages) < 0:
        found.add("no trained token is older than the bound")
    for mark in run.cluster.measured.marks:
        # Its own groups still count, until its weights are published.
        later = plan.get(mark.step + 1, plan[mark.step])
        if mark.groups > max(plan[mark.step].capacity, later.capacity) - plan[mark.step].groups:
            found.add("open and ready groups are bounded")
    consumed = [entry for entry in ledger.entries.values() if entry.step is not None]
    steps = Counter(entry.step for entry in consumed)
    if steps != {number: step.groups for number, step in plan.items()}:
        found.add("every step takes its groups")
    tasks = {entry.group.task_index for entry in ledger.entries.values()}
    if not run.config.rollout.fork_share and len(tasks) < len(ledger.entries):
        found.add("every task is consumed by one step")
    stored = [lease for entry in ledger.entries.values() for lease in entry.leases.values()]
    # After a resume who met another snapshot of a pool than the other members is played again.
    pools = any(policy.kind == "pool" for policy in run.config.policies.values())
    if (ledger.replaced and not pools) or len(set(stored)) < len(stored) or max(run.leases.values()) > 1:
        found.add("every episode is of a lease of its own")
    if max(run.acknowledged.values()) > 1:
        found.add("an episode is acknowledged once")
    return found
