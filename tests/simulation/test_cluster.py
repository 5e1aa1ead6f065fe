import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from simulated import Simulated, any_cluster, broken, cluster_of, simulated

from agentgym.coordinator.process import Coordinator
from agentgym.coordinator.schedule import Schedule, Step
from agentgym.errors import RunError

CRASHES = {"worker_crashes": 40.0, "server_crashes": 20.0, "trainer_crashes": 40.0, "failed_plays": 0.03}


def test_the_same_seed_gives_the_same_messages_at_the_same_times(tmp_path: Path) -> None:
    def trace(seed: int, **settings: float) -> int:
        config = cluster_of(run={"seed": seed, "steps": 6}, simulation=settings)
        return simulated(config, tmp_path).cluster.site.network.trace

    assert trace(1, **CRASHES) == trace(1, **CRASHES)
    assert len({trace(1), trace(2), trace(1, **CRASHES)}) == 3


OPPONENTS = """
import sys, tempfile, pathlib
from simulated import cluster_of, simulated
policies = {"learner": {"model": "m"}, "past": {"pool": "learner", "every": 2}, "frozen": {"model": "f"}}
config = cluster_of(
    run={"steps": 4}, policies=policies, policy_mapping={"b": {"past": 0.5, "frozen": 0.5}},
    simulation={"worker_crashes": 100.0, "server_crashes": 50.0},
)
with tempfile.TemporaryDirectory() as folder:
    print(simulated(config, pathlib.Path(folder), agents=["a", "b"]).cluster.site.network.trace)
"""


def test_the_order_of_sets_which_differs_between_processes_changes_nothing() -> None:
    traces = set()
    for seed in ("1", "2", "3"):
        path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        ran = subprocess.run(
            [sys.executable, "-c", OPPONENTS], capture_output=True, text=True, env=env, timeout=120
        )
        assert ran.returncode == 0, ran.stderr
        traces.add(int(ran.stdout))
    assert len(traces) == 1


def test_groups_in_the_place_of_those_that_teach_nothing_make_no_token_older(tmp_path: Path) -> None:
    def run(max_filtered: int) -> Simulated:
        rollout = {
            "group_size": 2,
            "max_staleness": 2,
            "max_filtered": max_filtered,
        }  # half of the pairs are equal
        return simulated(cluster_of(rollout=rollout), tmp_path)

    all_groups, some = run(0), run(100)
    assert some.cluster.coordinator._dispatcher.groups.counts["filtered"] > 12
    for one in (all_groups, some):
        assert broken(one, max_staleness=2) == set()
    old = [sum(one.cluster.measured.masked.values()) / sum(one.ages.values()) for one in (all_groups, some)]
    assert old[1] <= old[0]
    mean = [
        sum(age * n for age, n in one.ages.items()) / sum(one.ages.values()) for one in (all_groups, some)
    ]
    assert mean[1] < mean[0]


@pytest.mark.parametrize(
    ("workers", "steps", "deaths"),
    [(250, 10, 15), pytest.param(500, 50, 100, marks=pytest.mark.long)],
    ids=["2000", "10000"],
)
def test_no_trained_token_is_too_old_in_so_many_episodes_of_workers_that_die(
    tmp_path: Path, workers: int, steps: int, deaths: int
) -> None:
    config = cluster_of(
        run={"steps": steps},
        rollout={"tasks_per_step": 25, "group_size": 8, "max_staleness": 2},
        workers={"count": workers, "slots": 2},
        server={"count": 8},
        coordinator={"heartbeat_interval": 5.0},
        simulation={"tokens_per_second": 500.0, "worker_crashes": 2.0, "server_crashes": 10.0},
    )
    run = simulated(config, tmp_path)
    site, leases = run.cluster.site, run.cluster.coordinator._dispatcher.leases
    assert broken(run, max_staleness=2) == set()
    assert set(run.ages) == {0, 1, 2}
    assert sum(run.cluster.measured.masked.values()) > 0  # heavy tails make some tokens too old
    stored = sum(len(entry.leases) for entry in run.cluster.ledger.entries.values())
    assert stored >= steps * 200
    assert site.crashes["SimulatedWorker"] >= deaths
    counts = leases.counts
    assert counts["taken_back"] > 0
    assert counts["issued"] == counts["finished"] + counts["taken_back"] + leases.playing


def test_without_staleness_every_token_is_of_the_weights_that_it_trains(tmp_path: Path) -> None:
    run = simulated(cluster_of(rollout={"max_staleness": 0}, simulation={"worker_crashes": 40.0}), tmp_path)
    assert broken(run, max_staleness=0) == set()
    assert set(run.ages) == {0}
    assert set(run.cluster.measured.masked.values()) == {0.0}


