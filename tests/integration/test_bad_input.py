"""What is wrong with a run's input is said once and clearly, and stops no more than it must.

Runs here are warm-ups alone where nothing else is needed: they start no policy server.
"""

import json
import os
import signal
from pathlib import Path

import pytest
from runs import (
    ask,
    assert_one_clear_error,
    curves,
    refused,
    run_cli,
    running,
    wait_until_gone,
    write_run,
)

ENDLESS = {"steps": 100_000, "episodes": 8}
"""A warm-up that somebody has to stop."""


def architecture(folder: Path, name: str) -> None:
    """Write another architecture into the model's configuration."""
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [name]}))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run.stepz=3"], ["ConfigError: run.toml:", "unknown key 'run.stepz'; did you mean 'steps'?"]),
        (["run.steps"], ["override 'run.steps' is not of the form section.key=value"]),
        (["run.steps=many"], ["run.steps: Input should be a valid integer", "found 'many'"]),
        (["policies.learner.model=nowhere"], ["ModelError: there is no model folder at nowhere"]),
        (["policies.learner.model=run.toml"], ["ModelError: there is no model folder at run.toml"]),
        (["server.max_model_len=100000"], ["ModelError: server.max_model_len = 100000", "lower it"]),
        (
            ["trainer.nproc=3", "trainer.ep=3"],
            ["ModelError: trainer.ep = 3 cannot divide the model's num_experts = 8"],
        ),
        (["env.id=odd_envs:Leters"], ["ConfigError: ", "did you mean Letters"]),
        (["env.kwargs.speed=3"], ["ConfigError: odd_envs:Letters", "latency"]),
        (["warmup.policy=parrot"], ["ConfigError: there is no scripted policy 'parrot'"]),
        (["run.dir=run.toml"], ["ConfigError: ", "run.toml"]),
        (["--resume"], ["ConfigError: cannot resume: there is no run in runs/run"]),
    ],
    ids=lambda value: value[0] if value and "Error" not in value[0] else "",
)
def test_a_wrong_setting_is_one_message_before_anything_starts(
    arguments: list[str], expected: list[str], tmp_path: Path
) -> None:
    write_run(tmp_path, "odd_envs:Letters")
    assert_one_clear_error(refused("train", "run.toml", *arguments, cwd=tmp_path), *expected)
    assert not list(tmp_path.glob("runs/*/logs/*"))


def test_an_architecture_that_is_not_supported_is_one_message(tmp_path: Path) -> None:
    write_run(tmp_path, "odd_envs:Letters")
    architecture(tmp_path, "GPT2LMHeadModel")
    done = run_cli("train", "run.toml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert_one_clear_error(
        done.stderr, "ModelError: ", "GPT2LMHeadModel", "supported are Qwen3MoeForCausalLM"
    )


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ("BreaksInStep", "step raised KeyError: 'letter'"),
        ("NeverReturns", "step did not return within 0.5 s"),
        ("BeginsTooLong", "context"),
    ],
)
def test_an_environment_that_always_fails_ends_the_run_with_its_own_words(
    env: str, expected: str, tmp_path: Path
) -> None:
    write_run(tmp_path, f"odd_envs:{env}", env={"step_timeout": 0.5})
    done = run_cli("train", "run.toml", "workers.slots=64", cwd=tmp_path)
    assert done.returncode == 1
    assert_one_clear_error(done.stderr, "RunError: ", expected)


def test_a_scripted_policy_that_always_fails_ends_the_run_with_its_own_words(tmp_path: Path) -> None:
    write_run(tmp_path, "odd_envs:Letters", teacher="odd_envs:Raises")
    done = run_cli("train", "run.toml", cwd=tmp_path)
    assert done.returncode == 1
    assert_one_clear_error(done.stderr, "RunError: ", "raised LookupError: no answer in the book")


