"""Decoders take whatever bytes there are: they return what is right, or raise WireError."""

import copy
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from builders import episode_of
from every_kind import ONE_OF_EACH
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.batch import SAMPLE_ARRAYS
from agentgym.episode_codec import decode_episode, encode_episode
from agentgym.errors import EnvError, IntegrityError, WireError
from agentgym.metrics import episode_metrics
from agentgym.policy.scripted import Script
from agentgym.protocol import KINDS, Header
from agentgym.wire import DTYPES, pack, unpack
from agentgym.worker.driver import Outcome, Request, State
from agentgym.worker.table import Hop, Move, Opening
from agentgym.worker.table_codec import decode, encode

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """Some bytes changed, removed, repeated or inserted."""
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 8)))
        data = data[:start] + draw(st.binary(max_size=8) | st.just(data[start:end] * 2)) + data[end:]
    return data


@st.composite
def grafted(draw: st.DrawFn, value: Any) -> Any:
    """Anything in place of a part of a value."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 3)) == 0:
        return draw(anything)
    value = copy.copy(value)
    place = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
    if draw(st.integers(0, 5)) == 0:
        del value[place]
    else:
        value[place] = draw(grafted(value[place]))
    return value


def frames_of(header: Header, arrays: Any = None) -> list[bytes]:
    return [zmq.Frame(frame).bytes for frame in pack(header, arrays, request_id=b"7")]


def the_same_comes_out_again(frames: list[bytes]) -> None:
    try:
        packet = unpack(frames)
    except WireError:
        return
    again = unpack(frames_of(packet.header, packet.arrays))
    assert isinstance(packet.header, KINDS[packet.kind])
    assert repr(again.header) == repr(packet.header)  # nan is not equal to itself
    assert {name: a.tobytes() for name, a in again.arrays.items()} == {
        n: a.tobytes() for n, a in packet.arrays.items()
    }


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_message_that_was_changed_is_a_message_or_a_wire_error(kind: str, data: st.DataObject) -> None:
    frames = frames_of(ONE_OF_EACH[kind], {"tokens": np.arange(3, dtype=np.int32)})
    place = data.draw(st.integers(0, len(frames) - 1))
    frames[place] = data.draw(mutated(frames[place]))
    the_same_comes_out_again(frames)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_header_with_anything_in_it_is_a_header_or_a_wire_error(kind: str, data: st.DataObject) -> None:
    fields = data.draw(grafted(ONE_OF_EACH[kind].model_dump(mode="json")))
    the_same_comes_out_again([kind.encode(), b"7", msgpack.packb(fields, strict_types=False)])


EPISODE = episode_of({"one": [1.0, 2.0], "two": [0.5]}, agent_metrics={"one": {"success": 1.0}})


@given(data=st.data())
def test_an_episode_with_anything_in_it_is_an_episode_or_a_wire_error(data: st.DataObject) -> None:
    header, arrays = encode_episode(EPISODE)
    given_arrays = {name: array for name, array in arrays.items() if array is not None}
    for _ in range(data.draw(st.integers(0, 2))):
        name = data.draw(st.sampled_from([*SAMPLE_ARRAYS, "routes"]))
        shape = data.draw(st.lists(st.integers(0, 20), max_size=4))
        given_arrays[name] = np.zeros(shape, data.draw(st.sampled_from(sorted(DTYPES))))
    plain = msgpack.unpackb(msgpack.packb(header))
    try:
        episode = decode_episode(data.draw(st.just(plain) | grafted(plain)), given_arrays)
    except WireError:
        return
    try:
        episode.verify()
    except IntegrityError:
        return
    assert episode_metrics([episode])
    assert repr(decode_episode(*encode_episode(episode))) == repr(episode)  # type: ignore[arg-type]


OUTCOME = Outcome("one", 0.5, {"rewards": {"all": 0.5}, "success": 1.0}, False)
HOP = Hop(
    [
        Move(
            {"one": {"role": "assistant", "content": "x"}},
            State([Request("one", [], {})], [OUTCOME]),
            [OUTCOME],
        )
    ],
    {"one": Opening("be good", [])},
    True,
    EnvError("it broke"),
)
TABLE_VALUES = [
    HOP,
    EPISODE,
    Script("teacher", "noisy", 3, 8),
    ["step", ["x", np.arange(3.0), {"a": [1, None, b"x"]}]],
]


@given(value=st.sampled_from(range(len(TABLE_VALUES))), data=st.data())
def test_what_an_environments_process_says_is_a_value_or_a_wire_error(
    value: int, data: st.DataObject
) -> None:
    packed = encode(TABLE_VALUES[value])
    decode(packed)
    try:
        decode(data.draw(mutated(packed)))
    except WireError:
        return


@given(code=st.integers(-128, 127), inner=anything)
def test_a_record_of_anything_is_a_value_or_a_wire_error(code: int, inner: Any) -> None:
    packed = msgpack.packb(inner, strict_types=False)
    head = b"\xc7" + bytes([len(packed) % 256]) + code.to_bytes(1, "big", signed=True)
    try:
        decode(head + packed)
    except WireError:
        return
