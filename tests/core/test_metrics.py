from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import episode_of, trajectory_of
from full_disk import files_end_at
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agentgym.episode import EndReason, Episode
from agentgym.errors import RunError
from agentgym.metrics import episode_metrics, render_episode
from agentgym.tensorboard import TensorBoard


def test_metrics_are_means_over_the_plays_of_trained_agents() -> None:
    metrics = episode_metrics(
        [
            episode_of({"a": [1.0, 2.0], "b": [4.0]}, agent_metrics={"a": {"success": 1.0, "claim": 3.0}}),
            episode_of({"a": [0.0], "b": [0.0]}, metrics={"seconds": 2.5}),
        ]
    )
    assert metrics["episode/reward"] == (3 + 4 + 0 + 0) / 4
    assert metrics["agent/Env-v0/a/reward"] == 1.5
    assert metrics["agent/Env-v0/a/reward/all"] == 1.5
    assert metrics["agent/Env-v0/b/turns"] == 1.0
    assert metrics["episode/turns"] == 5 / 4
    assert metrics["episode/sampled_tokens"] == 2 * metrics["episode/turns"]
    assert metrics["episode/tokens"] == 5 * metrics["episode/turns"]
    assert metrics["episode/seconds"] == 2.0
    # A success that nobody stated is unknown; a metric that was not given is 0.
    assert metrics["episode/success"] == 1.0
    assert metrics["agent/Env-v0/a/claim"] == 1.5


def test_agents_that_are_not_trained_are_shown_alone() -> None:
    trained, frozen = trajectory_of([1.0], agent="a"), trajectory_of([5.0], agent="b", trainable=False)
    metrics = episode_metrics([episode_of(trajectories=[trained, frozen])])
    assert (metrics["episode/reward"], metrics["agent/Env-v0/b/reward"]) == (1.0, 5.0)


def test_policies_that_are_not_trained_have_numbers_of_their_own_and_snapshots_of_a_pool_share_them() -> None:
    episodes = [
        episode_of(
            trajectories=[
                trajectory_of([1.0], agent=seats[0]),
                trajectory_of([reward], agent=seats[1], policy=policy, trainable=False),
            ]
        )
        for seats, policy, reward in (("ab", "past@5", 2.0), ("ba", "past@10", 4.0), ("ab", "random", -1.0))
    ]
    metrics = episode_metrics(episodes)
    assert metrics["episode/reward"] == 1.0
    assert (metrics["opponent/past/reward"], metrics["opponent/random/reward"]) == (3.0, -1.0)
    assert metrics["agent/Env-v0/b/reward"] == (2.0 + 1.0 - 1.0) / 3
    assert not any(tag.startswith("opponent/learner") for tag in metrics)


def test_branches_of_an_agent_are_one_play() -> None:
    pieces = [trajectory_of([1.0, 1.0]), trajectory_of([3.0], branch=1)]
    metrics = episode_metrics([episode_of(trajectories=pieces)])
    assert (metrics["episode/reward"], metrics["episode/turns"]) == (5.0, 3.0)


def test_a_metric_of_the_environment_hides_none_of_ours() -> None:
    metrics = episode_metrics([episode_of([2.0], agent_metrics={"agent": {"reward": 9.0, "turns": 9.0}})])
    assert (metrics["episode/reward"], metrics["episode/turns"]) == (2.0, 1.0)


def test_the_shares_of_all_end_reasons_are_given() -> None:
    episodes = [episode_of(end=EndReason.TERMINATED)] * 3 + [episode_of(end=EndReason.CONTEXT)]
    metrics = episode_metrics(episodes)
    shares = {reason: metrics[f"episode/end/{reason.value}"] for reason in EndReason}
    assert (shares[EndReason.TERMINATED], shares[EndReason.CONTEXT]) == (0.75, 0.25)
    assert sum(shares.values()) == 1.0
    assert set(episode_metrics([]).values()) == {0.0}


def test_a_rendered_episode_shows_what_was_read_said_and_earned() -> None:
    def decode(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids)) + "``\n"

    text = render_episode(episode_of([0.0, 1.0], group=3, member=2), decode)
    assert "**test/Env-v0** task 7, group 3, member 2: terminated" in text
    assert "*agent* (learner), reward 1:" in text
    assert "- read `` 0 1 2''\\n ``\n- **said** `` 3 4''\\n `` +0 (all +0)" in text
    assert "- read `` 5 6 7''\\n ``\n- **said** `` 8 9''\\n `` +1 (all +1)" in text


def test_a_rendered_failure_says_why() -> None:
    failed: Episode = episode_of(end=EndReason.ENV_FAILED, error="step raised KeyError: 'x'")
    assert "env_failed - step raised KeyError: 'x'" in render_episode(failed, str)
    quiet = trajectory_of([0.0])
    quiet = replace(quiet, turns=(quiet.turns[0]._replace(rewards={}),))
    assert render_episode(episode_of(trajectories=[quiet]), str).endswith("said** `` [3, 4] ``\n")


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def curve(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_event_files_hold_numbers_distributions_and_texts(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    for step in (1, 2):
        board.scalars({"train/loss": step / 2, "episode/reward": np.float32(step)}, step)
    board.histogram("policy/age", np.array([0, 1, 1, 3], np.int32), 2)
    board.histogram("policy/none", np.zeros(0, np.int32), 2)
    board.text("samples/episodes", "**bold** ``ä``", 2)
    board.close()
    events = read(tmp_path)
    assert curve(events, "train/loss") == [(1, 0.5), (2, 1.0)]
    assert curve(events, "episode/reward") == [(1, 1.0), (2, 2.0)]
    assert events.Tags()["histograms"] == ["policy/age"]
    histogram = events.Histograms("policy/age")[0].histogram_value
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (0, 3, 4, 5)
    assert sum(histogram.bucket) == 4
    assert len(histogram.bucket) == len(histogram.bucket_limit)
    (text,) = events.Tensors("samples/episodes")
    assert text.tensor_proto.string_val[0].decode() == "**bold** ``ä``"
    metadata = events.SummaryMetadata("samples/episodes")
    assert metadata.plugin_data.plugin_name == "text"


def test_numbers_are_there_at_once(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.scalars({"train/loss": 1.0}, 1)
    assert curve(read(tmp_path), "train/loss") == [(1, 1.0)]
    board.close()


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    error = r"events.out.* cannot be written: .*; go on with --resume"
    with files_end_at(1), pytest.raises(RunError, match=error):
        board.scalars({"train/loss": 1.0}, 1)
    board.close()
    assert read(tmp_path).Tags()["scalars"] == []


@pytest.mark.parametrize("first", [-2, 0, 3])
def test_a_resumed_run_discards_what_lay_ahead_and_goes_on(tmp_path: Path, first: int) -> None:
    # One clock: the warm-up has the steps up to 0.
    before, after = TensorBoard(tmp_path), None
    for step in range(-4, 6):
        before.scalars({"warmup/loss" if step <= 0 else "train/loss": float(step)}, step)
    before.close()
    after = TensorBoard(tmp_path, first_step=first)
    for step in range(first, 8):
        after.scalars({"warmup/loss" if step <= 0 else "train/loss": step + 100.0}, step)
    after.close()
    events = read(tmp_path)
    found = curve(events, "warmup/loss") + curve(events, "train/loss")
    assert found == [(step, float(step)) for step in range(-4, first)] + [
        (step, step + 100.0) for step in range(first, 8)
    ]