@pytest.mark.parametrize("seed", range(1, 6))
def test_deaths_of_all_kinds_lose_nothing_and_train_nothing_twice(tmp_path: Path, seed: int) -> None:
    config = cluster_of(
        run={"seed": seed, "steps": 30},
        rollout={"group_timeout": 60.0, "max_staleness": 1 + seed % 3},
        env={"episode_timeout": 120.0},
        simulation=CRASHES,
    )
    run = simulated(config, tmp_path)
    assert broken(run, max_staleness=1 + seed % 3) == set()
    assert run.cluster.site.crashes.keys() == {"SimulatedWorker", "SimulatedServer", "SimulatedTrainer"}
    assert run.cluster.resumed >= 1


def test_a_warm_up_and_an_opponent_from_a_pool_are_simulated_too(tmp_path: Path) -> None:
    pool = {"pool": "learner", "every": 2, "keep": 3}
    config = cluster_of(
        policies={"learner": {"model": "model"}, "past": pool},
        policy_mapping={"b": "past"},
        warmup={"steps": 3, "episodes": 20},
    )
    run = simulated(config, tmp_path, agents=["a", "b"])
    assert run.cluster.coordinator._training.over
    assert max(run.ages) <= 1
    assert {policy for policy in run.opponents if policy.startswith("past@")} >= {"past@3", "past@5"}


def test_of_two_policies_in_training_both_go_on_from_the_newest_step_that_both_have(tmp_path: Path) -> None:
    config = cluster_of(
        run={"steps": 30},
        policies={"red": {"model": "a"}, "blue": {"model": "b"}},
        policies_to_train=["red", "blue"],
        policy_mapping={"a": "red", "b": "blue"},
        simulation=CRASHES,
    )
    run = simulated(config, tmp_path, agents=["a", "b"])
    assert broken(run, max_staleness=1) == set()
    assert run.cluster.resumed >= 1
    assert run.cluster.site.ages.keys() == {(step, who) for step in range(1, 31) for who in ("red", "blue")}


def test_no_more_episodes_are_in_play_than_the_servers_can_use(tmp_path: Path) -> None:
    run = simulated(cluster_of(rollout={"max_playing": 6}), tmp_path)
    marks = run.cluster.measured.marks
    for before, after in pairwise(marks):
        assert after.playing - before.playing <= 6 * (after.time - before.time) + 1e-6
    assert marks[-1].playing > 5 * (marks[-1].time - marks[0].time)
    assert broken(run, max_staleness=1) == set()


@pytest.mark.parametrize("seed", range(16))
def test_any_cluster_keeps_its_promises(tmp_path: Path, seed: int) -> None:
    config = any_cluster(seed)
    run = simulated(config, tmp_path, agents=["a", "b"])
    assert broken(run, max_staleness=config.rollout.max_staleness) == set()


class Generous(Schedule):
    """Opens one group more than it may."""

    def step(self, number: int) -> Step:
        step = super().step(number)
        return replace(step, capacity=step.capacity + 1)


class GenerousCoordinator(Coordinator):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._training._schedule = Generous(self._config)


def test_a_capacity_that_is_one_too_large_is_noticed(tmp_path: Path) -> None:
    run = simulated(cluster_of(), tmp_path, coordinator=GenerousCoordinator)
    assert broken(run, max_staleness=1) == {"open and ready groups are bounded"}
    assert broken(simulated(cluster_of(), tmp_path), max_staleness=1) == set()


def test_a_staleness_that_is_one_too_large_is_noticed(tmp_path: Path) -> None:
    run = simulated(cluster_of(rollout={"max_staleness": 2}), tmp_path)
    assert "no trained token is older than the bound" in broken(run, max_staleness=1)


def test_where_all_episodes_are_alike_the_capacity_alone_keeps_tokens_young(tmp_path: Path) -> None:
    even = {"turns": 4, "answer_tokens": 50, "env_seconds": 0.1, "load_seconds": 1, "latency": 0.001}

    def masked(run: Simulated) -> float:
        return sum(run.cluster.measured.masked.values())

    assert masked(simulated(cluster_of(server={"count": 1}, simulation=even), tmp_path)) == 0.0


def test_a_run_whose_environment_always_fails_ends_with_why(tmp_path: Path) -> None:
    config = cluster_of(simulation={"failed_plays": 1.0})
    with pytest.raises(RunError, match="episodes failed one after another"):
        simulated(config, tmp_path)
