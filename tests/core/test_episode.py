from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from builders import episode_of, trajectory_of
from hypothesis import given
from hypothesis import strategies as st

from agentgym.episode import EndReason, Episode, Status, no_route, status_of, turns_of
from agentgym.episode_codec import decode_episode, encode_episode
from agentgym.errors import IntegrityError, WireError
from agentgym.protocol import EpisodeDone
from agentgym.wire import pack, unpack


def travel(episode: Episode) -> Episode:
    """Send an episode over the wire."""
    header, arrays = encode_episode(episode)
    frames = [bytes(frame) for frame in pack(EpisodeDone(lease_id=1, episode=header), arrays)]
    packet = unpack(frames)
    return decode_episode(packet.expect(EpisodeDone).episode, packet.arrays)


def assert_equal(found: Episode, expected: Episode) -> None:
    assert replace(found, trajectories=()) == replace(expected, trajectories=())
    assert len(found.trajectories) == len(expected.trajectories)
    for mine, theirs in zip(found.trajectories, expected.trajectories, strict=True):
        assert mine.checksum() == theirs.checksum()
        assert mine.turns == theirs.turns
        for name in ("agent", "policy", "trainable", "branch"):
            assert getattr(mine, name) == getattr(theirs, name)


def test_only_what_the_environment_ended_is_ok() -> None:
    assert {reason: status_of(reason) for reason in EndReason} == {
        EndReason.TERMINATED: Status.OK,
        EndReason.ENV_TRUNCATED: Status.TRUNCATED,
        EndReason.MAX_TURNS: Status.TRUNCATED,
        EndReason.MAX_TOKENS: Status.TRUNCATED,
        EndReason.CONTEXT: Status.TRUNCATED,
        EndReason.TIMEOUT: Status.TRUNCATED,
        EndReason.ENV_FAILED: Status.FAILED,
        EndReason.POLICY_FAILED: Status.FAILED,
    }


