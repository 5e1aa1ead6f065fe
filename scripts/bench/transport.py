"""How fast episodes cross our wire, against raw pyzmq PUSH/PULL with the same bytes.

    .venv/bin/python scripts/bench/transport.py [--kilobytes 800] [--episodes 1000] [--rounds 3]

`raw`: the frames of one episode, packed beforehand, from a PUSH socket into a PULL socket, never looked at. `wire`:
messages through a `Channel`, packed, unpacked and validated. `episodes`: encoded and decoded too, made with their
checksums, which are compared. Sender and receiver are processes of their own over ipc; at most 64 episodes are on their
way. The three alternate, and the best round of each counts.
"""

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

import zmq
from durable import LAYERS, episode_of, trajectory_of

from agentgym.episode_codec import decode_episode, encode_episode
from agentgym.protocol import EpisodeDone, Lease, Ready
from agentgym.wire import Channel, Packet, open_socket, pack

WINDOW = 64


def lease_of(number: int) -> Lease:
    """Return a lease that nothing depends on."""
    return Lease(
        lease_id=number, task_index=number, seed=number, group_id=number, member=0, sampling_seed=number,
        policies={"*": "learner"},
    )  # fmt: skip


def push(address: str, episodes: int, kilobytes: int) -> None:
    """Send the frames of one episode again and again."""
    fields, arrays = encode_episode(episode_of(lease_of(0), trajectory_of(kilobytes, LAYERS), 0))
    frames = pack(EpisodeDone(lease_id=0, episode=fields), arrays)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.set_hwm(WINDOW)
        socket.connect(address)
        for _ in range(episodes):
            socket.send_multipart(frames, copy=False)


def pull(address: str, episodes: int, kilobytes: int) -> float:
    """Return the episodes per second that arrive."""
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.set_hwm(WINDOW)
        socket.bind(address)
        sender = multiprocessing.Process(target=push, args=(address, episodes, kilobytes))
        sender.start()
        socket.recv_multipart(copy=False)
        begun = time.perf_counter()
        for _ in range(episodes - 1):
            socket.recv_multipart(copy=False)
        rate = (episodes - 1) / (time.perf_counter() - begun)
        sender.join()
    return rate


async def send_all(address: str, episodes: int, kilobytes: int, anew: bool) -> None:
    """Send episodes as a worker does, as far as the receiver lets us; each made `anew`, or the first one again."""
    trajectory = trajectory_of(kilobytes, LAYERS)
    fields, arrays = encode_episode(episode_of(lease_of(0), trajectory, 0))
    window = asyncio.Semaphore(WINDOW)

    def received(packet: Packet) -> None:
        for _ in range(packet.expect(Ready).credits):
            window.release()

    with zmq.Context() as context:
        socket = open_socket(context, zmq.DEALER)
        socket.connect(address)
        channel = Channel(socket, received, lambda sender, error: sys.exit(str(error)))
        for number in range(episodes):
            await window.acquire()
            if anew:
                fields, arrays = encode_episode(episode_of(lease_of(number), trajectory, 0))
            channel.send(EpisodeDone(lease_id=number, episode=fields), arrays)
        for _ in range(WINDOW):  # until all have arrived
            await window.acquire()
        channel.close()


async def receive_all(address: str, episodes: int, kilobytes: int, anew: bool) -> float:
    """Return the episodes per second that arrive; those made `anew` are decoded and checked."""
    done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    count, begun = 0, 0.0

    def received(packet: Packet) -> None:
        nonlocal count, begun
        header = packet.expect(EpisodeDone)
        if anew:
            episode = decode_episode(header.episode, packet.arrays)
            assert episode.checksums == tuple(t.checksum() for t in episode.trajectories)
        channel.send(Ready(credits=1), to=packet.sender)
        begun = begun or time.perf_counter()
        count += 1
        if count == episodes:
            done.set_result((count - 1) / (time.perf_counter() - begun))

    with zmq.Context() as context:
        socket = open_socket(context, zmq.ROUTER)
        socket.bind(address)
        channel = Channel(socket, received, lambda sender, error: sys.exit(str(error)))
        sender = multiprocessing.Process(target=_send, args=(address, episodes, kilobytes, anew))
        sender.start()
        rate = await done
        await asyncio.to_thread(sender.join)
        channel.close()
    return rate


def _send(address: str, episodes: int, kilobytes: int, anew: bool) -> None:
    asyncio.run(send_all(address, episodes, kilobytes, anew))


def main() -> None:
    """Print the rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kilobytes", type=int, default=800, help="size of an episode")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    what = arguments.episodes, arguments.kilobytes
    rates: dict[str, list[float]] = {"raw": [], "wire": [], "episodes": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            address = f"ipc://{Path(folder)}/{number}"
            rates["raw"].append(pull(f"{address}-raw", *what))
            rates["wire"].append(asyncio.run(receive_all(f"{address}-wire", *what, False)))
            rates["episodes"].append(asyncio.run(receive_all(f"{address}-episodes", *what, True)))
    for name, rounds in rates.items():
        rate = max(rounds)
        print(
            f"{name:8} {rate:8,.0f} episodes/s of {arguments.kilobytes} KB, "
            f"{rate * arguments.kilobytes / 1000:6,.0f} MB/s, {rate / max(rates['raw']):.2f} of raw"
        )


if __name__ == "__main__":
    main()
