"""Small stand-ins for the processes of a run, which speak the real protocol over real sockets."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import zmq
from builders import episode_of
from numpy.typing import NDArray

from agentgym import wire
from agentgym.episode import Episode
from agentgym.episode_codec import encode_episode
from agentgym.errors import WireError
from agentgym.keys import Keys
from agentgym.protocol import (
    Ack,
    BatchHeader,
    BatchRequest,
    Cancel,
    Drain,
    EpisodeDone,
    Error,
    Header,
    Health,
    Heartbeat,
    Hello,
    Lease,
    Loaded,
    LoadWeights,
    Ready,
    Role,
    StepDone,
    Welcome,
)
from agentgym.weights import weights_file
from agentgym.wire import PROTOCOL_VERSION, Channel, Packet, open_socket

H = TypeVar("H", bound=Header)


class Peer:
    """A DEALER socket; what it receives waits in `inbox`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.inbox: asyncio.Queue[Packet] = asyncio.Queue()
        self.raw = open_socket(context, zmq.DEALER)
        self.raw.connect(address)
        self.channel = Channel(self.raw, self.inbox.put_nowait, refuse)

    def send(self, header: Header, arrays: Mapping[str, NDArray[Any] | None] | None = None) -> None:
        self.channel.send(header, arrays)

    async def next(self, record: type[H]) -> H:
        """Return the next message, which must be of this kind; heartbeats are passed over."""
        return (await self.packet()).expect(record)

    async def packet(self) -> Packet:
        while True:
            packet = await self.inbox.get()
            if not isinstance(packet.header, Heartbeat):
                return packet

    async def hello(self, role: Role, name: str, **fields: Any) -> None:
        if role != "worker":
            fields = {"policy": "learner", **fields}
        self.send(Hello(role=role, name=name, protocol=PROTOCOL_VERSION, pid=1, **fields))
        await self.next(Welcome)

    async def beat(self, seconds: float) -> None:
        """Give signs of life until cancelled."""
        while True:
            self.send(Heartbeat(stats={"busy": 0.5}))
            await asyncio.sleep(seconds)

    async def probe(self) -> list[Header]:
        """Return what arrived before the second answer to a message that is not for the coordinator.

        After the first one the coordinator does what follows from all that came until then.
        """
        before: list[Header] = []
        for _ in range(2):
            self.send(Health())
            while not isinstance(header := (await self.packet()).header, Error):
                before.append(header)
        return before

    def close(self) -> None:
        self.channel.close()


class FakeWorker(Peer):
    """Answers every lease with an episode."""

    played: list[Lease]
    acknowledged: int
    cancelled: list[int]

    async def work(
        self,
        name: str = "worker-0",
        *,
        credits: int = 8,
        play: Callable[[Lease], Episode] | None = None,
    ) -> None:
        """Play until drained."""
        play = play or play_well
        self.played, self.acknowledged, self.cancelled = [], 0, []
        await self.hello("worker", name)
        self.send(Ready(credits=credits))
        while not isinstance(header := (await self.packet()).header, Drain):
            if isinstance(header, Ack):
                self.acknowledged += 1
            if isinstance(header, Cancel):
                self.cancelled.append(header.lease_id)
            if isinstance(header, Lease):
                self.played.append(header)
                self.answer(header, play(header))

    def answer(self, lease: Lease, episode: Episode) -> None:
        fields, arrays = encode_episode(episode)
        self.send(EpisodeDone(lease_id=lease.lease_id, episode=fields), arrays)


class FakeServer(Peer):
    """Loads every version that it is told to load, when `may_load` is set."""

    version = 0
    loaded: list[LoadWeights]

    async def serve(
        self,
        name: str = "server-0",
        *,
        policy: str = "learner",
        address: str = "",
        may_load: asyncio.Event | None = None,
    ) -> None:
        """Serve until drained."""
        self.loaded = []
        await self.hello("server", name, policy=policy, address=address or f"ipc://{name}", max_model_len=64)
        while not isinstance(header := (await self.packet()).header, Drain):
            if isinstance(header, LoadWeights):
                if may_load is not None:
                    await may_load.wait()
                self.loaded.append(header)
                self.version = header.version
                self.send(Loaded(version=header.version, seconds=0.01))


class FakeTrainer(Peer):
    """Takes every batch, and writes an empty weights file where it is asked to publish."""

    batches: list[BatchHeader]

    async def train(
        self,
        exchange: Path,
        *,
        first_step: int = 1,
        weights: str = "",
        name: str = "trainer",
        policy: str = "learner",
        may_finish: asyncio.Event | None = None,
    ) -> None:
        """Train until drained."""
        self.batches = []
        await self.hello("trainer", name, policy=policy, version=first_step - 1, weights=weights)
        self.send(BatchRequest(step=first_step))
        while not isinstance(header := (await self.packet()).header, Drain):
            if isinstance(header, BatchHeader):
                self.batches.append(header)
                if may_finish is not None:
                    await may_finish.wait()
                self.done(header, exchange)
                self.send(BatchRequest(step=header.step + 1))

    def done(self, batch: BatchHeader, exchange: Path) -> None:
        path = weights_file(exchange, batch.step)
        if batch.publish:
            path.touch()
        weights = str(path) if batch.publish else ""
        self.send(
            StepDone(
                step=batch.step,
                metrics={"loss": 0.5, "seconds": 0.1},
                weights=weights,
                checkpoint="there" * batch.checkpoint,
            )
        )


def play_well(lease: Lease, version: int = 0) -> Episode:
    """Members of a group get different rewards; warm-up leases are played by a teacher."""
    sampled = not lease.teacher
    return episode_of(
        [float(lease.member)],
        group=lease.group_id,
        member=lease.member,
        task_index=lease.task_index,
        versions=version if sampled else -1,
        routes=sampled,
    )


@contextlib.contextmanager
def open_context(keys: Keys | None = None) -> Iterator[wire.Context]:
    """A context that is gone after the block, whatever still waits in its sockets."""
    context = wire.open_context(keys)
    try:
        yield context
    finally:
        context.destroy(linger=0)


class Office:
    """A ROUTER socket, as the coordinator or a policy server has one; what it receives waits in `inbox`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.address = address
        self.inbox: asyncio.Queue[Packet] = asyncio.Queue()
        self.raw = open_socket(context, zmq.ROUTER)
        self.raw.bind(address)
        self.channel = Channel(self.raw, self.inbox.put_nowait, refuse)
        self.heartbeats = 0

    async def packet(self) -> Packet:
        """Return the next message; heartbeats are counted and passed over."""
        while isinstance((packet := await self.inbox.get()).header, Heartbeat):
            self.heartbeats += 1
        return packet

    async def next(self, record: type[H]) -> H:
        return (await self.packet()).expect(record)

    async def welcome(self, *more: Header) -> bytes:
        """Let a worker in, send it some messages and return its identity."""
        packet = await self.packet()
        packet.expect(Hello)
        for header in (Welcome(), *more):
            self.channel.send(header, to=packet.sender)
        return packet.sender


def refuse(_sender: bytes, error: WireError) -> None:
    raise AssertionError(f"the other side sent garbage: {error}")
