import itertools
from zlib import crc32

import pytest
from builders import config_of

from agentgym.coordinator.schedule import Schedule, learning_rate, sampling_seeds, task_seed, warmup_rate
from agentgym.trainer_config import TrainerConfig


def rates_of(steps: int, **settings: object) -> list[float]:
    config = TrainerConfig.model_validate({"learning_rate": 1.0, **settings})
    return [round(learning_rate(config, step, steps), 6) for step in range(1, steps + 1)]


def test_steps_are_first_warm_up_then_reinforcement_learning() -> None:
    schedule = Schedule(
        config_of(
            warmup={"steps": 2, "episodes": 5},
            run={"steps": 3},
            rollout={"tasks_per_step": 4, "group_size": 6, "max_staleness": 2},
            algorithm={"loss": "ppo_clip", "updates": 3},
        )
    )
    steps = [schedule.step(number) for number in range(1, 6)]
    assert [s.warmup for s in steps] == [True, True, False, False, False]
    assert [s.loss for s in steps] == ["sft", "sft", "ppo_clip", "ppo_clip", "ppo_clip"]
    assert [s.publish for s in steps] == [False, True, True, True, True]
    assert [(s.groups, s.group_size, s.capacity, s.updates) for s in steps[1:3]] == [
        (5, 1, 10, 1),
        (4, 6, 12, 3),
    ]
    assert [schedule.phase_end(number) for number in range(1, 6)] == [2, 2, 5, 5, 5]
    assert (schedule.warmup_steps, schedule.last_step) == (2, 5)


def test_without_staleness_only_one_step_is_played_at_a_time() -> None:
    step = Schedule(config_of(rollout={"max_staleness": 0, "tasks_per_step": 4})).step(1)
    assert step.capacity == step.groups == 4


def test_the_learning_rate_rises_then_stays() -> None:
    assert rates_of(5, lr_warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates_of(3) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_the_learning_rate_falls_to_its_share_at_the_last_step(decay: str) -> None:
    rates = rates_of(6, lr_decay=decay, lr_min_ratio=0.2, lr_warmup_steps=1)
    assert (rates[0], rates[1], rates[-1]) == (0.5, 1.0, 0.2)
    assert all(a > b for a, b in itertools.pairwise(rates[1:]))


def test_a_linear_decay_is_a_line() -> None:
    assert rates_of(5, lr_decay="linear", lr_min_ratio=0.0) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates_of(1, lr_decay="linear", lr_min_ratio=0.0) == [1.0]


@pytest.mark.parametrize("steps", [1, 2, 10, 37])
def test_the_warm_up_rises_over_a_tenth_and_falls_to_a_tenth(steps: int) -> None:
    config = config_of(warmup={"steps": steps, "learning_rate": 2.0})
    rates = [warmup_rate(config, step) for step in range(1, steps + 1)]
    rise = max(1, steps // 10)
    assert rates[rise - 1] == max(rates) == 2.0
    assert all(a < b for a, b in itertools.pairwise(rates[:rise]))
    assert all(a > b for a, b in itertools.pairwise(rates[rise - 1 :]))
    assert steps <= rise or rates[-1] == pytest.approx(0.2)


def test_seeds_differ_by_everything_that_they_depend_on_and_nothing_else() -> None:
    tasks = {task_seed(run, crc32(env), task) for run in (1, 2) for env in (b"a", b"b") for task in range(50)}
    members = {seed for run in (1, 2) for group in range(20) for seed in sampling_seeds(run, group, 8)}
    assert (len(tasks), len(members)) == (200, 320)
    assert all(0 <= seed < 2**31 for seed in tasks | members)
    assert task_seed(1, crc32(b"a"), 3) == task_seed(1, crc32(b"a"), 3)
    assert sampling_seeds(1, 2, 8)[:3] == sampling_seeds(1, 2, 3)
