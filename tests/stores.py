"""A store of episodes for a test."""

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from builders import episode_of, sent, within

from agentgym.coordinator.ledger import LEDGER
from agentgym.coordinator.store import FOLDER, EpisodeStore, StoredGroup
from agentgym.episode import Episode
from agentgym.errors import RunError

Scene = Callable[[EpisodeStore], Coroutine[Any, Any, Any]]


def with_store(folder: Path, scene: Scene, failed: Callable[[RunError], None] | None = None) -> Any:
    """Open the store on an event loop, play the scene, close it."""

    async def play() -> Any:
        store = EpisodeStore(folder, failed=failed or pytest.fail)
        try:
            return await scene(store)
        finally:
            store.close()

    return within(30, play())


async def put(store: EpisodeStore, lease: int, group: int, member: int = 0, size: int = 2) -> Episode:
    """Store an episode and wait until it is acknowledged."""
    episode = episode_of([float(lease), 1.0], group=group, member=member, task_index=group + 100)
    acknowledged = asyncio.Event()
    store.add(StoredGroup(group, group + 100, size), sent(episode, lease), acknowledged.set)
    await acknowledged.wait()
    return episode


async def consume(store: EpisodeStore, step: int, *groups: int) -> None:
    done = asyncio.Event()
    store.consume(step, groups, lambda places: done.set())
    await done.wait()


def rows(folder: Path, query: str) -> list[Any]:
    connection = sqlite3.connect(folder / FOLDER / LEDGER)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()
