"""A whole run of adapters: warm-up, reinforcement learning, resumed."""

from pathlib import Path

import numpy as np
import pytest
from runs import curves, run_cli, write_run
from safetensors.numpy import load_file

from agentgym.adapters import DOWN, UP

SCALE = 32 / 8


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_of_adapters_trains_what_its_server_samples_and_goes_on(tmp_path: Path) -> None:
    write_run(
        tmp_path, "odd_envs:Letters",
        run={"name": "adapters", "steps": 3},
        rollout={"tasks_per_step": 4, "group_size": 4, "max_staleness": 0},
        algorithm={"entropy_coefficient": 1e-3},  # so that no episode is left out
        trainer={"lora_rank": 8, "checkpoint_every": 1},
    )  # fmt: skip
    run_dir = tmp_path / "runs/adapters"
    for steps, arguments in ((3, ()), (4, ("run.steps=4", "--resume"))):
        done = run_cli("train", "run.toml", *arguments, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr + done.stdout
        shown = curves(run_dir)
        assert [step for step, _ in shown["train/mismatch_max"]] == list(range(1, steps + 1))
        assert all(value <= 1e-4 for _, value in shown["train/mismatch_max"])
        assert all(value > 0.95 for _, value in shown["train/route_coverage"])
        check_merged(tmp_path / "model", run_dir / f"checkpoints/step-{2 + steps:06d}")


def check_merged(model: Path, checkpoint: Path) -> None:
    """Check that the model in a checkpoint is the run's, with the adapters in it and nothing else changed."""
    base, merged = (load_file(folder / "model.safetensors") for folder in (model, checkpoint / "model"))
    adapters = load_file(checkpoint / "adapters.safetensors")
    assert any(adapters[name].any() for name in adapters if name.endswith(UP))
    for name, weight in base.items():
        stem, change = name.removesuffix(".weight"), 0.0
        if "_proj" in name:
            change = SCALE * adapters[stem + UP] @ adapters[stem + DOWN]
        assert np.abs(merged[name] - weight - change).max() <= (1e-5 if "_proj" in name else 0), name
