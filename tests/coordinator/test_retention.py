"""What a store removes from the disk, and when."""

import asyncio
from pathlib import Path

from builders import episode_of, sent
from stores import consume, put, rows, with_store

from agentgym.coordinator.store import FOLDER, EpisodeStore, StoredGroup
from agentgym.routes import routes_file


def test_what_was_consumed_before_a_checkpoint_is_forgotten_but_for_the_latest(tmp_path: Path) -> None:
    async def scene(store: EpisodeStore) -> None:
        store.go_on(0)
        for group in range(6):
            for member in (0, 1):
                await put(store, 2 * group + member, group, member)
        for step in range(1, 5):
            await consume(store, step, step)
        store.forget(3, keep=3, oldest_lease=12)
        store.drop([0])
        await put(store, 99, group=9)

    with_store(tmp_path, scene)
    # Groups 1 to 3 are of steps with a checkpoint; a group is kept whole or not at all. 0 was dropped.
    assert [group for (group,) in rows(tmp_path, "SELECT group_id FROM groups ORDER BY 1")] == [3, 4, 5, 9]
    assert rows(tmp_path, "SELECT count(*) FROM episodes") == [(7,)]


def test_a_segment_goes_when_nobody_needs_any_of_its_episodes(tmp_path: Path) -> None:
    def names() -> list[str]:
        return sorted(path.name for path in (tmp_path / FOLDER).glob("segment-*"))

    async def first(store: EpisodeStore) -> None:
        store.go_on(0)
        await put(store, 1, group=1)
        await put(store, 2, group=2)

    async def second(store: EpisodeStore) -> None:
        store.go_on(0)
        await put(store, 3, group=3)
        before = store.bytes_used
        assert names() == ["segment-000001", "segment-000002"]  # each process writes a file of its own
        store.drop([1])
        await put(store, 4, group=3, member=1)
        assert names() == ["segment-000001", "segment-000002"]
        store.drop([2])
        await put(store, 5, group=4)
        assert names() == ["segment-000002"]
        assert store.bytes_used < before + before / 3

    with_store(tmp_path, first)
    with_store(tmp_path, second)


def test_files_of_routes_go_when_neither_an_episode_nor_a_lease_needs_them(tmp_path: Path) -> None:
    def names() -> list[int]:
        return sorted(int(path.name[7:]) for path in (tmp_path / FOLDER).glob("routes-*"))

    async def leave(store: EpisodeStore, lease: int, group: int) -> None:
        done = asyncio.Event()
        packet = sent(episode_of([1.0], group=group), lease, apart=store.folder)
        store.add(StoredGroup(group, group, 1), packet, done.set)
        await done.wait()

    async def first(store: EpisodeStore) -> None:
        store.go_on(0)
        for lease in range(1, 6):
            await leave(store, lease, group=lease)
        for lease in (6, 7):  # their workers die before they have sent the episodes
            sent(episode_of([1.0]), lease, apart=store.folder)
        assert store.bytes_used > 5 * Path(routes_file(store.folder, 1)).stat().st_size
        await consume(store, 1, 1, 2)
        store.drop([3])
        await consume(store, 2, 4)
        assert names() == [1, 2, 3, 4, 5, 6, 7]
        store.forget(1, keep=1, oldest_lease=7)
        await leave(store, 8, group=8)
        assert names() == [2, 4, 5, 7, 8]
        assert store._routes.bytes_used == 4 * Path(routes_file(store.folder, 2)).stat().st_size

    async def second(store: EpisodeStore) -> None:
        store.go_on(1)
        assert names() == [2, 4, 5, 8]
        assert store._routes.bytes_used == 4 * Path(routes_file(store.folder, 2)).stat().st_size
        (member,) = store.members(5).values()
        member.verify(routes=False)

    async def third(store: EpisodeStore) -> None:
        Path(routes_file(store.folder, 5)).unlink()
        assert [group.group_id for group in store.go_on(1)] == [4, 8]  # 5 is played again

    for scene in (first, second, third):
        with_store(tmp_path, scene)
