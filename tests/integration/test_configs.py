"""The shipped configurations train every agent, token for token."""

import math
from pathlib import Path

import pytest
from runs import CONFIGS, curves, run_cli

from agentgym.tiny_model import init_model

FEWER = (
    "run.steps=2",
    "warmup.episodes=16",
    "rollout.tasks_per_step=4",
    "rollout.group_size=4",
    "rollout.max_staleness=0",  # so that every token is compared under the weights that sampled it
    "workers.slots=16",
    "server.kv_cache_gib=0.1",
    "policies.learner.model=model",
)
SHIPPED = {
    "calculator": ("Calculator-v0", ["agent"], 2),
    "tictactoe": (
        "TicTacToe-v0",
        ["player_1", "player_2"],
        40,
    ),  # the second one plays if the first one's move is legal
    "split_coins": ("SplitCoins-v0", ["player_0", "player_1"], 2),
}
"""Environment, agents and steps of warm-up, by configuration."""
SHORTER = {"calculator": ["env.max_turns=4"]}
"""A random model uses up all of its turns."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",  # `test_two_policies.py` plays split_coins, too
    ["calculator", "tictactoe", pytest.param("split_coins", marks=pytest.mark.long)],
)
def test_the_shipped_configurations_train_every_agent(name: str, tmp_path: Path) -> None:
    init_model(tmp_path / "model", "tiny-moe", 1)
    env_id, agents, warmup = SHIPPED[name]
    config = str(CONFIGS / f"{name}.toml")
    done = run_cli("train", config, *FEWER, *SHORTER.get(name, []), f"warmup.steps={warmup}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stderr == ""
    shown = curves(tmp_path / "runs" / name.replace("_", "-"))
    for agent in agents:
        assert [step for step, _ in shown[f"agent/{env_id}/{agent}/reward"]] == [1, 2]
    assert [step for step, _ in shown["train/loss"]] == [1, 2]
    assert [step for step, _ in shown["warmup/loss"]] == list(range(1 - warmup, 1))
    assert all(math.isfinite(value) for tag in ("train/loss", "warmup/loss") for _, value in shown[tag])
    assert all(value > 0.95 for _, value in shown["train/route_coverage"])
    assert all(0 <= value <= 1e-4 for _, value in shown["train/mismatch_max"])
    assert [value for _, value in shown["policy/age_max"]] == [0, 0]
