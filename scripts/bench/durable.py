"""What it costs that every episode is on disk before it is acknowledged: the real coordinator, fed as fast as it takes.

    .venv/bin/python scripts/bench/durable.py [--kilobytes 800] [--layers 48] [--episodes 600] [--remote]
        [--folder DIR]

The coordinator runs in this process. A second one stands in for its worker, policy server and trainer: it answers
every lease at once with an episode of the given size, takes every batch and publishes nothing new. An episode's tokens
have 8 experts in each of so many layers, as in the 48 of Qwen3-30B-A3B, where 2,015 tokens are 800 KB: with fewer
layers there are more tokens, and they are the coordinator's work. It leaves routes on the disk as a worker on the
coordinator's machine does, or sends them along as one elsewhere (`--remote`). Printed are the episodes per second, the
CPU time of the coordinator's process per episode, the part of it that its store's thread used, and the time from an
episode's leaving to its acknowledgement. DIR should be on the disk that runs are on.
"""

import argparse
import asyncio
import io
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import zmq
from rich.console import Console

from agentgym.busy import forget_startup
from agentgym.config import Config
from agentgym.coordinator.launch import Places
from agentgym.coordinator.process import Coordinator
from agentgym.coordinator.report import Reporter
from agentgym.coordinator.schedule import Schedule
from agentgym.coordinator.store import EpisodeStore
from agentgym.coordinator.supervisor import Supervisor
from agentgym.episode import EndReason, Episode, Trajectory, Turn
from agentgym.episode_codec import encode_episode
from agentgym.messages import assistant
from agentgym.protocol import (
    Ack,
    BatchHeader,
    BatchRequest,
    Drain,
    EpisodeDone,
    Hello,
    Lease,
    Loaded,
    LoadWeights,
    Ready,
    StepDone,
    Welcome,
)
from agentgym.routes import APART_BYTES, write_routes
from agentgym.tensorboard import TensorBoard
from agentgym.wire import PROTOCOL_VERSION, Channel, Packet, open_socket

LAYERS, TOPK, TURNS = 48, 8, 8
GROUP, TASKS = 4, 8


