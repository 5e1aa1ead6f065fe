"""Two policies that are trained together, each with a trainer and a policy server of its own."""

import hashlib
import json
import math
from pathlib import Path

import pytest
from runs import CONFIGS, curves, run_cli, running, write_run

from agentgym.coordinator.store import stored_episodes
from agentgym.tiny_model import init_model


@pytest.mark.timeout(900)
def test_the_shipped_configuration_trains_both(tmp_path: Path) -> None:
    init_model(tmp_path / "model", "tiny-moe", 1)
    names = ("left", "right")
    done = run_cli(
        "train", str(CONFIGS / "split_coins_two.toml"),
        "run.steps=2", "warmup.steps=2", "warmup.episodes=8", "rollout.tasks_per_step=2", "rollout.group_size=4",
        "rollout.max_staleness=0", "workers.slots=8", "server.kv_cache_gib=0.1",
        *(f"policies.{name}.model=model" for name in names),
        cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr + done.stdout
    run_dir = tmp_path / "runs/split-coins-two"
    shown = curves(run_dir)
    weights = [(tmp_path / "model/model.safetensors").read_bytes()]
    for seat, name in enumerate(names):
        assert [step for step, _ in shown[f"train/{name}/loss"]] == [1, 2]
        assert all(math.isfinite(value) for _, value in shown[f"train/{name}/loss"])
        assert all(value > 0.95 for _, value in shown[f"train/{name}/route_coverage"])
        # Each answered with the weights that its own trainer had made.
        assert all(0 <= value <= 1e-4 for _, value in shown[f"train/{name}/mismatch_max"])
        assert [value for _, value in shown[f"policy/{name}/age_max"]] == [0, 0]
        assert f"agent/SplitCoins-v0/player_{seat}/reward" in shown
        checkpoint = run_dir / "checkpoints" / name / "step-000004"
        weights.append((checkpoint / "model/model.safetensors").read_bytes())
    assert len({hashlib.sha256(one).digest() for one in weights}) == 3
    episode = next(s.episode for s in stored_episodes(run_dir) if s.step == 4)
    assert {(t.agent, t.policy, t.trainable) for t in episode.trajectories} == {
        ("player_0", "left", True),
        ("player_1", "right", True),
    }


@pytest.mark.timeout(900)
def test_when_one_trainer_is_killed_both_go_on_from_checkpoints_of_one_step(tmp_path: Path) -> None:
    write_run(
        tmp_path, "agentgym/TicTacToe-v0", teacher="noisy",
        run={"name": "two"},
        warmup={"steps": 60, "episodes": 8},
        trainer={"checkpoint_every": 5},
        **{"policies.other": {"model": "model"}, "policy_mapping": {"player_2": "other"}},
    )  # fmt: skip
    run_dir = tmp_path / "runs/two"
    with running(tmp_path, "run.toml", "policies_to_train=['learner', 'other']") as run:
        run.wait_for(r"\b([6-9]|[1-9]\d+)/60\b")
        killed = run.pid("trainer-other")
        run.kill(killed)
        run.wait_for(rf"trainer-other \(pid {killed}\) was killed by SIGKILL; everything is stopped")
        step = int(run.wait_for(r"resumed after step (\d+) from .*checkpoints/learner/step-")[1])
        assert run.wait() == 0, run.report()
    assert step in range(5, 60, 5)
    states = [
        json.loads((run_dir / "checkpoints" / name / "step-000060/coordinator.json").read_text())
        for name in ("learner", "other")
    ]
    assert states[0] == states[1]
    trained = [s for s in stored_episodes(run_dir) if s.step]
    assert len({(s.episode.task_index, s.episode.member) for s in trained}) == len(trained) == 60 * 8
