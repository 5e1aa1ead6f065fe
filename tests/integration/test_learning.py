"""What shipped configurations learn from random weights, in minutes."""

from pathlib import Path

import pytest
from runs import CONFIGS, curves, run_cli

from agentgym.tiny_model import init_model


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("advantage", "lowest", "highest"), [("group_mean", 0.0, 0.1), ("magrpo", 0.9, 1.0)])
def test_own_points_teach_to_defect_and_those_of_both_to_cooperate(
    advantage: str, lowest: float, highest: float, tmp_path: Path
) -> None:
    init_model(tmp_path / "model", "tiny-moe", 1)
    done = run_cli(
        "train", str(CONFIGS / "prisoners_dilemma.toml"), "policies.learner.model=model",
        f"algorithm.advantage={advantage}",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    cooperated = [value for _, value in curves(tmp_path / "runs/prisoners-dilemma")["episode/cooperated"]]
    assert 0.3 < cooperated[0] < 0.7
    assert all(lowest <= value <= highest for value in cooperated[-5:])