def test_rewards_are_summed_over_turns_and_branches_of_an_agent() -> None:
    pieces = [
        trajectory_of([1.0, 2.0], agent="a"),
        trajectory_of([10.0], agent="b"),
        trajectory_of([4.0], agent="a", branch=1),
    ]
    episode = episode_of(trajectories=pieces)
    assert (episode.reward("a"), episode.reward("b"), episode.reward("nobody")) == (7.0, 10.0, 0)
    assert episode.agents == ["a", "b"]
    assert turns_of(episode.trajectories) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": np.zeros(3, np.bool_)}, "loss_mask has 3 entries for 10 tokens"),
        ({"logprobs": np.zeros(11, np.float32)}, "logprobs has 11 entries"),
        ({"versions": np.zeros(0, np.int32)}, "versions has 0 entries"),
        ({"routes": np.zeros((9, 2, 2), np.uint8)}, r"routes have shape \(9, 2, 2\) for 10 tokens"),
        ({"routes": np.zeros((10, 2), np.uint8)}, r"expected \[K, L, k\]"),
        ({"loss_mask": np.ones(10, np.bool_)}, "not true exactly on the tokens of the turns"),
        ({"loss_mask": np.zeros(10, np.bool_)}, "not true exactly"),
        ({"turns": ()}, "not true exactly"),
    ],
)
def test_arrays_that_do_not_fit_together_are_found(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        replace(trajectory_of([1.0, 0.0]), **changes).check()


@pytest.mark.parametrize("span", [(-1, 2), (8, 11), (5, 3), (8, 8), (4, 6)])
def test_turns_outside_of_the_tokens_or_over_each_other_are_found(span: tuple[int, int]) -> None:
    good = trajectory_of([1.0, 0.0])
    first, second = good.turns
    with pytest.raises(IntegrityError, match=r"turn \[.*\) after \d+ is empty or does not fit"):
        replace(good, turns=(first, second._replace(start=span[0], end=span[1]))).check()


@pytest.mark.parametrize("name", ["tokens", "loss_mask", "logprobs", "versions", "routes"])
def test_the_checksum_sees_every_array(name: str) -> None:
    good = trajectory_of([1.0, 0.0])
    changed = getattr(good, name).copy()
    changed.flat[3] = not changed.flat[3]
    assert replace(good, **{name: changed}).checksum() != good.checksum()


def test_the_checksum_sees_shapes_and_missing_routes() -> None:
    good = trajectory_of([1.0, 0.0])
    assert good.routes is not None
    assert replace(good, routes=good.routes.reshape(10, 4, 1)).checksum() != good.checksum()
    assert replace(good, routes=None).checksum() != good.checksum()
    assert replace(good, tokens=np.repeat(good.tokens, 2)[::2]).checksum() == good.checksum()


def test_a_row_without_a_route_holds_the_largest_value() -> None:
    assert (no_route(np.dtype(np.uint8)), no_route(np.dtype(np.uint16))) == (255, 65535)


@pytest.mark.parametrize(
    "episode",
    [
        episode_of([1.0, 0.5]),
        episode_of({"a": [1.0], "b": [0.0, -1.0]}, agent_metrics={"a": {"success": 1.0}, "b": {}}),
        episode_of(trajectories=[trajectory_of([1.0]), trajectory_of([2.0], routes=False, trainable=False)]),
        episode_of(trajectories=[trajectory_of([1.0], routes=False), trajectory_of([2.0], branch=1)]),
        episode_of(end=EndReason.ENV_FAILED, error="reset raised ValueError: half a pair \\udce4"),
        episode_of(end=EndReason.TIMEOUT, metrics={}),
    ],
    ids=["single", "two-agents", "one-routed", "branches", "failed", "timeout"],
)
def test_an_episode_survives_the_wire(episode: Episode) -> None:
    assert_equal(travel(episode), episode)


@given(
    rewards=st.dictionaries(
        st.text(min_size=1, max_size=4).filter(str.isprintable),
        st.lists(st.floats(-1, 1), min_size=1, max_size=4),
        max_size=3,
    ),
    routes=st.booleans(),
    version=st.integers(0, 9),
)
def test_any_episode_survives_the_wire(rewards: dict[str, list[float]], routes: bool, version: int) -> None:
    episode = episode_of(rewards, routes=routes, versions=version)
    assert_equal(travel(episode), episode)


def spoiled(path: str, value: Any) -> dict[str, Any]:
    """The header of a good episode with one entry replaced: "trajectories.0.length"."""
    header, _ = encode_episode(episode_of([1.0, 0.5]))
    fields = msgpack.unpackb(msgpack.packb(header))
    *way, last = path.split(".")
    place = fields
    for part in way:
        place = place[int(part)] if part.isdigit() else place[part]
    place[int(last) if last.isdigit() else last] = value
    return fields


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("env_id", 5),
        ("seed", "x"),
        ("seed", float("inf")),
        ("task_index", float("nan")),
        ("member", None),
        ("end_reason", "bored"),
        ("end_reason", ["terminated"]),
        ("checksums", 3),
        ("checksums", []),
        ("metrics", {"x": "y"}),
        ("metrics", [1]),
        ("agent_metrics", {"a": 1.0}),
        ("error", {}),
        ("trajectories", {}),
        ("trajectories", None),
        ("trajectories", [3]),
        ("trajectories", [{}]),
        ("trajectories.0.agent", ["a"]),
        ("trajectories.0.agent", 3),
        ("trajectories.0.length", -10),
        ("trajectories.0.length", 11),
        ("trajectories.0.length", "10 tokens"),
        ("trajectories.0.length", 2.5),
        ("trajectories.0.branch", float("inf")),
        ("trajectories.0.routed", False),
        ("trajectories.0.turns", []),
        ("trajectories.0.turns", [[0]]),
        ("trajectories.0.turns", [{"start": 0}]),
        ("trajectories.0.turns.0.1", 4),
        ("trajectories.0.turns.0.2", "hello"),
        ("trajectories.0.turns.0.4", "much"),
        ("trajectories.0.turns.0", [0, 1, {}, "stop", 0.0, {}, 0.0, "more"]),
        ("trajectories.0.more", 1),
        ("more", 1),
    ],
)
def test_an_episode_header_that_is_wrong_is_a_wire_error(path: str, value: Any) -> None:
    _, arrays = encode_episode(episode_of([1.0, 0.5]))
    known = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(WireError, match="an episode"):
        decode_episode(spoiled(path, value), known)


@pytest.mark.parametrize("name", ["tokens", "loss_mask", "logprobs", "versions", "routes"])
def test_episode_arrays_that_are_missing_or_of_another_kind_are_a_wire_error(name: str) -> None:
    header, sent = encode_episode(episode_of([1.0, 0.5]))
    arrays = {key: array for key, array in sent.items() if array is not None}
    for wrong in (arrays[name][:-1], arrays[name].astype(np.int64), arrays[name].reshape(-1, 1), np.array(5)):
        with pytest.raises(WireError, match=f"{name} (is|are)"):
            decode_episode(header, {**arrays, name: wrong})
    with pytest.raises(WireError, match=r"missing|no routes"):
        decode_episode(header, {key: array for key, array in arrays.items() if key != name})
