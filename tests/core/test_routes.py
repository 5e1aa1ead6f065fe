"""Routes that a worker leaves on the disk: they are there whole, or that is said."""

import contextlib
import resource
import signal
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from builders import sent, shifted
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import WireError
from agentgym.protocol import EpisodeDone
from agentgym.routes import decode_without_routes, read_episode, routes_file, write_routes
from agentgym.segments import Segments
from agentgym.wire import unpack


@given(data=st.binary(max_size=200), keep=st.integers(0, 300), at=st.integers(0, 200))
def test_whatever_lies_in_a_file_of_routes_is_an_episode_or_one_kind_of_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, keep: int, at: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    segments = Segments(folder)
    place = segments.append(sent(shifted(0), 4, apart=folder).frames)
    segments.close()
    file = Path(routes_file(folder, 4))
    whole = file.read_bytes()[:keep]
    file.write_bytes(whole[:at] + data + whole[at + len(data) :])
    with contextlib.suppress(WireError):
        episode = read_episode(folder, place)
        assert [t.routes.shape for t in episode.trajectories if t.routes is not None] == [(10, 2, 2)] * 2


def test_an_episode_whose_routes_are_not_where_they_should_be_is_refused(tmp_path: Path) -> None:
    packet = sent(shifted(0), 4, apart=tmp_path)
    message = packet.expect(EpisodeDone)
    episode = decode_without_routes(message, packet.arrays, tmp_path)
    episode.verify(routes=False)
    assert [(t.routes.shape, set(t.routes.flat)) for t in episode.trajectories if t.routes is not None] == [
        ((10, 1, 1), {255})
    ] * 2
    file = Path(routes_file(tmp_path, 4))
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WireError, match=rf"routes-000004 has {size - 1} bytes, its worker wrote {size}"):
        decode_without_routes(message, packet.arrays, tmp_path)
    file.unlink()
    with pytest.raises(WireError, match=rf"routes-000004 has 0 bytes, its worker wrote {size}"):
        decode_without_routes(message, packet.arrays, tmp_path)


@pytest.mark.parametrize("apart", [{"shape": [-20, -2, 2]}, {"shape": [80]}, {"dtype": "object"}])
def test_a_message_names_routes_as_they_may_be(tmp_path: Path, apart: dict[str, Any]) -> None:
    packet = sent(shifted(0), 4, apart=tmp_path)
    fields = packet.expect(EpisodeDone).model_dump()
    fields["apart"] |= apart
    frames = [b"episode", b"", msgpack.packb(fields)]
    with pytest.raises(
        WireError, match=f"the header of a 'episode' message is wrong at 'apart.{next(iter(apart))}"
    ):
        unpack(frames)


def test_routes_that_cannot_be_written_leave_nothing_behind(tmp_path: Path) -> None:
    write_routes(tmp_path, 4, np.zeros((3, 2, 2), np.uint8))
    with pytest.raises(FileExistsError):  # of a lease that an earlier process of the run had given out
        write_routes(tmp_path, 4, np.ones((3, 2, 2), np.uint8))
    assert not any(Path(routes_file(tmp_path, 4)).read_bytes())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(OSError, match="File too large"):
            write_routes(tmp_path, 5, np.zeros((300, 2, 2), np.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert [path.name for path in tmp_path.iterdir()] == ["routes-000004"]
