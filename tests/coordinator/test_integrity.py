"""A bit that flips anywhere between a worker and the trainer is found, and said of which trajectory or array."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from assembling import message_of
from builders import episode_of, sent, within
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_run import numbers_of, play, small_run
from wire_peers import play_well

from agentgym.batch import MADE_HERE, SAMPLE_ARRAYS, check_sums, concatenate, split
from agentgym.coordinator.store import FOLDER, EpisodeStore, StoredGroup, stored_episodes
from agentgym.episode import PER_TOKEN, Episode
from agentgym.episode_codec import decode_episode, encode_episode
from agentgym.errors import IntegrityError, RunError, WireError
from agentgym.origins import with_recorded
from agentgym.protocol import BatchHeader, BatchRequest, EpisodeDone, Lease

WORKERS_ARRAYS = ["tokens", "loss_mask", "logprobs", "versions", "routes"]
Arrays = dict[str, Any]


def flipped(array: Any, bit: int) -> Any:
    """The array with one bit changed."""
    data = bytearray(array.tobytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    return np.frombuffer(bytes(data), array.dtype).reshape(array.shape)


bits = st.integers(0, 2**12)


@given(name=st.sampled_from(WORKERS_ARRAYS), bit=bits)
def test_any_bit_of_an_episode_on_the_wire_is_found(name: str, bit: int) -> None:
    episode = episode_of({"one": [1.0, 2.0], "two": [0.5]}, group=4, member=2)
    header, arrays = encode_episode(episode)
    decode_episode(header, arrays).verify()  # type: ignore[arg-type]
    arrays[name] = flipped(arrays[name], bit)
    with pytest.raises((WireError, IntegrityError), match=r"agent '(one|two)'.* of group 4|loss mask"):
        decode_episode(header, arrays).verify()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PER_TOKEN)
def test_an_episode_that_was_changed_is_counted_and_played_again(tmp_path: Path, name: str) -> None:
    async def scene() -> None:
        async with play(small_run(run={"steps": 1}), tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            spoiled: list[Lease] = []

            def spoil(lease: Lease) -> Episode:
                episode = play_well(lease)
                if not spoiled:
                    spoiled.append(lease)
                    fields, arrays = encode_episode(episode)
                    arrays[name] = flipped(arrays[name], 3)
                    worker.send(EpisodeDone(lease_id=lease.lease_id, episode=fields), arrays)
                return episode

            cast.start(worker.work(play=spoil), server.serve(), trainer.train(cast.run.places.exchange))
            await cast.everyone_is_done()
            tries = [(lease.group_id, lease.member) for lease in worker.played]
            assert tries.count((spoiled[0].group_id, spoiled[0].member)) == 2
            assert worker.cancelled == [spoiled[0].lease_id]
            (batch,) = trainer.batches
            assert len(batch.lengths) == 4
            numbers = numbers_of(cast.run)
            assert numbers["system/wire/dropped"] == numbers["system/wire/damaged"] == 1

    within(30, scene())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(bit=st.integers(0, 2**20))
def test_any_bit_of_an_episode_on_the_disk_is_found(
    tmp_path_factory: pytest.TempPathFactory, bit: int
) -> None:
    run = tmp_path_factory.mktemp("run")

    async def fill() -> None:
        done = asyncio.Event()
        store = EpisodeStore(run, failed=lambda error: pytest.fail(str(error)))
        store.go_on(0)
        store.add(StoredGroup(3, 7, 1), sent(episode_of([1.0], group=3)), done.set)
        await done.wait()
        store.close()

    within(30, fill())
    assert len(list(stored_episodes(run))) == 1
    (segment,) = (run / FOLDER).glob("segment-*")
    data = np.frombuffer(segment.read_bytes(), np.uint8)
    segment.write_bytes(flipped(data, bit % (8 * len(data))).tobytes())
    with pytest.raises(RunError, match=r"is damaged: (segment 1|trajectory 0|an episode message)"):
        list(stored_episodes(run))


@given(name=st.sampled_from([*SAMPLE_ARRAYS, "routes"]), bit=bits)
def test_any_bit_of_a_batch_is_found_at_the_trainers_door(name: str, bit: int) -> None:
    plays = [episode_of([float(n)], member=n) for n in range(2)]
    assembled, header, made = message_of(*plays)
    arrays = {**concatenate(assembled.samples), **made}

    def look(found: Arrays) -> None:
        check_sums(found, header.sums)
        for sample in split(found, header.lengths, header.checksums):
            sample.verify()

    look(dict(arrays))
    named = f"^{name} of a batch are not" if name in MADE_HERE else "a trajectory of 5 tokens has checksum"
    with pytest.raises(IntegrityError, match=named):
        look({**arrays, name: flipped(arrays[name], bit)})


def test_routes_that_were_changed_on_the_way_to_the_disk_are_found_by_the_trainer_and_played_again(
    tmp_path: Path,
) -> None:
    config = small_run(run={"steps": 1})
    spoiled: list[tuple[int, int]] = []

    async def found() -> None:
        async with play(config, tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()

            def spoil(lease: Lease) -> Episode:
                episode = play_well(lease)
                if not spoiled:
                    spoiled.append((lease.group_id, lease.member))
                    fields, arrays = encode_episode(episode)
                    arrays["routes"] = flipped(arrays["routes"], 3)
                    worker.send(EpisodeDone(lease_id=lease.lease_id, episode=fields), arrays)
                return episode  # late, the first time

            cast.start(worker.work(play=spoil), server.serve())
            await trainer.hello("trainer", "trainer")
            trainer.send(BatchRequest(step=1))
            while not isinstance((packet := await trainer.packet()).header, BatchHeader):
                pass
            header = packet.expect(BatchHeader)
            samples = split(with_recorded(header, packet.arrays), header.lengths, header.checksums)
            damaged = []
            for sample in samples:
                try:
                    sample.verify()
                except IntegrityError as error:
                    damaged.append(str(error))
            assert (len(samples), len(damaged)) == (4, 1)
            assert "a trajectory of 5 tokens has checksum" in damaged[0]

    async def played_again() -> None:
        async with play(config, tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            cast.start(worker.work(), server.serve(), trainer.train(cast.run.places.exchange))
            await cast.everyone_is_done()
            assert [(lease.group_id, lease.member) for lease in worker.played] == spoiled
            assert [len(batch.lengths) for batch in trainer.batches] == [4]

    within(30, found())
    within(30, played_again())
