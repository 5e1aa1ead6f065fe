"""A trainer finds the routes of its batch on the disk, or says of which sample it does not."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from assembling import message_of
from builders import episode_of, sent, trajectory_of, within

from agentgym.batch import split
from agentgym.coordinator.assemble import Assembled
from agentgym.coordinator.store import FOLDER, EpisodeStore, Places, StoredGroup
from agentgym.episode import Episode
from agentgym.errors import IntegrityError
from agentgym.protocol import BatchHeader
from agentgym.routes import located, with_routes
from agentgym.wire import Arrays


def shifted(member: int) -> Episode:
    """An episode of two agents whose routes are its own."""
    made = [trajectory_of([float(member), 1.0], agent=agent) for agent in ("one", "two")]
    for number, trajectory in enumerate(made):
        assert trajectory.routes is not None
        trajectory.routes[:] = 10 * member + number
    return episode_of(trajectories=made, member=member)


def batch_in(folder: Path, *episodes: Episode) -> tuple[Assembled, BatchHeader, Arrays]:
    """Store the episodes of a group and return the step that trains on them, and its message."""

    async def stored() -> Places:
        places: asyncio.Future[Places] = asyncio.get_running_loop().create_future()
        store = EpisodeStore(folder, failed=pytest.fail)
        store.go_on(0)
        for lease, episode in enumerate(episodes):
            store.add(StoredGroup(0, 0, len(episodes)), sent(episode, lease), lambda: None)
        store.consume(1, [0], places.set_result)
        try:
            return await places
        finally:
            store.close()

    found, header, arrays = message_of(*episodes)
    return found, located(header, found.origins, folder / FOLDER, within(20, stored())), arrays


def test_the_routes_of_a_batch_are_read_where_its_episodes_lie(tmp_path: Path) -> None:
    found, header, arrays = batch_in(tmp_path, *(shifted(member) for member in range(3)))
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
