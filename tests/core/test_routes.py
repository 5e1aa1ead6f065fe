"""A trainer finds the routes of its batch on the disk, or says of which sample it does not."""

import asyncio
import contextlib
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
from assembling import message_of
from builders import episode_of, sent, trajectory_of, within
from hypothesis import given
from hypothesis import strategies as st

from agentgym.batch import split
from agentgym.coordinator.assemble import Assembled
from agentgym.coordinator.store import FOLDER, EpisodeStore, Places, StoredGroup
from agentgym.episode import Episode
from agentgym.errors import IntegrityError, WireError
from agentgym.protocol import BatchHeader, EpisodeDone
from agentgym.routes import (
    decode_without_routes,
    located,
    read_episode,
    routes_file,
    with_routes,
    write_routes,
)
from agentgym.segments import Segments
from agentgym.wire import Arrays


def shifted(member: int) -> Episode:
    """An episode of two agents whose routes are its own."""
    made = [trajectory_of([float(member), 1.0], agent=agent) for agent in ("one", "two")]
    for number, trajectory in enumerate(made):
        assert trajectory.routes is not None
        trajectory.routes[:] = 10 * member + number
    return episode_of(trajectories=made, member=member)


def batch_in(
    folder: Path, *episodes: Episode, apart: Path | None = None
) -> tuple[Assembled, BatchHeader, Arrays]:
    """Store the episodes of a group and return the step that trains on them, and its message."""

    async def stored() -> Places:
        places: asyncio.Future[Places] = asyncio.get_running_loop().create_future()
        store = EpisodeStore(folder, failed=pytest.fail)
        store.go_on(0)
        for lease, episode in enumerate(episodes):
            store.add(StoredGroup(0, 0, len(episodes)), sent(episode, lease, apart=apart), lambda: None)
        store.consume(1, [0], places.set_result)
        try:
            return await places
        finally:
            store.close()

    found, header, arrays = message_of(*episodes)
    return found, located(header, found.origins, folder / FOLDER, within(20, stored())), arrays


@pytest.mark.parametrize("apart", [None, FOLDER])
def test_the_routes_of_a_batch_are_read_where_its_episodes_lie(tmp_path: Path, apart: str | None) -> None:
    folder = None if apart is None else tmp_path / apart
    found, header, arrays = batch_in(tmp_path, *(shifted(member) for member in range(3)), apart=folder)
    assert len(list((tmp_path / FOLDER).glob("routes-*"))) == (0 if apart is None else 3)
    assert "routes" not in arrays
    complete = with_routes(header, arrays)
    samples = split(complete, header.lengths, header.checksums)
    assert len(samples) > 2
    for mine, theirs in zip(samples, found.samples, strict=True):
        mine.verify()
        assert np.array_equal(mine.routes, theirs.routes)  # type: ignore[arg-type]


def test_a_bit_of_the_routes_that_flips_before_the_trainer_has_them_is_found(tmp_path: Path) -> None:
    _, header, arrays = batch_in(tmp_path, *(shifted(member) for member in range(3)))
    (segment,) = (tmp_path / FOLDER).glob("segment-*")
    data = bytearray(segment.read_bytes())
    data[-5] ^= 4  # routes are the last array of the last message
    segment.write_bytes(data)
    samples = split(with_routes(header, arrays), header.lengths, header.checksums)
    *others, last = samples
    with pytest.raises(IntegrityError, match="a trajectory of 10 tokens has checksum 0x"):
        last.verify()
    for sample in others:
        sample.verify()


def test_a_bit_that_flips_in_a_file_of_routes_is_found(tmp_path: Path) -> None:
    _, header, arrays = batch_in(tmp_path, shifted(0), shifted(1), apart=tmp_path / FOLDER)
    file = routes_file(tmp_path / FOLDER, 1)
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)
    *_, last = split(with_routes(header, arrays), header.lengths, header.checksums)
    with pytest.raises(IntegrityError, match="a trajectory of 10 tokens has checksum 0x"):
        last.verify()
    file.write_bytes(bytes(data[10:]))
    with pytest.raises(
        IntegrityError, match=r"sample 1 of step 1 cannot be read: .*routes-000001 does not hold"
    ):
        with_routes(header, arrays)


@given(data=st.binary(max_size=200), keep=st.integers(0, 300), at=st.integers(0, 200))
def test_whatever_lies_in_a_file_of_routes_is_an_episode_or_one_kind_of_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, keep: int, at: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    segments = Segments(folder)
    place = segments.append(sent(shifted(0), 4, apart=folder).frames)
    segments.close()
    file = routes_file(folder, 4)
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
    file = routes_file(tmp_path, 4)
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WireError, match=rf"routes-000004 has {size - 1} bytes, its worker wrote {size}"):
        decode_without_routes(message, packet.arrays, tmp_path)
    file.unlink()
    with pytest.raises(WireError, match=rf"routes-000004 has 0 bytes, its worker wrote {size}"):
        decode_without_routes(message, packet.arrays, tmp_path)


def test_routes_that_cannot_be_written_leave_nothing_behind(tmp_path: Path) -> None:
    write_routes(tmp_path, 4, np.zeros((3, 2, 2), np.uint8))
    with pytest.raises(FileExistsError):  # of a lease that an earlier process of the run had given out
        write_routes(tmp_path, 4, np.ones((3, 2, 2), np.uint8))
    assert not any(routes_file(tmp_path, 4).read_bytes())
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


def test_an_episode_that_is_not_there_is_named(tmp_path: Path) -> None:
    _, header, arrays = batch_in(tmp_path, shifted(0), shifted(1))
    header = header.model_copy(update={"routes": [*header.routes[:1], (7, 0, 9, 0, 0), *header.routes[2:]]})
    with pytest.raises(
        IntegrityError, match=r"the episode of sample 1 of step 1 cannot be read: .*segment-000007"
    ):
        with_routes(header, arrays)


def test_routes_of_another_trajectory_do_not_fit(tmp_path: Path) -> None:
    _, header, arrays = batch_in(tmp_path, shifted(0), shifted(1))
    with pytest.raises(IntegrityError, match="sample 0 of step 1 has no routes of 9 tokens like the others"):
        with_routes(header.model_copy(update={"lengths": [9, *header.lengths[1:]]}), arrays)


def test_a_batch_of_a_dense_model_has_no_routes(tmp_path: Path) -> None:
    found, header, arrays = batch_in(
        tmp_path, *(episode_of([float(n)], routes=False, member=n) for n in (0, 1))
    )
    header = header.model_copy(update={"routes": []})
    assert "routes" not in with_routes(header, arrays)
    assert all(sample.routes is None for sample in found.samples)
