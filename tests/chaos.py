"""A run under fire, and the audit of what it leaves behind: `scripts/chaos.sh`, and a short one in the suite.

    python tests/chaos.py [--seconds 600] [--kills 50] [--gap 6] [--seed 1] [--folder DIR] [CONFIG] [KEY=VALUE ...]

At random times, which the seed determines, something of the run is killed, stopped (and later woken), fed nonsense,
or finds its disk full. Where that ends the run it is started again with --resume. When so many seconds are over and so
many processes killed, it is left alone for some steps and asked to stop in order, and its ledger, curves and checkpoint
are looked at. Exit status 1 if a promise was broken.
"""

import argparse
import os
import random
import re
import resource
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from chaos_audit import Finding, audit
from processes import alive
from runs import CONFIGS, RunningTrain, processes_in, running, wait_until_gone

from agentgym.coordinator.ledger import LEDGER
from agentgym.coordinator.store import FOLDER
from agentgym.tiny_model import init_model
from agentgym.wire import open_socket

HANG = 300.0
"""Seconds without a step after which the run counts as hanging."""
LENIENT = [  # what a run must be told that is hit every few seconds
    "coordinator.max_restarts=1000",
    "coordinator.max_retries=1000",
    "coordinator.heartbeat_timeout=10.0",
    "coordinator.keep_episodes=10000000",
    "rollout.group_timeout=600.0",
    "trainer.checkpoint_every=5",
]
NONSENSE = (
    [b"\x00\xff"],
    [b"pickle", b"", b"\x80\x04K\x01."],
    [b"episode", b"", b"\xc1" * 200],
    [b"hello", b"", b"\x81\xa4role\xa6worker"],
    [b"step_done", b"", b"\x82\xa4step\x01\xa7metrics\x80"],
    [b"episode", b"", b"\x82\xa8lease_id\x01\xa7episode\x80", b"not described"],
    [b""] * 50,
)