def test_a_run_goes_on_without_the_plays_that_fail_and_the_workers_that_wear_out(tmp_path: Path) -> None:
    write_run(tmp_path, "odd_envs:BreaksSometimes", workers={"slots": 4, "max_episodes": 6})
    done = run_cli("train", "run.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    shown = curves(tmp_path / "runs" / "run")
    last = {tag: points[-1][1] for tag, points in shown.items()}
    assert last["system/episodes/failed"] >= 1
    assert last["system/episodes/ok"] >= 16
    # A play of the warm-up is a group of its own.
    assert last["system/groups/dropped"] == last["system/episodes/failed"]
    log = (tmp_path / "runs/run/logs/coordinator.log").read_text()
    assert "raised ValueError: no letters for seed" in log
    # Workers leave when they have played enough; no play is lost by that.
    assert "has left to be replaced; restarted as pid" in done.stdout
    assert "played again" not in done.stdout
    assert last["system/restarts"] == last["system/leases/taken_back"] == 0


def test_wrong_tool_calls_are_answered_and_counted(tmp_path: Path) -> None:
    write_run(
        tmp_path, "agentgym/Calculator-v0", teacher="odd_envs:BadCaller", server={"max_model_len": 2048}
    )
    done = run_cli("train", "run.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    shown = curves(tmp_path / "runs" / "run")
    for tag, each in (
        ("tools/invalid", 3),
        ("tools/calculate/calls", 2),
        ("tools/submit/calls", 1),
        ("turns", 4),
    ):
        assert [value for _, value in shown[f"warmup/episode/{tag}"]] == [each, each], tag
    assert [value for _, value in shown["warmup/episode/end/terminated"]] == [1, 1]


def test_a_conversation_that_outgrows_the_context_ends_with_that_reason(tmp_path: Path) -> None:
    write_run(tmp_path, "odd_envs:GrowsTooLong")
    done = run_cli("train", "run.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    shown = curves(tmp_path / "runs" / "run")
    assert [value for _, value in shown["warmup/episode/end/context"]] == [1, 1]
    assert [value for _, value in shown["warmup/episode/turns"]] == [1, 1]


def test_garbage_is_answered_and_counted_and_the_run_stops_on_request_and_goes_on_later(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, "odd_envs:Letters", warmup=ENDLESS, **{"env.kwargs": {"latency": 0.05}})
    with running(tmp_path, "run.toml") as run:
        run.wait_for(r"\d+/100000 ")
        address = run.argument("worker-0", "--coordinator")
        assert "at least 3 frames" in ask(address, [b"\x00\xff"]).text
        assert "unknown message kind 'pickle'" in ask(address, [b"pickle", b"", b"\x80\x04K\x01."]).text
        assert "is not msgpack" in ask(address, [b"hello", b"", b"\xc1" * 100]).text
        assert "before hello" in ask(address, [b"ready", b"", b"\x81\xa7credits\x01"]).text
        run.process.send_signal(signal.SIGINT)
        last = int(run.wait_for(r"stopping after step (\d+); once more to stop at once")[1])
        assert run.wait() == 0, run.report()
        assert wait_until_gone(tmp_path, 10.0) == {}
        assert any(line.startswith("done: reward ") for line in run.lines)
        assert not [line for line in run.lines if "Error" in line or "Traceback" in line]
    run_dir = tmp_path / "runs" / "run"
    assert curves(run_dir)["system/wire/dropped"][-1] == (last - 100_000, 4)
    assert (run_dir / "checkpoints" / "latest").read_text().strip() == f"step-{last:06d}"

    again = refused("train", "run.toml", cwd=tmp_path)
    assert_one_clear_error(again, "ConfigError: runs/run holds a run already", "--resume")
    other = refused("train", "run.toml", "--resume", "trainer.learning_rate=0.5", cwd=tmp_path)
    assert_one_clear_error(other, "ConfigError: cannot resume runs/run with other settings: trainer differ")

    settings = json.loads((run_dir / "config.json").read_text())
    del settings["coordinator"]["notice_after"]  # as an older version wrote it, which had fewer settings
    (run_dir / "config.json").write_text(json.dumps(settings))
    with running(tmp_path, "run.toml", "--resume") as run:
        run.wait_for(rf"resumed after step {last} from ")
        run.wait_for(r"\d+/100000 ")
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait() == 0, run.report()
        assert wait_until_gone(tmp_path, 10.0) == {}


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    write_run(tmp_path, "odd_envs:Letters", warmup=ENDLESS, **{"env.kwargs": {"latency": 20.0}})
    with running(tmp_path, "run.toml") as run:
        run.wait_for(
            "worker-0 .* is there", log="coordinator"
        )  # and plays: nothing is said before the first step
        os.kill(run.process.pid, signal.SIGINT)
        run.wait_for("once more to stop at once")
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait(30.0) == 130
        assert wait_until_gone(tmp_path, 10.0) == {}
        [error] = [line for line in run.lines if "Error" in line]
        assert error.startswith(
            "StoppedError: stopped at once on request; go on from the last checkpoint with --resume"
        )
