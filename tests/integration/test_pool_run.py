"""A whole run whose learner plays against snapshots of itself: trained, stopped and resumed."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import curves, run_cli, write_run

from agentgym.coordinator.store import stored_episodes
from agentgym.episode_json import read_episodes
from agentgym.model import check_model


@pytest.mark.timeout(900)
def test_a_run_against_its_own_snapshots_goes_on_with_them(tmp_path: Path) -> None:
    write_run(
        tmp_path, "agentgym/TicTacToe-v0", teacher="noisy",
        run={"name": "pool", "steps": 3},
        warmup={"steps": 20, "episodes": 16},
        sampling={"max_tokens": 4},
        trainer={"checkpoint_every": 1},
        **{
            "policies.past": {"pool": "learner", "every": 1, "keep": 2},
            "policies.random": {"scripted": "random"},
            "policy_mapping": {"player_2": "past"},
            "evaluation": {"every": 3, "episodes": 6},
            "evaluation.policy_mapping": {"player_2": "random"},
        },
    )  # fmt: skip
    run_dir = tmp_path / "runs" / "pool"
    done = run_cli("train", "run.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr + done.stdout
    assert re.search(r"evaluation of step 3: (success \S+ \(.*\), )?reward -?\d", done.stdout), done.stdout
    before = pool_state(run_dir)
    assert len(before["snapshots"]) == 2
    assert min(before["snapshots"]) >= 20, "the pool begins with the weights that the warm-up made"
    again = run_cli("train", "run.toml", "run.steps=5", "--resume", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, ""), again.stderr + again.stdout
    after = pool_state(run_dir)
    assert after["rounds"] > before["rounds"]
    assert max(after["snapshots"]) > max(before["snapshots"])
    files = {int(path.stem.removeprefix("version-")) for path in (run_dir / "snapshots/past").iterdir()}
    assert {24, 25} <= files, "the newest ones, and perhaps the one that was played at last"
    assert len(files) <= 3
    shown = curves(run_dir)
    # Played beside the training against somebody who stays the same, by the weights of the checkpoint.
    evaluated = dict(shown["evaluation/reward"])
    assert evaluated.keys() <= {0, 3}, "the end of the warm-up gives way where the next one is due too soon"
    assert 3 in evaluated
    records = read_episodes(run_dir / "evaluations/step-000003.jsonl").records
    assert {t.policy for record in records for t in record.episode.trajectories} == {"learner", "random"}
    assert len(records) == 6
    best = json.loads((run_dir / "best/evaluation.json").read_text())
    assert np.float32(best["evaluation/reward"]) == max(evaluated.values())  # TensorBoard has 32 bits
    check_model(run_dir / "best")
    assert [step for step, _ in shown["opponent/past/reward"]] == [1, 2, 3, 4, 5]
    met = [tag for tag in shown if tag.startswith("rating/win_rate/learner/past@")]
    assert met
    # What a snapshot said carries the version that the record names, and none of it was trained.
    opponents = {
        t.policy for s in stored_episodes(run_dir) for t in s.episode.trajectories if not t.trainable
    }
    assert any(policy.startswith("past@") for policy in opponents)


def pool_state(run_dir: Path) -> dict[str, Any]:
    """What the last checkpoint knows of the pool."""
    checkpoint = run_dir / "checkpoints" / (run_dir / "checkpoints/latest").read_text().strip()
    state: dict[str, Any] = json.loads((checkpoint / "coordinator.json").read_text())["pools"]["past"]
    return state
