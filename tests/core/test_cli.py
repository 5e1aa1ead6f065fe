import re
import subprocess
import sys
from pathlib import Path

import pytest
from builders import config_of, episode_of

from agentgym.cli import app
from agentgym.config_file import save_config
from agentgym.episode_json import EpisodeWriter, record_of
from agentgym.errors import ConfigError
from agentgym.model import check_model

PLAYS = {
    "agentgym/GuessNumber-v0": ("expert", "played by expert"),
    "agentgym/Calculator-v0": ("expert", "<tool_call>"),
    "agentgym/TicTacToe-v0": ("random", "player_2"),
    "agentgym/SplitCoins-v0": ("fair", "claim 5"),
    "agentgym/PrisonersDilemma-v0": ("tit_for_tat", "cooperate"),
}


HEAVY = [
    "torch",
    "vllm",
    "megatron",
    "transformers",
    "gymnasium",
    "pettingzoo",
    "numpy",
    "zmq",
    "tensorboard",
]


def run(*arguments: str) -> int:
    """Run a command in this process and return its exit status."""
    return app(list(arguments), standalone_mode=False) or 0


def agentgym(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command as a user would, who types some lines."""
    return subprocess.run(
        [sys.executable, "-m", "agentgym", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        input=typed,
    )


def test_an_evaluation_may_sample_as_a_training_may_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[env]\nid = "agentgym/GuessNumber-v0"\n[policies.learner]\nmodel = "none"\n')
    greedy = ("sampling.temperature=0", "sampling.top_k=1", "rollout.group_size=1")
    run("eval", str(config), *greedy, "--policy", "learner=expert", "--episodes", "1")
    assert "learner  agent         1" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="sample from a part of the vocabulary"):
        run("train", str(config), *greedy[:2])


def test_list_names_the_shipped_environments_and_their_scripted_policies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("list")
    lines = capsys.readouterr().out.splitlines()
    kinds = {line.split()[0]: line.split()[1:3] for line in lines}
    assert PLAYS.keys() <= kinds.keys()
    assert kinds["agentgym/TicTacToe-v0"] == ["aec", "inline"]
    (row,) = (line for line in lines if line.startswith("agentgym/TicTacToe-v0"))
    assert "random,noisy,expert" in row
    assert row.endswith("Two players by turns; the first to have three in a line wins.")


def test_list_names_the_environments_of_another_library(capsys: pytest.CaptureFixture[str]) -> None:
    run("list", "gymnasium:")
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["gymnasium:Taxi-v4", "single"] for line in lines)
    assert all(line.startswith("gymnasium:") for line in lines)
    with pytest.raises(ConfigError, match="no source 'gymnaseum:'"):
        run("list", "gymnaseum:")


def test_init_model_writes_a_complete_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("init-model", str(tmp_path / "model"), "--seed", "3")
    check_model(tmp_path / "model")
    assert "a random tiny-moe model, seed 3" in capsys.readouterr().out


@pytest.mark.parametrize("env_id", PLAYS)
def test_play_shows_episodes_of_a_scripted_policy(env_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    policy, shown = PLAYS[env_id]
    run("play", env_id, "--policy", policy, "--episodes", "2", "--seed", "3")
    text = capsys.readouterr().out
    assert text.count(f"{env_id} task") == 2
    assert text.count("terminated") == 2
    assert shown in text


def test_play_takes_arguments_a_seat_and_an_opponent(capsys: pytest.CaptureFixture[str]) -> None:
    run("play", "agentgym/GuessNumber-v0", "high=3", "turns=1", "--policy", "random")
    assert "1 to 3" in capsys.readouterr().out.replace("1-3", "1 to 3")
    run("play", "agentgym/TicTacToe-v0", "--agent", "player_2", "--policy", "expert", "--opponent", "random")
    text = capsys.readouterr().out
    assert "player_1 played by random" in text
    assert "player_2 played by expert" in text
    run("play", "agentgym/TicTacToe-v0", "--policy", "random")
    assert "player_2 played by expert" in capsys.readouterr().out


def test_a_person_plays_at_the_terminal_against_a_scripted_opponent() -> None:
    done = agentgym("play", "agentgym/TicTacToe-v0", "--policy", "human", typed="5\nnine\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert "....x...." not in done.stdout.split("> ")[0]
    assert "player_1 played by human: reward -1" in done.stdout  # an illegal text is a forfeit
    assert "player_2 played by expert" in done.stdout


def test_a_person_who_leaves_ends_the_command_cleanly() -> None:
    done = agentgym("play", "agentgym/GuessNumber-v0", "--policy", "human", typed="10\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("left\n")


def test_play_shows_the_same_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    for seed in ("1", "1", "2"):
        run("play", "agentgym/TicTacToe-v0", "--seed", seed)
    text = re.sub(r"seconds \S+", "", capsys.readouterr().out)
    first, second, other = text.split("agentgym/TicTacToe-v0 task")[1:]
    assert first == second != other


def test_check_says_what_is_wrong_and_what_to_do_and_ends_with_status_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("check", "broken_envs:SchemaIsWrong") == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("FAIL tool-schemas"))
    assert "add.a: 'int' is no type of JSON" in lines[at + 1]
    assert "Write a docstring" in lines[at + 2]


def test_show_prints_the_episodes_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = EpisodeWriter(tmp_path / "e.jsonl")
    writer.write(record_of(episode_of([0.5]), str))
    writer.close()
    run("show", str(tmp_path / "e.jsonl"), "--episode", "1")
    assert "agent played by learner: reward 0.5" in capsys.readouterr().out


def test_the_commands_of_the_processes_read_the_resolved_settings(tmp_path: Path) -> None:
    save_config(config_of(model=str(tmp_path / "none")), tmp_path / "config.json")
    done = agentgym("worker", "--config", str(tmp_path / "config.json"), "--coordinator", "ipc:///nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert "ModelError: there is no model folder" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_wrong_configuration_is_one_clear_message_and_status_1(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "[env]\nid = 'agentgym/GuessNumber-v0'\n[policies.learner]\nmodel = 'x'\n[run]\nsteeps = 1"
    )
    done = agentgym("train", str(path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"ConfigError: {path}:\n  unknown key 'run.steeps'; did you mean 'steps'?\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["play", "agentgym/GuesNumber-v0"], "there is no environment 'agentgym/GuesNumber-v0'; the nearest"),
        (
            ["play", "agentgym/Calculator-v0", "--policy", "boss"],
            "there is no scripted policy 'boss'; .* has noisy, expert",
        ),
        (
            ["play", "agentgym/TicTacToe-v0", "--agent", "player_3"],
            "has no agent 'player_3'; its agents are player_1, player_2",
        ),
        (["play", "broken_envs:SoundTools"], "broken_envs:SoundTools has no scripted policy"),
        (["init-model", "/dev/null/x", "--preset", "huge"], "unknown model preset 'huge'; known presets: "),
        (
            ["check", "agentgym/GuesNumber-v0"],
            "there is no environment 'agentgym/GuesNumber-v0'; the nearest",
        ),
        (["check", "agentgym/GuessNumber-v0", "turns"], "argument 'turns' is not of the form key=value"),
        (["eval", "none.toml"], "cannot read the configuration none.toml: No such file"),
        (["show", "none.jsonl"], "cannot read the episodes in none.jsonl: No such file"),
        (["train", "none.toml"], "cannot read the configuration none.toml: No such file"),
    ],
    ids=["env", "policy", "agent", "none", "preset", "check", "argument", "eval", "show", "file"],
)
def test_what_cannot_be_done_is_said(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*arguments)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from agentgym.cli import app\n"
        "app(['--help'], standalone_mode=False)\n"
        f"heavy = set({HEAVY!r}) & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in ("train", "worker", "serve", "init-model", "list", "play", "check", "show", "eval"):
        assert command in done.stdout
