"""Episodes on disk: acknowledged after they are there, consumed once, found again after any death."""

import asyncio
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import store_writer
from builders import episode_of, sent
from stores import consume, put, rows, with_store

from agentgym.coordinator.ledger import LEDGER
from agentgym.coordinator.store import FOLDER, EpisodeStore, StoredGroup, stored_episodes
from agentgym.errors import RunError


def test_an_episode_is_on_the_disk_when_it_is_acknowledged_and_comes_back_as_it_was(tmp_path: Path) -> None:
    async def scene(store: EpisodeStore) -> None:
        assert store.go_on(0) == []
        episode = await put(store, 7, group=3, member=1)
        (stored,) = stored_episodes(tmp_path)  # by another reader, as any process would
        assert (stored.lease_id, stored.step) == (7, None)
        assert stored.episode.checksums == episode.checksums
        assert (stored.episode.group_id, stored.episode.member) == (3, 1)
        for name in ("tokens", "loss_mask", "logprobs", "versions", "routes"):
            mine, theirs = (getattr(e.trajectories[0], name) for e in (episode, stored.episode))
            np.testing.assert_array_equal(mine, theirs)
        assert stored.episode.trajectories[0].turns == episode.trajectories[0].turns
        assert store.bytes_used > 0

    with_store(tmp_path, scene)


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    async def scene(store: EpisodeStore) -> None:
        store.go_on(0)
        await put(store, 1, group=0)
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
        files = (LEDGER, f"{LEDGER}-wal", f"{LEDGER}-shm", "segment-000001")
        assert modes == {FOLDER: 0o700, **dict.fromkeys(files, 0o600)}

    os.umask(0o022)
    with_store(tmp_path, scene)


def test_after_a_crash_undone_steps_come_first_then_complete_groups_then_the_others(tmp_path: Path) -> None:
    async def before(store: EpisodeStore) -> None:
        store.go_on(0)
        for lease, (group, member) in enumerate(
            [(0, 0), (1, 0), (2, 0), (0, 1), (5, 0), (2, 1), (4, 0), (3, 0), (3, 1)]
        ):
            await put(store, lease, group, member)
        await consume(store, 1, 0)
        await consume(store, 2, 2, 5)  # 5 went on without its second member
        await consume(store, 3, 1)

    async def after(store: EpisodeStore) -> None:
        assert store.next_lease() == 9
        assert store.go_on(1) == [
            StoredGroup(2, 102, 2, complete=True),
            StoredGroup(5, 105, 2, complete=True),
            StoredGroup(1, 101, 2, complete=True),
            StoredGroup(3, 103, 2, complete=True),
            StoredGroup(4, 104, 2),
        ]
        assert {member: e.reward("agent") for member, e in store.members(2).items()} == {0: 3.0, 1: 6.0}
        await consume(store, 2, 2, 5)

    async def again(store: EpisodeStore) -> None:
        assert [group.group_id for group in store.go_on(2)] == [1, 3, 4]

    with_store(tmp_path, before)
    with_store(tmp_path, after)
    with_store(tmp_path, again)
    assert [(stored.lease_id, stored.step) for stored in stored_episodes(tmp_path)] == [
        (0, 1), (1, None), (2, 2), (3, 1), (4, 2), (5, 2), (6, None), (7, None), (8, None),
    ]  # fmt: skip


def test_episodes_that_were_damaged_on_the_disk_are_played_again(tmp_path: Path) -> None:
    async def before(store: EpisodeStore) -> None:
        store.go_on(0)
        for lease, (group, member) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]):
            await put(store, lease, group, member)
        await consume(store, 1, 0)
        await consume(store, 2, 1, 2)

    async def after(store: EpisodeStore) -> None:
        assert store.go_on(1) == [StoredGroup(2, 102, 2, complete=True), StoredGroup(1, 101, 2)]
        assert list(store.members(1)) == [0]
        await put(store, 6, 1, 1)

    async def again(store: EpisodeStore) -> None:
        assert [group.group_id for group in store.go_on(1)] == [2, 1]
        assert sorted(store.members(1)) == [0, 1]

    with_store(tmp_path, before)
    ((offset, length),) = rows(
        tmp_path, "SELECT offset, length FROM episodes WHERE group_id = 1 AND member = 1"
    )
    segment = tmp_path / FOLDER / "segment-000001"
    data = bytearray(segment.read_bytes())
    data[offset + length - 1] ^= 1  # of its routes
    segment.write_bytes(data)
    with_store(tmp_path, after)
    with_store(tmp_path, again)


def test_the_order_survives_a_crash_in_the_middle_of_doing_steps_again(tmp_path: Path) -> None:
    async def before(store: EpisodeStore) -> None:
        store.go_on(0)
        for group in (3, 1, 2, 0):
            await put(store, group, group)
            await put(store, 10 + group, group, member=1)
        await consume(store, 1, 2, 3)
        await consume(store, 2, 0, 1)

    async def again(store: EpisodeStore) -> None:
        assert [group.group_id for group in store.go_on(0)] == [2, 3, 0, 1]
        await consume(store, 1, 2, 3)

    with_store(tmp_path, before)
    for _ in range(3):
        with_store(tmp_path, again)


