"""Whole runs whose trainer is several ranks, killed and resumed with another layout."""

import math
from pathlib import Path
from typing import Any

import pytest
from runs import curves, running, wait_until_gone, write_run

STEPS = 4
ONE_RANK = tuple(f"trainer.{name}=1" for name in ("nproc", "tp", "pp", "ep", "etp"))


def train_and_resume(folder: Path, layout: dict[str, Any], *changes: str) -> dict[str, list[float]]:
    """Kill a run after its second step, let it go on with other settings, and return the curves of its training."""
    write_run(
        folder, "odd_envs:Letters",
        run={"name": "ranks", "steps": STEPS},
        warmup={"steps": 1, "episodes": 8},
        rollout={"tasks_per_step": 2, "group_size": 4, "max_staleness": 0},
        sampling={"max_tokens": 4},
        trainer={"checkpoint_every": 1, "keep_checkpoints": 9, **layout},
        workers={"slots": 8},
    )  # fmt: skip
    with running(folder, "run.toml") as run:
        run.wait_for(rf" 2/{STEPS} ")
        run.kill(run.process.pid)
        assert wait_until_gone(folder, 10.0) == {}
    with running(folder, "run.toml", "--resume", *changes) as run:
        run.wait_for(r"resumed after step [34] from .*/step-00000[34]")
        assert run.wait() == 0, run.report()
    assert wait_until_gone(folder, 10.0) == {}
    shown = {tag: points for tag, points in curves(folder / "runs/ranks").items() if tag.startswith("train/")}
    assert [step for step, _ in shown["train/loss"]] == list(range(1, STEPS + 1))
    values = {tag: [value for _, value in points] for tag, points in shown.items()}
    assert all(map(math.isfinite, values["train/grad_norm"]))
    assert all(0.95 < value <= 1 for value in values["train/route_coverage"])
    assert len(values["train/mismatch_max"]) == STEPS
    return values


def check_exact(values: dict[str, list[float]]) -> None:
    """What vLLM sampled with the weights that the ranks published has the probability that the ranks give it.

    A step has about ten tokens here, and all of them may agree to the last bit.
    """
    assert all(0 <= value <= 1e-4 for value in values["train/mismatch_max"])


@pytest.mark.timeout(900)
def test_a_run_of_two_ranks_is_killed_and_goes_on_as_one(tmp_path: Path) -> None:
    check_exact(train_and_resume(tmp_path, {"nproc": 2, "tp": 2, "ep": 2, "etp": 1}, *ONE_RANK))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"nproc": 2, "tp": 2}, ("trainer.tp=1", "trainer.pp=2")),
        ({"nproc": 2, "pp": 2}, ()),
        ({"nproc": 2, "ep": 2}, ONE_RANK),
        ({}, ("trainer.nproc=2",)),
    ],
    ids=["tp2 to pp2", "pp2", "ep2 to one", "one to dp2"],
)
def test_a_run_goes_on_in_any_layout(
    tmp_path: Path, layout: dict[str, int], changes: tuple[str, ...]
) -> None:
    check_exact(train_and_resume(tmp_path, layout, *changes))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_ranks_train_in_bfloat16(tmp_path: Path) -> None:
    values = train_and_resume(tmp_path, {"nproc": 2, "tp": 2, "dtype": "bfloat16"}, *ONE_RANK)
    assert all(0 < value < 0.2 for value in values["train/mismatch_all"])
