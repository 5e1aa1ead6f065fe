"""Start, watch, restart and stop the processes of a run.

A process that ends by itself, or that is silent for too long, is named in the log with its exit status and started
again. The trainer's state is in the last checkpoint: when it ends, `TrainerLost` says that the run must go on from
there. A run that does not get from one checkpoint to the next within `max_restarts` restarts of one process ends, as
does one with a process that fails twice before it is ready. Only processes started here are ever signalled.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agentgym.errors import RunError
from agentgym.protocol import EXIT_REPLACE, Role

ASKED = "has left to be replaced"
"""What is said of a worker that ended with EXIT_REPLACE; it is started again, and not counted as a restart."""

LAST_SEEN = 4
"""So many processes are named when it is said who is waited for."""

_KILLED_BY_OTHERS = (-signal.SIGKILL, -signal.SIGTERM)

_logger = logging.getLogger(__name__)


class TrainerLost(RunError):
    """The trainer has ended or fallen silent; the run can go on from its last checkpoint."""


class Process(Protocol):
    """What a supervisor needs of a process; `subprocess.Popen` is one."""

    @property
    def pid(self) -> int:
        """Its id."""
        ...

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for it to end; raises `subprocess.TimeoutExpired`."""
        ...

    def terminate(self) -> None:
        """Ask it to end."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


@dataclass(slots=True)
class Child:
    """A process of the run; a restart keeps the name."""

    name: str
    role: Role
    arguments: Callable[[], list[str]]
    """After `python -m`, made anew for each start."""
    environment: dict[str, str]
    restarts: int = 0
    """Since the last checkpoint."""
    failed_starts: int = 0
    """Failures before its hello, one after another."""
    process: Process | None = None
    started: float = 0.0
    heard: float | None = None
    """When it was last heard from; None before its hello."""
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        """Its process id, 0 if it does not run."""
        return self.process.pid if self.process is not None else 0


def spawn(child: Child, log: Path) -> Process:
    """Start the process of a child, whose log and prints go to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *child.arguments()],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, **child.environment},
            # Ctrl-C in the terminal goes to the coordinator alone, which then stops the others in order.
            start_new_session=True,
        )