def test_an_episode_is_stored_once_and_what_fails_is_told(tmp_path: Path) -> None:
    failures: list[RunError] = []

    async def scene(store: EpisodeStore) -> None:
        store.go_on(0)
        await put(store, 1, group=0)
        store.add(StoredGroup(0, 1, 2), sent(episode_of(member=1)), pytest.fail)
        while not failures:
            await asyncio.sleep(0.01)

    with_store(tmp_path, scene, failures.append)
    assert "is damaged: UNIQUE constraint failed: episodes.lease_id" in str(failures[0])
    assert rows(tmp_path, "SELECT count(*) FROM episodes") == [(1,)]


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    async def scene(store: EpisodeStore) -> None:
        with pytest.raises(
            RunError, match=r"another process writes into .*episodes; is the run still going on"
        ):
            EpisodeStore(tmp_path, failed=pytest.fail)
        store.go_on(0)
        await put(store, 1, group=0)

    async def later(store: EpisodeStore) -> None:
        assert store.go_on(0) == [StoredGroup(0, 100, 2)]

    with_store(tmp_path, scene)
    with_store(tmp_path, later)


def filled(run: Path) -> Path:
    """A store with three episodes, closed; returns its folder."""

    async def scene(store: EpisodeStore) -> None:
        store.go_on(0)
        for lease in range(3):
            await put(store, lease, group=lease)

    with_store(run, scene)
    return run / FOLDER


def not_a_database(folder: Path) -> None:
    (folder / LEDGER).write_bytes(b"these are no episodes " * 100)


def torn(folder: Path) -> None:
    os.truncate(folder / LEDGER, 6000)


def of_the_future(folder: Path) -> None:
    connection = sqlite3.connect(folder / LEDGER)
    connection.execute("PRAGMA user_version = 99")
    connection.close()


def cut_short(folder: Path) -> None:
    segment = folder / "segment-000001"
    os.truncate(segment, segment.stat().st_size - 1)


def gone(folder: Path) -> None:
    (folder / "segment-000001").unlink()


def flipped(text: bytes) -> Callable[[Path], None]:
    def flip(folder: Path) -> None:
        segment = folder / "segment-000001"
        data = bytearray(segment.read_bytes())
        data[data.index(text)] ^= 1
        segment.write_bytes(data)

    return flip


TOKENS = np.arange(10, dtype=np.int32).tobytes()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (not_a_database, "is damaged: file is not a database; bring a copy back, or move it away"),
        (torn, "is damaged: database disk image is malformed"),
        (of_the_future, "has format 99; this version of agentgym reads 4"),
        (cut_short, r"is damaged: segment 1 does not hold a whole message at \d+"),
        (gone, "cannot be read or written: .*No such file or directory: .*segment-000001"),
        (flipped(TOKENS), r"is damaged: trajectory 0 \(agent .* of member 0 of group 0 has checksum"),
        (flipped(b"task_index"), "is damaged: segment 1 does not hold a whole message at 0"),
    ],
)
def test_a_spoiled_file_is_one_clear_error(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(filled(tmp_path))
    with pytest.raises(RunError, match=message) as caught:
        list(stored_episodes(tmp_path))
    assert str(tmp_path / FOLDER) in str(caught.value)


def writer(folder: Path, step: int, **settings: Any) -> subprocess.Popen[str]:
    command = [sys.executable, store_writer.__file__, str(folder), str(step)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **settings)


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    def few_bytes() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))

    with writer(tmp_path, 0, preexec_fn=few_bytes) as process:
        output, _ = process.communicate(timeout=60)
    last = output.splitlines()[-1]
    assert last.startswith(f"failed {tmp_path / FOLDER} cannot be read or written: ")
    assert process.returncode == 1
    acknowledged = {int(line.split()[1]) for line in output.splitlines() if line.startswith("lease")}
    kept = {stored.lease_id for stored in stored_episodes(tmp_path)}
    assert {
        lease for lease in acknowledged if lease >= min(kept)
    } <= kept  # the writer forgets the first ones


@pytest.mark.timeout(180)
def test_after_any_kill_every_acknowledged_episode_is_there_and_consumed_at_most_once(tmp_path: Path) -> None:
    rng = random.Random(5)
    step, acknowledged = 0, set[int]()
    for _ in range(5):
        begun, enough = step, rng.randint(1, 40)
        with writer(tmp_path, step) as process:
            assert process.stdout is not None
            for count, line in enumerate(process.stdout):  # to the end: what it said before it died counts
                word, number = line.split()
                if word == "lease":
                    acknowledged.add(int(number))
                else:
                    step = int(number)
                if count == enough:
                    process.kill()
        assert process.returncode == -signal.SIGKILL
        stored = list(stored_episodes(tmp_path))
        kept = [episode.lease_id for episode in stored]
        assert len(kept) == len(set(kept))
        # What is gone was consumed by a step that no later one goes back behind.
        forgotten = acknowledged - set(kept)
        needed = [episode.lease_id for episode in stored if episode.step is None or episode.step > step - 2]
        assert max(forgotten, default=-1) < min(needed)
        # The mark of one more step may be there: the process died before it said so, and nothing was sent.
        taken = rows(
            tmp_path, "SELECT group_id, step FROM groups WHERE step IS NOT NULL ORDER BY step, place"
        )
        assert max((step for _, step in taken), default=0) in (step, step + 1)
        assert all(count == store_writer.GROUPS for count in Counter(step for _, step in taken).values())
        assert [group for group, _ in taken] == sorted(group for group, _ in taken)
        step = rng.randint(
            max(begun, step - 2), step
        )  # where the checkpoint is that the next one goes on from