@dataclass
class Fire:
    """A run that is under fire."""

    folder: Path
    """Its working directory."""
    arguments: list[str]
    """Of `agentgym train`."""
    rng: random.Random
    done: Counter[str] = field(default_factory=Counter)
    """Faults by kind."""
    acknowledged: set[int] = field(default_factory=set)
    """Leases whose episodes were in the ledger at some moment."""
    ends: list[str] = field(default_factory=list)
    """Last lines of runs that ended on their own and should not have."""
    orphans: dict[int, str] = field(default_factory=dict)
    """Processes that outlived a coordinator for long."""
    exchanges: set[Path] = field(default_factory=set)
    """The folders in shared memory that its runs had."""
    terminal: list[str] = field(default_factory=list)
    peace: int = 2
    """Steps that it is left alone for in the end."""
    _address: str = ""
    _asleep: dict[int, float] = field(default_factory=dict)
    """When who is woken, by process id."""

    @property
    def scratch(self) -> Path:
        """Where its processes put their temporary files."""
        return self.folder / "tmp"

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        (found,) = self.folder.glob("runs/*/config.json")
        return found.parent

    def rage(self, plan: Iterator[tuple[float | None, str]]) -> list[Finding]:
        """Carry out a plan: after so many seconds, or after the next step where it says None, a fault."""
        self.scratch.mkdir()
        environment = {"TMPDIR": str(self.scratch)}
        resume: list[str] = []
        status: int | None = None
        while status is None:
            with running(self.folder, *self.arguments, *resume, environment=environment) as run:
                status = self._attend(run, plan)
                self.orphans |= wait_until_gone(self.folder, 15.0)
            self.terminal += run.lines
            resume = ["--resume"]
        self.ends += [] if status == 0 else [f"ended at last with status {status}: {self.terminal[-1]}"]
        return audit(self)

    def _attend(self, run: RunningTrain, plan: Iterator[tuple[float | None, str]]) -> int | None:
        """Harass a run until it ends; None: it is to be started again."""
        self._asleep.clear()
        _wait(run, lambda: self.pid(run, "trainer") is not None)
        self.exchanges.add(Path(run.argument("trainer", "--exchange")))
        self._address = run.argument("trainer", "--coordinator")
        for pause, fault in plan:
            self._pause(run, pause)
            self._look_at_the_ledger()
            if run.process.poll() is None:
                sys.stderr.write(f"{time.strftime('%H:%M:%S')} {fault}\n")
                self.done[fault] += FAULTS[fault][1](self, run)
            if run.process.poll() is not None:
                if fault not in ENDS_THE_RUN:
                    self.ends.append(run.lines[-1])
                return None
        self._wake(run, everybody=True)
        for steps in range(_steps(run), _steps(run) + self.peace):
            _wait(run, lambda steps=steps: _steps(run) > steps)
        self._look_at_the_ledger()
        run.process.send_signal(signal.SIGINT)
        return run.wait(HANG)

    def _pause(self, run: RunningTrain, seconds: float | None) -> None:
        steps, since = _steps(run), time.monotonic()
        while run.process.poll() is None:
            passed = time.monotonic() - since
            if passed > (seconds or 0.0) and (seconds is not None or _steps(run) > steps):
                return
            assert passed < HANG, f"no step within {HANG:g} s\n{run.report()}"
            self._wake(run)
            time.sleep(0.05)

    def _look_at_the_ledger(self) -> None:
        ledger = sqlite3.connect(f"file:{self.run_dir / FOLDER / LEDGER}?mode=ro", uri=True, timeout=30.0)
        self.acknowledged.update(lease for (lease,) in ledger.execute("SELECT lease_id FROM episodes"))
        ledger.close()

    # ---------------------------------------------------------------- what can be done to a run

    @property
    def kills(self) -> int:
        """Processes that were killed."""
        return sum(count for name, count in self.done.items() if name.startswith("kill"))

    def pid(self, run: RunningTrain, role: str) -> int | None:
        """Return a process of this role that is alive, or None; what a killed coordinator leaves does not count."""
        names = sorted(set(re.findall(rf"started ({role}\S*) \(pid", run.log("coordinator"))))
        mine = processes_in(self.folder)
        found = [
            pid
            for name in names
            if (pid := run.pid(name)) in mine and alive(pid) and _parent(pid) == run.process.pid
        ]
        return self.rng.choice(found) if found else None

    def kill(self, run: RunningTrain, role: str) -> bool:
        """Kill one of them; like all that follow, return whether there was one."""
        return _signal(self.pid(run, role), signal.SIGKILL)

    def kill_engine(self, run: RunningTrain) -> bool:
        """Kill vLLM's own process behind a server."""
        engines = [pid for pid, command in processes_in(self.folder).items() if "EngineCore" in command]
        return _signal(self.rng.choice(engines) if engines else None, signal.SIGKILL)

    def kill_coordinator(self, run: RunningTrain) -> bool:
        """Kill the coordinator; all others must end by themselves."""
        run.process.kill()
        run.process.wait(10.0)
        return True

    def stop(self, run: RunningTrain, role: str) -> bool:
        """Stop one of them, for a time that the coordinator bears, or not."""
        pid = self.pid(run, role)
        if pid is not None:
            self._asleep[pid] = time.monotonic() + self.rng.choice([2.0, 25.0])
        return _signal(pid, signal.SIGSTOP)

    def stop_coordinator(self, run: RunningTrain) -> bool:
        """Stop the coordinator for longer than it would bear the silence of others, and wake it."""
        run.process.send_signal(signal.SIGSTOP)
        time.sleep(13.0)
        run.process.send_signal(signal.SIGCONT)
        return True

    def nonsense(self, run: RunningTrain) -> bool:
        """Send the coordinator what is no message, and messages that nobody may send."""
        with zmq.Context() as context, open_socket(context, zmq.DEALER) as socket:
            socket.connect(self._address)
            for _ in range(20):
                frames = list(self.rng.choice(NONSENSE))
                if self.rng.random() < 0.5:
                    frames = [self.rng.randbytes(self.rng.randrange(300)) for _ in frames]
                socket.send_multipart(frames)
            socket.poll(5_000)
        return True

    def fill_disk(self, run: RunningTrain, role: str) -> bool:
        """No file of a process grows any more; the run must end with an error that says so."""
        pid = run.process.pid if role == "coordinator" else self.pid(run, role)
        if pid is None:
            return False
        self._wake(run, everybody=True)
        if role == "trainer":
            # One that ends before it has said who it is may be started again: nobody knows why it did.
            _wait(run, lambda: f"(pid {pid}) is there" in run.log("coordinator"))
        before = len(run.lines)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        status = run.wait(HANG)
        said = [line for line in run.lines[before:] if re.match(r"\w+Error: ", line)]
        if status != 1 or len(said) != 1 or run.lines[-1] != said[0] or "RunError" not in said[0]:
            self.ends.append(f"full disk of the {role}: status {status}, {run.lines[-1]}")
        return True

    def _wake(self, run: RunningTrain, *, everybody: bool = False) -> None:
        mine = processes_in(self.folder) if self._asleep else {}
        for pid, when in list(self._asleep.items()):
            if everybody or time.monotonic() > when:
                del self._asleep[pid]
                _signal(pid if pid in mine else None, signal.SIGCONT)


