"""The commands that serve a model for themselves: play, eval and serve, with a real policy server."""

import signal
import subprocess
from pathlib import Path

import pytest
from runs import COMMAND, processes_in, run_cli, write_run

from agentgym.episode_json import read_episodes
from agentgym.tiny_model import init_model


@pytest.mark.timeout(600)
def test_a_model_is_evaluated_recorded_shown_and_played(tmp_path: Path) -> None:
    config = str(write_run(tmp_path, "odd_envs:Letters", sampling={"max_tokens": 4}))
    arguments = ("eval", config, "--group", "2", "--out", "e.jsonl", "--episodes")
    done = run_cli(*arguments, "6", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "learner  agent         6" in done.stdout
    assert "pass@k of learner as agent" in done.stdout
    records = read_episodes(tmp_path / "e.jsonl").records
    assert len(records) == 6
    for record in records:
        (trajectory,) = record.episode.trajectories
        assert set(trajectory.versions[trajectory.loss_mask]) == {0}
        assert (trajectory.logprobs[trajectory.loss_mask] < 0).all()
    again = run_cli(*arguments, "6", cwd=tmp_path)
    assert "6 episodes are there, 0 are missing" in again.stdout
    shown = run_cli("show", "e.jsonl", "--episode", "-1", cwd=tmp_path)
    assert "agent played by learner" in shown.stdout
    assert "weights 0" in shown.stdout
    played = run_cli("play", "odd_envs:Letters", "--policy", "model", cwd=tmp_path)
    assert played.returncode == 0, played.stderr
    assert "odd_envs:Letters task 0" in played.stdout


@pytest.mark.timeout(600)
def test_nothing_of_a_server_that_is_terminated_is_left_when_it_has_ended(tmp_path: Path) -> None:
    init_model(tmp_path / "model")
    command = [*COMMAND, "serve", "--model", "model", "--bind", f"ipc://{tmp_path}/server"]
    server = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        assert any("serves model" in line for line in server.stderr)
        assert len(processes_in(tmp_path)) == 2  # vLLM's own is the other one
        server.terminate()
        assert server.wait(60) == -signal.SIGTERM
        assert processes_in(tmp_path) == {}
    finally:
        server.kill()
        server.communicate()