def config_of(episodes: int) -> Config:
    """Return the settings of a run with this many episodes."""
    steps = max(2, episodes // (GROUP * TASKS))
    return Config.model_validate(
        {
            "run": {"steps": steps},
            "env": {"id": "agentgym/GuessNumber-v0"},
            "policies": {"learner": {"model": "model"}},
            "rollout": {"group_size": GROUP, "tasks_per_step": TASKS},
            "trainer": {"checkpoint_every": 4, "tokens_per_microbatch": 1 << 20},
            "tensorboard": {"samples": 0},
        }
    )


def episode_of(lease: Lease, trajectory: Trajectory, version: int) -> Episode:
    """Return an answer to a lease; members differ in their reward, so that there is something to learn."""
    turns = [*trajectory.turns[:-1], trajectory.turns[-1]._replace(reward=float(lease.member))]
    versions = np.where(trajectory.loss_mask, np.int32(version), np.int32(-1))
    changed = Trajectory(
        agent="agent", policy="learner", trainable=True, tokens=trajectory.tokens, loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs, versions=versions, routes=trajectory.routes, turns=tuple(turns),
    )  # fmt: skip
    return Episode(
        env_id="bench", task_index=lease.task_index, seed=lease.seed, group_id=lease.group_id, member=lease.member,
        end_reason=EndReason.TERMINATED, trajectories=(changed,), checksums=(changed.checksum(),),
    )  # fmt: skip


def trajectory_of(kilobytes: int, layers: int) -> Trajectory:
    """Return a trajectory of about this size."""
    K = max(TURNS * 4, kilobytes * 1000 // (4 + 1 + 4 + 4 + layers * TOPK))
    mask = np.zeros(K, np.bool_)
    for turn in range(TURNS):
        mask[slice(*_span(turn, K))] = True
    rng = np.random.default_rng(0)
    return Trajectory(
        agent="agent", policy="learner", trainable=True, tokens=rng.integers(0, 99, K).astype(np.int32),
        loss_mask=mask, logprobs=np.where(mask, -0.5, 0).astype(np.float32), versions=np.zeros(K, np.int32),
        routes=rng.integers(0, 64, (K, layers, TOPK)).astype(np.uint8),
        turns=tuple(Turn(*_span(turn, K), assistant("x"), "stop", 0.0, {}, 0.0) for turn in range(TURNS)),
    )  # fmt: skip


def _span(turn: int, K: int) -> tuple[int, int]:
    each = K // TURNS
    return turn * each + each // 2, (turn + 1) * each


class Peer:
    """One of the processes around the coordinator."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, role: str) -> None:
        """Connect and say hello."""
        socket = open_socket(context, zmq.DEALER)
        socket.connect(address)
        self.inbox: asyncio.Queue[Packet] = asyncio.Queue()
        self.channel = Channel(socket, self.inbox.put_nowait, lambda sender, error: sys.exit(str(error)))
        self.channel.send(
            Hello.model_validate(
                {"role": role, "name": role, "protocol": PROTOCOL_VERSION, "pid": 1, "address": "ipc://nowhere",
                 "max_model_len": 1 << 20, **({"policy": "learner"} if role != "worker" else {})}
            )
        )  # fmt: skip


async def stand_in(address: str, exchange: Path, trajectory: Trajectory, remote: bool) -> None:
    """Play worker, server and trainer until the run ends; print the milliseconds until each acknowledgement."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    worker, server, trainer = (Peer(context, address, role) for role in ("worker", "server", "trainer"))
    sent: dict[int, float] = {}
    waited: list[float] = []
    version = [0]
    tasks: set[asyncio.Task[None]] = set()

    async def answer(lease: Lease, folder: Path) -> None:
        fields, arrays = encode_episode(episode_of(lease, trajectory, version[0]))
        apart, routes = None, arrays["routes"]
        if not remote and routes is not None and routes.nbytes >= APART_BYTES:
            apart = await asyncio.to_thread(write_routes, folder, lease.lease_id, routes)
            arrays["routes"] = None
        sent[lease.lease_id] = time.perf_counter()
        worker.channel.send(EpisodeDone(lease_id=lease.lease_id, episode=fields, apart=apart), arrays)

    async def work() -> None:
        folder = Path((await worker.inbox.get()).expect(Welcome).episodes)
        worker.channel.send(Ready(credits=64))
        while not isinstance(header := (await worker.inbox.get()).header, Drain):
            if isinstance(header, Lease):
                tasks.add(task := asyncio.create_task(answer(header, folder)))
                task.add_done_callback(tasks.discard)
            elif isinstance(header, Ack):
                waited.append(1000 * (time.perf_counter() - sent.pop(header.lease_id)))

    async def serve() -> None:
        while not isinstance(header := (await server.inbox.get()).header, Drain):
            if isinstance(header, LoadWeights):
                version[0] = header.version
                server.channel.send(Loaded(version=header.version, seconds=0.0))

    async def train() -> None:
        trainer.channel.send(BatchRequest(step=1))
        while not isinstance(header := (await trainer.inbox.get()).header, Drain):
            if isinstance(header, BatchHeader):
                weights = exchange / f"weights-{header.step}.safetensors"
                weights.touch()
                checkpoint = "there" if header.checkpoint else ""
                trainer.channel.send(
                    StepDone(
                        step=header.step, metrics={"loss": 0.0}, weights=str(weights), checkpoint=checkpoint
                    )
                )
                trainer.channel.send(BatchRequest(step=header.step + 1))

    await asyncio.gather(work(), serve(), train())
    quantiles = statistics.quantiles(waited, n=100)
    print(f"acknowledged after {quantiles[49]:.1f} ms (median), {quantiles[98]:.1f} ms (99 %)", flush=True)
    context.destroy()


async def coordinate(config: Config, folder: Path, shape: Sequence[str]) -> None:
    """Run the coordinator and print what it used."""
    for name in ("run", "sockets", "exchange"):
        (folder / name).mkdir()
    places = Places(folder / "run", folder / "sockets", folder / "exchange")
    board = TensorBoard(places.tensorboard)
    supervisor = Supervisor(logs=places.logs, start_timeout=60.0, silence_timeout=60.0, max_restarts=0)
    reporter = reporter_of(config, board)
    coordinator = Coordinator(config, places, supervisor=supervisor, reporter=reporter)
    command = [sys.executable, __file__, "--stand-in", places.coordinator, "--folder", str(places.exchange)]
    forget_startup()  # as `agentgym train` does
    with subprocess.Popen([*command, *shape]):
        assert isinstance(coordinator._store, EpisodeStore)
        writer = coordinator._store._thread
        store = time.pthread_getcpuclockid(writer.ident or 0)
        begun, cpu, cpu_store = time.perf_counter(), time.process_time(), time.clock_gettime(store)
        run = asyncio.create_task(coordinator.run())
        used = 0.0
        while not run.done():
            with_store = time.clock_gettime(store) if writer.is_alive() else used
            used = with_store - cpu_store
            await asyncio.sleep(0.05)
        await run
        episodes = sum(coordinator._dispatcher.counts[name] for name in ("ok", "truncated"))
        seconds, total = time.perf_counter() - begun, time.process_time() - cpu
    print(
        f"{episodes} episodes ({' '.join(shape)}): {episodes / seconds:.0f} a second; coordinator "
        f"{1000 * total / episodes:.2f} ms of CPU each, of which its store {1000 * used / episodes:.2f} ms"
    )
    board.close()


def reporter_of(config: Config, board: TensorBoard) -> Reporter:
    """Return a reporter whose lines nobody reads."""
    return Reporter(
        Schedule(config),
        board,
        config.tensorboard,
        console=Console(file=io.StringIO(), soft_wrap=True),
        decode=lambda tokens: "",
    )


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kilobytes", type=int, default=800, help="size of an episode")
    parser.add_argument("--episodes", type=int, default=600)
    parser.add_argument("--layers", type=int, default=LAYERS, help="MoE layers of the model")
    parser.add_argument("--remote", action="store_true", help="send the routes along")
    parser.add_argument("--folder", type=Path, default=None, help="where the run directory is made")
    parser.add_argument("--stand-in", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stand_in:
        trajectory = trajectory_of(arguments.kilobytes, arguments.layers)
        asyncio.run(stand_in(arguments.stand_in, arguments.folder, trajectory, arguments.remote))
        return
    shape = ["--kilobytes", str(arguments.kilobytes), "--layers", str(arguments.layers)]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        config = config_of(arguments.episodes)
        asyncio.run(coordinate(config, Path(folder), [*shape, *(["--remote"] if arguments.remote else [])]))


if __name__ == "__main__":
    main()