class Supervisor:
    """The processes of a run."""

    def __init__(
        self,
        *,
        logs: Path,
        start_timeout: float,
        silence_timeout: float,
        max_restarts: int,
        clock: Callable[[], float] = time.monotonic,
        spawn: Callable[[Child, Path], Process] = spawn,
    ) -> None:
        """Watch no process yet; `spawn` starts one."""
        self._logs = logs
        self._start_timeout = start_timeout
        self._silence_timeout = silence_timeout
        self._max_restarts = max_restarts
        self._clock = clock
        self._start = spawn
        self.children: dict[str, Child] = {}
        self.restarts = 0
        """Of all processes, since the start."""

    def start(
        self, name: str, role: Role, arguments: Callable[[], list[str]], environment: dict[str, str]
    ) -> None:
        """Start a process and watch it from now on; one that was stopped before keeps its history."""
        child = self.children.setdefault(name, Child(name, role, arguments, environment))
        child.arguments = arguments
        self._spawn(child)

    def log_file(self, name: str) -> Path:
        """Return where a process writes its log and what it prints."""
        return self._logs / f"{name}.log"

    def owns(self, name: str, pid: int) -> bool:
        """Return whether the process of this name is this one."""
        return name in self.children and self.children[name].pid == pid

    def heard(self, name: str, stats: dict[str, float] | None = None) -> None:
        """Note that a process gave a sign of life."""
        child = self.children.get(name)
        if child is not None:
            child.heard = self._clock()
            if stats is not None:
                child.stats = stats

    def last_seen(self, names: Iterable[str]) -> str:
        """Say when some processes were last heard; of many, those that were silent for longest."""
        now = self._clock()
        known = [child for name in names if (child := self.children.get(name)) is not None]
        known.sort(key=lambda child: child.started if child.heard is None else child.heard)
        seen = [
            f"{child.name} was heard {now - child.heard:.0f} s ago"
            if child.heard is not None
            else f"{child.name} was started {now - child.started:.0f} s ago"
            for child in known[:LAST_SEEN]
        ]
        others = [f"{len(known) - LAST_SEEN} others later"] if len(known) > LAST_SEEN else []
        return ", ".join([*seen, *others]) or "none was started here"

    def progress(self) -> None:
        """Note that there is another checkpoint; the restarts before it are forgiven."""
        for child in self.children.values():
            child.restarts = 0

    def restart_dead(self) -> list[tuple[Child, str]]:
        """Restart every process that ended or fell silent; return each with what happened to it.

        Raises:
            TrainerLost: the trainer is one of them, and may be started again.
            RunError: a process was restarted too often since the last checkpoint, or fails whenever it starts.
        """
        dead = []
        for child in self.children.values():
            why = self._what_happened(child)
            if why is None:
                continue
            described = f"{child.name} (pid {child.pid}) {why}"
            if why != ASKED:
                self._count_restart(child, described)
            self._kill(child)
            if child.role == "trainer":
                lost = TrainerLost(described)
                lost.add_note(self.last_words(child.name))
                raise lost
            self._spawn(child)
            dead.append((child, described))
        return dead

    def _count_restart(self, child: Child, described: str) -> None:
        assert child.process is not None
        if child.heard is not None:
            child.failed_starts = 0
        elif child.process.poll() not in _KILLED_BY_OTHERS:
            child.failed_starts += 1
        error = None
        if child.failed_starts > 1:
            error = RunError(f"{described} before it was ready, twice")
        elif child.restarts >= self._max_restarts:
            error = RunError(f"{described}, after {child.restarts} restarts since the last checkpoint")
        if error is not None:
            error.add_note(self.last_words(child.name))
            raise error
        child.restarts += 1
        self.restarts += 1

    def last_words(self, name: str, lines: int = 15) -> str:
        """Return the end of a process's log."""
        path = self.log_file(name)
        text = path.read_text(errors="replace") if path.exists() else ""
        tail = "\n".join(f"  | {line}" for line in text.splitlines()[-lines:])
        return f"last lines of {path}:\n{tail}" if tail else f"{path} is empty"

    def stop(self, timeout: float) -> None:
        """Wait for the processes to end by themselves, then terminate, then kill."""
        deadline = self._clock() + timeout
        for child in self._running():
            if child.heard is None:  # it never connected, so nobody told it to end
                child.process.terminate()  # type: ignore[union-attr]
        self._wait(deadline)
        for child in self._running():
            _logger.warning(
                "%s (pid %d) did not end within %.0f s; terminating it", child.name, child.pid, timeout
            )
            child.process.terminate()  # type: ignore[union-attr]
        self._wait(self._clock() + 3.0)
        for child in self._running():
            self._kill(child)

    def _running(self) -> Sequence[Child]:
        return [c for c in self.children.values() if c.process is not None and c.process.poll() is None]

    def _wait(self, deadline: float) -> None:
        while (running := self._running()) and (left := deadline - self._clock()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].process.wait(min(left, 0.25))  # type: ignore[union-attr]

    def _what_happened(self, child: Child) -> str | None:
        assert child.process is not None
        status = child.process.poll()
        if status == EXIT_REPLACE and child.role == "worker" and child.heard is not None:
            return ASKED
        if status is not None:
            return (
                f"was killed by {signal.Signals(-status).name}"
                if status < 0
                else f"ended with status {status}"
            )
        now = self._clock()
        if child.heard is None and now - child.started > self._start_timeout:
            return f"did not say hello within {self._start_timeout:g} s"
        if child.heard is not None and now - child.heard > self._silence_timeout:
            return f"was silent for {now - child.heard:.0f} s"
        return None

    def _spawn(self, child: Child) -> None:
        child.process = self._start(child, self.log_file(child.name))
        child.started, child.heard = self._clock(), None
        _logger.info("started %s (pid %d)", child.name, child.pid)

    def _kill(self, child: Child) -> None:
        if child.process is not None and child.process.poll() is None:
            child.process.kill()
            child.process.wait()
