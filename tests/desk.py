"""A worker that runs as a task of a test, and the coordinator's end of its socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import toy_envs
from builders import config_of
from wire_peers import Office, open_context

from agentgym.episode import Episode
from agentgym.episode_codec import decode_episode
from agentgym.protocol import Ack, Drain, EpisodeDone, Ready
from agentgym.worker.process import Worker

TAUGHT = "toy_envs:Hello"
"""The teacher of a warm-up lease in an environment of `toy_envs`."""


class Desk:
    """A worker that runs as a task, and the office that it reports to."""

    def __init__(self, office: Office, task: asyncio.Task[None], context: Any) -> None:
        self.office, self.task, self.context = office, task, context
        self.worker = b""

    async def open(self, *more: Any) -> int:
        """Welcome the worker and return its credits."""
        self.worker = await self.office.welcome(*more)
        return (await self.office.next(Ready)).credits

    def send(self, *headers: Any) -> None:
        for header in headers:
            self.office.channel.send(header, to=self.worker)

    async def episode(self) -> tuple[int, Episode]:
        """Wait for an episode; return the lease's id too."""
        packet = await self.office.packet()
        done = packet.expect(EpisodeDone)
        self.send(Ack(lease_id=done.lease_id))
        return done.lease_id, decode_episode(done.episode, packet.arrays)

    async def episodes(self, count: int) -> dict[int, Episode]:
        """Wait for some episodes, in whatever order they come."""
        found: dict[int, Episode] = {}
        while len(found) < count:
            packet = await self.office.packet()
            done = packet.expect(EpisodeDone)
            assert done.lease_id not in found
            found[done.lease_id] = decode_episode(done.episode, packet.arrays)
        return found

    async def drain(self) -> None:
        self.send(Drain())
        await self.task


@asynccontextmanager
async def desk(
    folder: Path, model: Path, toy: str = "toy_envs:Counted", **sections: Any
) -> AsyncIterator[Desk]:
    sections.setdefault("workers", {"slots": 4})
    config = config_of(toy, model=str(model), **sections)
    with open_context() as context:
        office = Office(context, f"ipc://{folder}/coordinator")
        task = asyncio.create_task(Worker(config, name="worker-7", coordinator=office.address).run())
        try:
            yield Desk(office, task, context)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for env_left in toy_envs.stuck:
                env_left.close()
            office.channel.close()
