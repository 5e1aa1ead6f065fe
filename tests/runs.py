"""Whole runs, started as a user starts them: `python -m agentgym train` in a process of its own.

A run's working directory is its test's own, and its processes inherit it. So whatever belongs to a run can be found,
and nothing else: `processes_in`.
"""

import contextlib
import io
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import zmq
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agentgym.cli import main
from agentgym.protocol import Error
from agentgym.tiny_model import init_model
from agentgym.wire import open_socket, unpack

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "scripts" / "configs"
DEADLINE = 300.0
"""Seconds for anything to happen; many times what an idle machine needs."""
COMMAND = [sys.executable, "-m", "agentgym"]

Curves = dict[str, list[tuple[int, float]]]
"""What TensorBoard shows: (step, value) pairs by tag."""


def write_run(folder: Path, env_id: str, *, teacher: str = "", **sections: Mapping[str, Any] | int) -> Path:
    """Write a small run of `env_id` into `folder` and return its file, run.toml.

    The folder gets a tiny model and `odd_envs.py`. Without `run.steps` the run is a warm-up alone, which needs no
    policy server.
    """
    init_model(folder / "model", "tiny-moe", 1)
    shutil.copy(Path(__file__).with_name("odd_envs.py"), folder)
    tables: dict[str, dict[str, Any]] = {
        "run": {"steps": 0},
        "env": {"id": env_id},
        "policies.learner": {"model": "model"},
        "warmup": {"steps": 2, "episodes": 8, "policy": teacher or "odd_envs:Parrot"},
        "rollout": {"tasks_per_step": 4, "group_size": 4},
        "workers": {"slots": 16},
        "server": {"kv_cache_gib": 0.1, "max_num_seqs": 32},
        "coordinator": {"heartbeat_interval": 0.5},
    }
    for name, values in sections.items():
        tables[name] = {**tables.get(name, {}), **values}
    lines = []
    for name, values in tables.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    path = folder / "run.toml"
    path.write_text("\n".join(lines))
    return path


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def run_cli(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `agentgym` with these arguments to its end, at which nothing of it may be left."""
    try:
        done = subprocess.run(
            [*COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
        assert wait_until_gone(cwd, 10.0) == {}
        return done
    finally:
        _kill(processes_in(cwd))


def refused(*arguments: str, cwd: Path) -> str:
    """Run a command of `agentgym` that must fail before it starts a process, in this one; return what it said."""
    out, err, status = io.StringIO(), io.StringIO(), None
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            status = end.code
    assert (status, out.getvalue()) == (1, ""), err.getvalue()
    return err.getvalue()


def processes_in(folder: Path) -> dict[int, str]:
    """Return the command lines of the processes that work in a folder, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if (entry / "cwd").readlink() == folder.resolve():
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
            except OSError:  # it ended meanwhile, or is another user's
                continue
    return found


def wait_until_gone(folder: Path, seconds: float) -> dict[int, str]:
    """Wait until no process works in a folder any more; return those that still do after `seconds`."""
    deadline = time.monotonic() + seconds
    for pid in processes_in(folder):
        _wait_for_end(pid, deadline)
    return processes_in(folder)


def _wait_for_end(pid: int, deadline: float) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.poll(max(0, int((deadline - time.monotonic()) * 1000)))
    finally:
        os.close(descriptor)


def _kill(pids: Mapping[int, str]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


class RunningTrain:
    """A training that runs, and what it has said so far."""

    def __init__(
        self, folder: Path, *arguments: str, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Start `agentgym train` in `folder`; use `running`."""
        self.folder = folder
        self.process = subprocess.Popen(
            [*COMMAND, "train", *arguments],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        self.lines: list[str] = []
        """What it wrote to stdout and stderr, in the order of arrival."""
        self._news = threading.Condition()
        streams = (self.process.stdout, self.process.stderr)
        self._readers = [threading.Thread(target=self._read, args=(stream,)) for stream in streams]
        for reader in self._readers:
            reader.start()

    @property
    def output(self) -> str:
        """All that it wrote so far."""
        return "\n".join(self.lines)

    def wait_for(
        self, pattern: str, *, log: str = "", after: int = 0, seconds: float = DEADLINE
    ) -> re.Match[str]:
        """Wait until `pattern` is found in the output from line `after` on, or in the log of a part of the run."""
        deadline = time.monotonic() + seconds
        with self._news:
            while True:
                ended = not any(reader.is_alive() for reader in self._readers)
                text = self.log(log) if log else "\n".join(self.lines[after:])
                if found := re.search(pattern, text):
                    return found
                left = deadline - time.monotonic()
                assert left > 0, f"{pattern!r} did not come within {seconds:g} s\n{self.report()}"
                assert not ended, f"the run ended before {pattern!r}\n{self.report()}"
                self._news.wait(min(left, 0.25))

    def wait(self, seconds: float = DEADLINE) -> int:
        """Wait for the end and return the exit status."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {seconds:g} s\n{self.report()}") from None
        for reader in self._readers:
            reader.join(10.0)
        return status

    def pid(self, name: str) -> int:
        """Return the process id of a part of the run, as its log has it: of the last start."""
        starts = re.findall(rf"started {name} \(pid (\d+)\)", self.log("coordinator"))
        assert starts, f"{name} was not started\n{self.report()}"
        return int(starts[-1])

    def engine_pid(self) -> int:
        """Return the process id of vLLM's own process."""
        pids = [pid for pid, command in processes_in(self.folder).items() if "EngineCore" in command]
        assert len(pids) == 1, f"found the engines {pids}\n{self.report()}"
        return pids[0]

    def argument(self, name: str, option: str) -> str:
        """Return what follows an option on the command line of a part of the run."""
        words = Path(f"/proc/{self.pid(name)}/cmdline").read_text().split("\0")
        return words[words.index(option) + 1]

    def kill(self, pid: int) -> None:
        """End a process of this run as a crash would, and wait until it has ended."""
        assert pid in processes_in(self.folder), f"{pid} is no process of this run\n{self.report()}"
        os.kill(pid, signal.SIGKILL)
        if pid == self.process.pid:
            self.process.wait(10.0)
        else:
            _wait_for_end(pid, time.monotonic() + 10.0)

    def log(self, name: str) -> str:
        """Return the log of a part of the run."""
        return "\n".join(path.read_text() for path in self.folder.glob(f"runs/*/logs/{name}.log"))

    def report(self) -> str:
        """Return what somebody needs who wants to know what went wrong."""
        logs = [
            f"--- {path.name}:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-30:])
            for path in sorted(self.folder.glob("runs/*/logs/*.log"))
        ]
        return "\n".join(["--- terminal:", self.output, *logs])

    def close(self) -> None:
        """End all processes of the run."""
        for _ in range(10):  # until none is left that could have started another
            left = processes_in(self.folder)
            if not left:
                break
            _kill(left)
            wait_until_gone(self.folder, 10.0)
        self.process.wait(10.0)
        for reader in self._readers:
            reader.join(10.0)

    def _read(self, stream: IO[str] | None) -> None:
        assert stream is not None
        for line in stream:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        stream.close()
        with self._news:
            self._news.notify_all()


@contextmanager
def running(
    folder: Path, *arguments: str, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[RunningTrain]:
    """Start `agentgym train` in `folder`, with some more of the environment; at the end nothing of it is left."""
    run = RunningTrain(folder, *arguments, environment=environment)
    try:
        yield run
    finally:
        run.close()


def curves(run_dir: Path) -> Curves:
    """Return the curves of a run, in the order of its event files."""
    events = _events(run_dir)
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def sampled(run_dir: Path) -> dict[int, str]:
    """Return the sample episodes of a run, by step; the latest where a step was taken again.

    TensorBoard itself drops the earlier ones, as it does for curves; this reader of its files does not for texts.
    """
    texts = _events(run_dir).Tensors("samples/episodes")
    return {event.step: event.tensor_proto.string_val[0].decode() for event in texts}


def _events(run_dir: Path) -> EventAccumulator:
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    return events.Reload()


def ask(address: str, frames: list[bytes]) -> Error:
    """Send frames that are no message to a ROUTER socket and return the error that comes back."""
    with zmq.Context() as context, open_socket(context, zmq.DEALER) as socket:
        socket.connect(address)
        socket.send_multipart(frames)
        assert socket.poll(30_000), f"{address} did not answer {frames!r:.100}"
        return unpack(socket.recv_multipart()).expect(Error)


def assert_one_clear_error(stderr: str, *expected: str) -> None:
    """Check that a run said what was wrong in one message at the end, and showed no traceback."""
    assert "Traceback" not in stderr, stderr
    assert re.search(r"^(Config|Model|Env|Run)Error: ", stderr, re.MULTILINE), stderr
    assert len(re.findall(r"^\w*Error: ", stderr, re.MULTILINE)) == 1, stderr
    for text in expected:
        assert text in stderr, stderr