def _signal(pid: int | None, number: signal.Signals) -> bool:
    """Send a signal to a process, if there is one; return whether there was."""
    try:
        return pid is not None and os.kill(pid, number) is None
    except ProcessLookupError:
        return False


def _parent(pid: int) -> int | None:
    """Return the parent of a process; None if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _steps(run: RunningTrain) -> int:
    return sum(re.match(r"\s+\d+/\d+ ", line) is not None for line in run.lines)


def _wait(run: RunningTrain, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG
    while not condition() and run.process.poll() is None:
        assert time.monotonic() < deadline, f"nothing came within {HANG:g} s\n{run.report()}"
        time.sleep(0.05)


FAULTS: dict[str, tuple[int, Callable[[Fire, RunningTrain], bool]]] = {
    "kill worker": (14, lambda fire, run: fire.kill(run, "worker")),
    "kill server": (4, lambda fire, run: fire.kill(run, "server")),
    "kill engine": (2, lambda fire, run: fire.kill_engine(run)),
    "kill trainer": (2, lambda fire, run: fire.kill(run, "trainer")),
    "kill coordinator": (2, lambda fire, run: fire.kill_coordinator(run)),
    "stop worker": (3, lambda fire, run: fire.stop(run, "worker")),
    "stop server": (2, lambda fire, run: fire.stop(run, "server")),
    "stop trainer": (1, lambda fire, run: fire.stop(run, "trainer")),
    "stop coordinator": (2, lambda fire, run: fire.stop_coordinator(run)),
    "nonsense": (3, lambda fire, run: fire.nonsense(run)),
    "full disk": (1, lambda fire, run: fire.fill_disk(run, "coordinator")),
    "full disk of the trainer": (1, lambda fire, run: fire.fill_disk(run, "trainer")),
}
"""What can be done, and how often relative to each other."""
ENDS_THE_RUN = {"kill coordinator", "full disk", "full disk of the trainer"}


def at_random(fire: Fire, seconds: float, kills: int, gap: float) -> Iterator[tuple[float | None, str]]:
    """Yield faults, `gap` seconds apart in the mean, until time is over and enough was killed."""
    end = time.monotonic() + seconds
    names, weights = list(FAULTS), [weight for weight, _ in FAULTS.values()]
    while time.monotonic() < end or fire.kills < kills:
        yield fire.rng.expovariate(1 / gap), fire.rng.choices(names, weights)[0]


def one_of_each(rng: random.Random, *faults: str) -> Iterator[tuple[float | None, str]]:
    """Yield these faults in random order, each after the next step."""
    yield from ((None, fault) for fault in rng.sample(faults, len(faults)))


def report(fire: Fire, findings: list[Finding]) -> str:
    """Return what was done and what was found, as two tables."""
    lines = [f"{'fault':<26}{'times':>6}"]
    lines += [f"{name:<26}{fire.done[name]:>6}" for name in FAULTS]
    lines += [f"{'kills / faults':<26}{fire.kills:>6} / {fire.done.total()}", ""]
    lines += [f"{'ok  ' if one.ok else 'FAIL'} {one.promise}: {one.detail}" for one in findings]
    return "\n".join(lines)


def main() -> int:
    """Run the long version."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults come at least")
    parser.add_argument("--kills", type=int, default=50, help="how many processes are killed at least")
    parser.add_argument("--gap", type=float, default=6.0, help="mean seconds between faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for the run; by default a temporary one, which stays")
    parser.add_argument("config", nargs="?", default=CONFIGS / "guess_number.toml", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    settings = parser.parse_intermixed_args()
    folder = (settings.folder or Path(tempfile.mkdtemp(prefix="chaos-"))).absolute()
    init_model(folder / "runs" / "models" / "tiny-moe", "tiny-moe", 1)
    arguments = [str(settings.config.absolute()), "run.steps=100000", *LENIENT, *settings.overrides]
    fire = Fire(folder, arguments, random.Random(settings.seed), peace=25)
    sys.stderr.write(f"in {folder}: agentgym train {' '.join(arguments)}\n")
    findings = fire.rage(at_random(fire, settings.seconds, settings.kills, settings.gap))
    sys.stdout.write(report(fire, findings) + "\n")
    return 0 if all(finding.ok for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
