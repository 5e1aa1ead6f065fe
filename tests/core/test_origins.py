"""A trainer finds what was recorded of its batch on the disk, or says of which sample it does not."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from assembling import message_of
from builders import episode_of, sent, shifted, within

from agentgym import origins
from agentgym.batch import MADE_HERE, RECORDED, split
from agentgym.coordinator.assemble import Assembled
from agentgym.coordinator.store import FOLDER, EpisodeStore, Places, StoredGroup
from agentgym.episode import Episode
from agentgym.errors import IntegrityError
from agentgym.origins import located, with_recorded
from agentgym.protocol import BatchHeader
from agentgym.routes import read_episode, routes_file
from agentgym.segments import Place
from agentgym.wire import Arrays


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
def test_what_was_recorded_of_a_batch_is_read_where_its_episodes_lie(
    tmp_path: Path, apart: str | None
) -> None:
    folder = None if apart is None else tmp_path / apart
    found, header, arrays = batch_in(tmp_path, *(shifted(member) for member in range(3)), apart=folder)
    assert len(list((tmp_path / FOLDER).glob("routes-*"))) == (0 if apart is None else 3)
    assert arrays.keys() == set(MADE_HERE)
    complete = with_recorded(header, arrays)
    samples = split(complete, header.lengths, header.checksums)
    assert len(samples) > 2
    for mine, theirs in zip(samples, found.samples, strict=True):
        mine.verify()
        for name in (*MADE_HERE, *RECORDED, "routes"):
            assert np.array_equal(getattr(mine, name), getattr(theirs, name))


def test_a_bit_of_the_routes_that_flips_before_the_trainer_has_them_is_found(tmp_path: Path) -> None:
    _, header, arrays = batch_in(tmp_path, *(shifted(member) for member in range(3)))
    (segment,) = (tmp_path / FOLDER).glob("segment-*")
    data = bytearray(segment.read_bytes())
    data[-5] ^= 4  # routes are the last array of the last message
    segment.write_bytes(data)
    samples = split(with_recorded(header, arrays), header.lengths, header.checksums)
    *others, last = samples
    with pytest.raises(IntegrityError, match="a trajectory of 10 tokens has checksum 0x"):
        last.verify()
    for sample in others:
        sample.verify()


def test_a_bit_that_flips_in_a_file_of_routes_is_found(tmp_path: Path) -> None:
    _, header, arrays = batch_in(tmp_path, shifted(0), shifted(1), apart=tmp_path / FOLDER)
    file = Path(routes_file(tmp_path / FOLDER, 1))
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)
    *_, last = split(with_recorded(header, arrays), header.lengths, header.checksums)
    with pytest.raises(IntegrityError, match="a trajectory of 10 tokens has checksum 0x"):
        last.verify()
    file.write_bytes(bytes(data[10:]))
    with pytest.raises(
        IntegrityError, match=r"sample 1 of step 1 cannot be read: .*routes-000001 does not hold"
    ):
        with_recorded(header, arrays)


def test_an_episode_of_which_several_trajectories_are_trained_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, header, arrays = batch_in(tmp_path, *(shifted(member) for member in range(3)))
    assert [origin.member for origin in found.origins] == [0, 2, 0, 2], "one agent after the other"
    read: list[Place] = []

    def read_and_note(folder: Path, place: Place) -> Episode:
        read.append(place)
        return read_episode(folder, place)

    monkeypatch.setattr(origins, "read_episode", read_and_note)
    samples = split(with_recorded(header, arrays), header.lengths, header.checksums)
    assert len(read) == len(set(read)) == 2
    for mine, theirs in zip(samples, found.samples, strict=True):
        mine.verify()
        assert np.array_equal(mine.tokens, theirs.tokens)


def test_a_batch_that_says_of_a_sample_only_how_long_it_is_is_refused(tmp_path: Path) -> None:
    _, header, arrays = batch_in(tmp_path, shifted(0), shifted(1))
    header = header.model_copy(update={"recorded": header.recorded[:1]})
    with pytest.raises(IntegrityError, match="says where 1 samples lie and how long 4 are"):
        with_recorded(header, arrays)


def test_an_episode_that_is_not_there_is_named(tmp_path: Path) -> None:
    _, header, arrays = batch_in(tmp_path, shifted(0), shifted(1))
    header = header.model_copy(
        update={"recorded": [*header.recorded[:1], (7, 0, 9, 0, 0), *header.recorded[2:]]}
    )
    with pytest.raises(
        IntegrityError, match=r"the episode of sample 1 of step 1 cannot be read: .*segment-000007"
    ):
        with_recorded(header, arrays)


def test_another_trajectory_does_not_fit(tmp_path: Path) -> None:
    _, header, arrays = batch_in(tmp_path, shifted(0), shifted(1))
    with pytest.raises(IntegrityError, match="sample 0 of step 1 has 9 tokens, where its worker recorded 10"):
        with_recorded(header.model_copy(update={"lengths": [9, *header.lengths[1:]]}), arrays)


def test_samples_with_and_without_routes_do_not_go_together(tmp_path: Path) -> None:
    for number, (first, second) in enumerate(((True, False), (False, True))):
        episodes = (episode_of([0.0], routes=first), episode_of([1.0], routes=second, member=1))
        run = tmp_path / str(number)
        run.mkdir()
        _, header, arrays = batch_in(run, *episodes)
        with pytest.raises(
            IntegrityError, match="sample 1 of step 1 has not the routes that the others have"
        ):
            with_recorded(header, arrays)


def test_a_batch_of_a_dense_model_has_no_routes(tmp_path: Path) -> None:
    episodes = (episode_of([float(n)], routes=False, member=n) for n in (0, 1))
    _, header, arrays = batch_in(tmp_path, *episodes)
    complete = with_recorded(header, arrays)
    assert complete.keys() == {*MADE_HERE, *RECORDED}
    for sample in split(complete, header.lengths, header.checksums):
        sample.verify()
