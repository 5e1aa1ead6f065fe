import io
from pathlib import Path

import pytest
from builders import config_of, episode_of, sent, trajectory_of, within
from rich.console import Console

from agentgym.config_file import save_config
from agentgym.coordinator.store import EpisodeStore, StoredGroup
from agentgym.episode import EndReason
from agentgym.episode_json import EpisodeWriter, record_of
from agentgym.episode_print import print_episode, visible
from agentgym.errors import ConfigError
from agentgym.show import show
from agentgym.tiny_model import init_model


def decode(ids: object) -> str:
    return " ".join(f"t{i}" for i in ids)  # type: ignore[attr-defined]


def shown(*episodes: object, color: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=400, force_terminal=color, color_system="standard" if color else None)
    for episode in episodes:
        print_episode(record_of(episode, decode, step=4), console)  # type: ignore[arg-type]
    return out.getvalue()


def test_an_episode_shows_who_said_what_what_it_earned_and_by_which_weights() -> None:
    episode = episode_of(
        {"a": [1.0], "b": [-0.5]}, versions=3, agent_metrics={"a": {"success": 1.0}}, metrics={"seconds": 2.0}
    )
    text = shown(episode)
    assert "test/Env-v0 task 7, seed 11, group 0, member 0: terminated; 2 turns" in text
    assert "seconds 2, step 4" in text
    assert "a played by learner: reward 1" in text
    assert "success 1" in text
    assert "b played by learner: reward -0.5" in text
    assert "+1 (all +1)" in text
    assert "-0.5 (all -0.5)" in text
    assert "weights 3" in text
    for trajectory in episode.trajectories:
        turn = trajectory.turns[0]
        assert decode(trajectory.tokens[turn.start : turn.end]) in text


def test_what_was_trained_is_green_and_what_was_not_is_cyan() -> None:
    trained, other = trajectory_of([1.0], agent="a"), trajectory_of([1.0], agent="b", trainable=False)
    green, cyan = "\x1b[1;32m", "\x1b[1;36m"
    text = shown(episode_of(trajectories=[trained, other]), color=True)
    first, second = text.split("b\x1b[0m played by", 1)
    assert green in first.split("played by")[1]
    assert cyan in second
    assert f"{cyan}t" not in first
    assert "0 of" in text.split("played by other")[1].splitlines()[0]


def test_a_failed_episode_shows_its_error() -> None:
    text = shown(episode_of(end=EndReason.ENV_FAILED, error="step raised KeyError: [/red]"))
    assert "env_failed" in text
    assert "step raised KeyError: [/red]" in text
    assert "nobody answered" in text


def test_control_characters_cannot_move_the_cursor() -> None:
    assert visible("a\x1b[2Jb\r\x07\n\tü") == "a\\x1b[2Jb\\r\\x07\n\tü"


def file_of(path: Path, count: int) -> Path:
    writer = EpisodeWriter(path)
    for number in range(count):
        writer.write(record_of(episode_of([1.0], task_index=number), decode))
    writer.close()
    return path


def output(path: Path, number: int | None) -> str:
    out = io.StringIO()
    show(path, number=number, console=Console(file=out, width=400))
    return out.getvalue()


def test_all_or_one_of_the_episodes_of_a_file_are_shown(tmp_path: Path) -> None:
    path = file_of(tmp_path / "e.jsonl", 3)
    assert [f"task {i}" in output(path, None) for i in range(3)] == [True] * 3
    assert [f"task {i}" in output(path, 2) for i in range(3)] == [False, True, False]
    assert [f"task {i}" in output(path, -1) for i in range(3)] == [False, False, True]
    assert "episode 3 of 3" in output(path, -1)


def test_a_run_directory_shows_the_newest_of_its_episodes(tmp_path: Path) -> None:
    init_model(tmp_path / "model")
    save_config(config_of(model=str(tmp_path / "model"), warmup={"steps": 2}), tmp_path / "config.json")

    async def scene() -> None:
        store = EpisodeStore(tmp_path, failed=pytest.fail)
        store.go_on(0)
        for lease in range(5):
            packet = sent(episode_of([1.0], group=lease, task_index=lease), lease + 10)
            store.add(StoredGroup(lease, lease, 1), packet, lambda: None)
        store.consume(7, [4], lambda places: None)
        store.close()

    within(20, scene())
    assert [f"task {i}," in output(tmp_path, None) for i in range(5)] == [False, False, True, True, True]
    assert [f"task {i}," in output(tmp_path, 2) for i in range(5)] == [False, True, False, False, False]
    newest = output(tmp_path, -1)
    assert "episode 5 of 5" in newest
    assert "lease 14, step 5" in newest  # of reinforcement learning, two of the warm-up came before
    assert "step" not in output(tmp_path, 4)
    with pytest.raises(ConfigError, match="has 5 episodes; there is no number 6"):
        output(tmp_path, 6)


@pytest.mark.parametrize("number", [0, 4, -4])
def test_an_episode_that_is_not_there_is_one_sentence(tmp_path: Path, number: int) -> None:
    with pytest.raises(ConfigError, match=f"has 3 episodes; there is no number {number}"):
        show(file_of(tmp_path / "e.jsonl", 3), number=number, console=Console(file=io.StringIO()))


def test_a_folder_that_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory: it has no folder 'episodes'"):
        show(tmp_path, number=None, console=Console(file=io.StringIO()))
