import json
from pathlib import Path

import numpy as np
import pytest
from builders import episode_of, trajectory_of

from agentgym.episode import EndReason, Episode
from agentgym.episode_json import EpisodeWriter, read_episodes, record_of
from agentgym.errors import ConfigError


def decode(ids: object) -> str:
    return "".join(chr(97 + i % 26) for i in ids)  # type: ignore[attr-defined]


def write(path: Path, *episodes: Episode, **fields: object) -> Path:
    writer = EpisodeWriter(path, config={"seed": 3})
    for episode in episodes:
        writer.write(record_of(episode, decode, **fields))
    writer.close()
    return path


def assert_same(found: Episode, expected: Episode) -> None:
    """Compare two episodes field by field, arrays with their dtypes."""
    for one, other in zip(found.trajectories, expected.trajectories, strict=True):
        for name in ("tokens", "loss_mask", "logprobs", "versions", "routes"):
            ours, theirs = getattr(one, name), getattr(other, name)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert ours.dtype == theirs.dtype
                np.testing.assert_array_equal(ours, theirs)
        assert (one.agent, one.policy, one.trainable, one.branch) == (
            other.agent,
            other.policy,
            other.trainable,
            other.branch,
        )
        assert one.turns == other.turns
    for name in ("env_id", "task_index", "seed", "group_id", "member", "end_reason", "checksums", "metrics"):
        assert getattr(found, name) == getattr(expected, name)
    assert (found.agent_metrics, found.error) == (expected.agent_metrics, expected.error)


def test_nothing_of_an_episode_is_lost_in_a_file(tmp_path: Path) -> None:
    episodes = [
        episode_of(
            {"a": [1.0, 0.25], "b": [-1.0]},
            metrics={"seconds": 0.1, "tools/errors": 2.0},
            agent_metrics={"a": {"success": 1.0}},
        ),
        episode_of([0.1], routes=False, end=EndReason.MAX_TURNS, trainable=False),
        episode_of(end=EndReason.ENV_FAILED, error="step raised\nKeyError"),
    ]
    file = read_episodes(write(tmp_path / "e.jsonl", *episodes, step=7))
    assert file.header == {"format": 1, "config": {"seed": 3}}
    for record, episode in zip(file.records, episodes, strict=True):
        assert_same(record.episode, episode)
        assert record.fields == {"step": 7}
        assert [t.checksum() for t in record.episode.trajectories] == list(episode.checksums)


def test_the_texts_are_the_tokens_of_each_turn() -> None:
    trajectory = trajectory_of([1.0, 0.0])
    (pairs,) = record_of(episode_of(trajectories=[trajectory]), decode).texts
    said = [decode(trajectory.tokens[turn.start : turn.end]) for turn in trajectory.turns]
    assert [pair[1] for pair in pairs[:2]] == said
    assert "".join(read + said for read, said in pairs) == decode(trajectory.tokens)


def test_a_line_is_json_that_other_programs_can_read(tmp_path: Path) -> None:
    path = write(tmp_path / "e.jsonl", episode_of([np.float32(0.5)]))
    line = json.loads(path.read_text().splitlines()[1])
    assert line["episode"]["trajectories"][0]["turns"][0]["reward"] == 0.5
    assert line["episode"]["end_reason"] == "terminated"


def test_a_line_that_was_cut_by_a_kill_is_left_out_and_written_over(tmp_path: Path) -> None:
    path = write(tmp_path / "e.jsonl", episode_of(), episode_of())
    path.write_bytes(path.read_bytes()[:-10])
    assert len(read_episodes(path).records) == 1
    write(path, episode_of(task_index=9))
    assert [r.episode.task_index for r in read_episodes(path).records] == [7, 9]


HEADER = '{"kind": "header", "format": 1}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no episodes"),
        ("no json\n", "line 1: not a line of an episode file"),
        (HEADER + HEADER, "line 2: .*found a line of kind 'header'"),
        ('{"kind": "header", "format": 99}\n', "it has format 99, and this version reads 1"),
        (HEADER + '{"kind": "episode", "episode": {}, "arrays": {}, "texts": []}\n', "line 2: .*env_id"),
    ],
    ids=["empty", "no json", "two headers", "format", "no episode"],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "e.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_episodes(tmp_path / "e.jsonl")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the episodes in .*none.jsonl: No such file"):
        read_episodes(tmp_path / "none.jsonl")
