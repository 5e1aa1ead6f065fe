"""Turns per second through one worker process, for an environment and a policy that cost nothing.

    .venv/bin/python scripts/bench/env_plane.py [--turns 16] [--slots 64] [--seconds 5] [--rounds 3] [--pin 1]
    .venv/bin/python scripts/bench/env_plane.py --profile worker.prof    # where the worker's event loop spends its time

The worker is the real one, `agentgym.worker.process.Worker` in a process of its own; this process is the coordinator's
end of its ZeroMQ socket, hands out leases and counts the turns of the episodes that come back, each with its tokens.
`inline` plays on its event loop, `shared` in threads of it, `process` in an environment process per slot; `loop` calls
the same environment and policy in a bare Python loop. "same" environments say the same 16 texts in every episode,
"new" ones never say a text twice, so that no tokenizer cache helps. On a machine that does other things too, the rate
per core of processor time is the one to read; in `process` it leaves the environments' own processes out. Python's
threads take turns on any number of cores: on two, half of their time goes into what the other core has in its cache,
which `--pin CORE` shows by keeping the worker on one (in `process` its environments' processes too).
"""

import argparse
import asyncio
import cProfile
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgpack
import zmq

from agentgym.config import Config
from agentgym.env import Env
from agentgym.messages import assistant
from agentgym.policy.scripted import SeededPolicy
from agentgym.protocol import Drain, Lease, Ready, Welcome
from agentgym.tiny_model import init_model
from agentgym.wire import open_socket, pack, unpack

WARMUP_SECONDS = 1.0


class Nothing(Env):
    """Says a text each turn, and ends."""

    isolation = "shared"

    def __init__(self, turns: int, new: bool) -> None:
        """Say `turns` texts per episode, each of them `new` or the same ones in every episode."""
        self.turns, self.new = turns, new

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin."""
        self.turn, self.name = 0, f"{seed} " if self.new else ""
        return f"{self.name}begin", {}

    def step(self, action: Any) -> Any:
        """Say the next text."""
        self.turn += 1
        return f"{self.name}turn {self.turn}", 1.0, self.turn >= self.turns, False, {}


class Yes(SeededPolicy):
    """Answers at once."""

    def act(self, messages: Any, tools: Any, info: Any) -> Any:
        """Say yes."""
        return assistant("yes")


def bare_loop(turns: int, seconds: float) -> float:
    """Return the turns per second of processor time of the environment and the policy alone."""
    env, policy = Nothing(turns, new=False), Yes(seed=1)
    started, count = time.process_time(), 0
    while time.process_time() - started < seconds:
        text, info = env.reset(seed=count)
        policy.reset("agent", count)
        messages, over = [{"role": "user", "content": text}], False
        while not over:
            answer = policy.act(messages, [], info)
            text, _, over, _, info = env.step(answer["content"])
            messages += [answer, {"role": "user", "content": text}]
            count += 1
    return count / (time.process_time() - started)


def through_worker(
    config: Config, folder: Path, seconds: float, *, profile: str = "", core: str = ""
) -> tuple[float, float]:
    """Return the turns per second of a worker, and the share of a core that it used for them."""
    address = f"ipc://{folder}/coordinator-{time.monotonic_ns()}"
    settings = folder / "config.json"
    settings.write_text(config.model_dump_json())
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    with zmq.Context() as context, open_socket(context, zmq.ROUTER) as socket:
        socket.bind(address)
        worker = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(settings), address, profile, core],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        try:
            rate = _play(socket, worker.pid, seconds)
        finally:
            worker.wait(60)
    return rate


def _play(socket: zmq.Socket[bytes], pid: int, seconds: float) -> tuple[float, float]:
    """Hand out leases for a while, then end the worker."""
    numbers = itertools.count(1)
    begin: tuple[float, float] | None = None
    turns, warm = 0, time.monotonic() + 3600.0
    while True:
        assert socket.poll(60_000), "the worker says nothing"
        identity, *frames = socket.recv_multipart()
        credits = 0
        if frames[0] == b"hello":
            socket.send_multipart([identity, *pack(Welcome())])
        elif frames[0] == b"ready":
            credits = unpack(frames).expect(Ready).credits
        elif frames[0] == b"episode":
            fields = msgpack.unpackb(frames[2])["episode"]
            assert fields["end_reason"] == "terminated", fields["error"]
            turns += sum(len(t["turns"]) for t in fields["trajectories"])
            credits = 1
            warm = min(warm, time.monotonic() + WARMUP_SECONDS)
        now = time.monotonic()
        if begin is None and now >= warm:
            begin, turns = (now, _cpu_seconds(pid)), 0
        if begin is not None and now - begin[0] >= seconds:
            socket.send_multipart([identity, *pack(Drain())])
            return turns / (now - begin[0]), (_cpu_seconds(pid) - begin[1]) / (now - begin[0])
        for _ in range(credits):
            number = next(numbers)
            lease = Lease(
                lease_id=number, task_index=number, seed=number, group_id=number, member=0,
                sampling_seed=number, policies={"*": "learner"}, teacher="env_plane:Yes",
            )  # fmt: skip
            socket.send_multipart([identity, *pack(lease)])


def _cpu_seconds(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_worker(settings: Path, address: str, profile: str, core: str) -> None:
    """Be the worker."""
    from agentgym.worker.process import Worker

    if core:
        os.sched_setaffinity(0, {int(core)})
    config = Config.model_validate(json.loads(settings.read_text()))
    profiler = cProfile.Profile() if profile else None
    if profiler is not None:
        profiler.enable()
    asyncio.run(Worker(config, name="worker", coordinator=address).run())
    if profiler is not None:
        profiler.disable()
        profiler.dump_stats(profile)


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=16, help="turns per episode")
    parser.add_argument("--slots", type=int, default=64, help="episodes at once")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument(
        "--rounds", type=int, default=3, help="measurements of each kind; the best one counts"
    )
    parser.add_argument(
        "--profile", default="", help="write the profile of one inline measurement to this file"
    )
    parser.add_argument("--pin", default="", metavar="CORE", help="keep the worker on this core")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_worker(Path(arguments.worker[0]), *arguments.worker[1:])
        return
    bare = max(bare_loop(arguments.turns, 1.0) for _ in range(arguments.rounds))
    print(f"{'loop':8} {'same':5} {bare:12,.0f} turns per second of processor time", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        init_model(folder / "model")
        for isolation, new in itertools.product(("inline", "shared", "process"), (False, True)):
            config = Config.model_validate(
                {
                    "env": {
                        "id": "env_plane:Nothing",
                        "kwargs": {"turns": arguments.turns, "new": new},
                        "isolation": isolation,
                        "max_turns": arguments.turns,
                    },
                    "policies": {"learner": {"model": str(folder / "model")}},
                    "workers": {"slots": arguments.slots},
                    "server": {"max_model_len": 100_000},
                }
            )
            if arguments.profile:
                through_worker(config, folder, arguments.seconds, profile=arguments.profile)
                return
            rounds = [
                through_worker(config, folder, arguments.seconds, core=arguments.pin)
                for _ in range(arguments.rounds)
            ]
            rate, share = max(rounds)
            print(
                f"{isolation:8} {'new' if new else 'same':5} {rate:12,.0f} turns/s with {share:.2f} cores for the "
                f"worker, {rate / share:,.0f} per core; the bare loop is {bare / rate * share:.0f} times as fast",
                flush=True,
            )


if __name__ == "__main__":
    main()
