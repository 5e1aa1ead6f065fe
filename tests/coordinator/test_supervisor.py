import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentgym.coordinator.supervisor import Child, Supervisor, TrainerLost
from agentgym.errors import RunError
from agentgym.protocol import EXIT_REPLACE, Role

CHILD = """
import os, signal, sys, threading
action, *rest = sys.argv[1:]
print("I was told to", *sys.argv[1:], os.environ.get("OMP_NUM_THREADS"), flush=True)
if action == "exit":
    print("the reason", file=sys.stderr, flush=True)
    os._exit(int(rest[0]))
if action == "resist":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(rest[0], "w") as ready:  # a pipe: whoever reads it knows that the child is there
    ready.write("ready")
threading.Event().wait(3600)
"""


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Nest:
    """A supervisor of children that are told what to do."""

    def __init__(self, folder: Path, clock: Callable[[], float], max_restarts: int = 2) -> None:
        (folder / "tiny_child.py").write_text(CHILD)
        self.folder = folder
        self.supervisor = Supervisor(
            logs=folder / "logs",
            start_timeout=60.0,
            silence_timeout=20.0,
            max_restarts=max_restarts,
            clock=clock,
        )

    def start(self, name: str, *actions: list[str], role: Role = "worker") -> Child:
        """Start a child with the first list of arguments; restarts take the next ones, the last for ever."""
        turns = itertools.chain(actions, itertools.repeat(actions[-1]))
        environment = {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "7"}
        self.supervisor.start(name, role, lambda: ["tiny_child", *next(turns)], environment)
        return self.supervisor.children[name]

    def pipe(self, name: str) -> str:
        path = self.folder / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        return str(path)


@contextmanager
def nest(folder: Path, clock: Callable[[], float] | None = None, **settings: int) -> Iterator[Nest]:
    made = Nest(folder, clock or Clock(), **settings)
    try:
        yield made
    finally:
        for child in made.supervisor.children.values():
            if child.process is not None:
                child.process.kill()
                child.process.wait()


def ended(child: Child) -> int:
    assert child.process is not None
    return child.process.wait(20)


def notes(caught: pytest.ExceptionInfo[RunError]) -> str:
    """What is printed before an error."""
    return "\n".join(getattr(caught.value, "__notes__", []))


def ready(path: str) -> None:
    """Wait until a child that writes to the pipe is there."""
    assert Path(path).read_text() == "ready"


def test_a_process_that_ends_is_named_with_its_status_and_started_again(tmp_path: Path) -> None:
    with nest(tmp_path) as made:
        child = made.start("worker-0", ["exit", "3"])
        first = child.pid
        assert ended(child) == 3
        ((same, described),) = made.supervisor.restart_dead()
        assert same is child
        assert described == f"worker-0 (pid {first}) ended with status 3"
        assert (child.restarts, child.pid != first) == (1, True)
        assert ended(child) == 3


def test_a_worker_that_leaves_to_be_replaced_is_started_again_and_not_counted(tmp_path: Path) -> None:
    with nest(tmp_path, max_restarts=1) as made:
        child = made.start("worker-0", ["exit", str(EXIT_REPLACE)])
        for _ in range(3):
            made.supervisor.heard("worker-0")
            before = child.pid
            assert ended(child) == EXIT_REPLACE
            ((_, described),) = made.supervisor.restart_dead()
            assert described == f"worker-0 (pid {before}) has left to be replaced"
            assert (child.restarts, child.pid != before) == (0, True)
        # Before its hello it had no reason to leave: that is a failure like any other.
        ended(child)
        made.supervisor.restart_dead()
        assert child.restarts == 1


def test_processes_that_live_are_left_alone(tmp_path: Path) -> None:
    with nest(tmp_path) as made:
        child = made.start("worker-0", ["wait", made.pipe("a")])
        pid = child.pid
        ready(str(made.folder / "a"))
        made.supervisor.heard("worker-0", {"busy": 0.5})
        made.supervisor.heard("somebody else", {"busy": 1.0})
        assert made.supervisor.restart_dead() == []
        assert (child.pid, child.stats) == (pid, {"busy": 0.5})


def test_a_killed_process_is_named_with_its_signal(tmp_path: Path) -> None:
    with nest(tmp_path) as made:
        pipe = made.pipe("a")
        child = made.start("server-0", ["wait", pipe], ["exit", "0"], role="server")
        ready(pipe)
        assert child.process is not None
        child.process.send_signal(signal.SIGKILL)
        ended(child)
        ((_, described),) = made.supervisor.restart_dead()
        assert described.endswith("was killed by SIGKILL")


def test_every_start_asks_for_its_arguments_anew(tmp_path: Path) -> None:
    with nest(tmp_path) as made:
        child = made.start("server-0", ["exit", "1"], ["exit", "2"])
        ended(child)
        made.supervisor.restart_dead()
        assert ended(child) == 2


def test_a_process_that_ends_too_often_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    with nest(tmp_path, max_restarts=1) as made:
        child = made.start("worker-0", ["exit", "3"])
        ended(child)
        made.supervisor.restart_dead()
        made.supervisor.heard("worker-0")
        ended(child)
        with pytest.raises(RunError) as caught:
            made.supervisor.restart_dead()
        assert "ended with status 3, after 1 restarts since the last checkpoint" in str(caught.value)
        text = notes(caught)
        assert f"last lines of {tmp_path / 'logs/worker-0.log'}:" in text
        assert "  | I was told to exit 3 7\n  | the reason" in text


def test_a_process_that_never_gets_ready_ends_the_run_after_the_second_time(tmp_path: Path) -> None:
    with nest(tmp_path, max_restarts=9) as made:
        child = made.start("worker-0", ["exit", "3"])
        ended(child)
        made.supervisor.restart_dead()
        ended(child)
        with pytest.raises(RunError, match=r"ended with status 3 before it was ready, twice") as caught:
            made.supervisor.restart_dead()
        assert "the reason" in notes(caught)


def test_one_failed_start_after_a_long_life_is_forgiven(tmp_path: Path) -> None:
    with nest(tmp_path, max_restarts=9) as made:
        child = made.start("worker-0", ["exit", "3"])
        for heard in (True, False, True, True):
            if heard:
                made.supervisor.heard("worker-0")
            ended(child)
            made.supervisor.restart_dead()
        assert child.restarts == 4


def test_the_end_of_the_trainer_is_told_apart_so_that_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    with nest(tmp_path, max_restarts=2) as made:
        child = made.start("trainer", ["exit", "9"], role="trainer")
        for _ in range(2):
            made.supervisor.heard("trainer")
            ended(child)
            with pytest.raises(TrainerLost, match=r"^trainer \(pid \d+\) ended with status 9\n") as lost:
                made.supervisor.restart_dead()
            assert "the reason" in notes(lost)
            made.supervisor.stop(1.0)
            assert made.start("trainer", ["exit", "9"], role="trainer") is child
        made.supervisor.heard("trainer")
        ended(child)
        with pytest.raises(RunError, match=r"after 2 restarts since the last checkpoint") as caught:
            made.supervisor.restart_dead()
        assert not isinstance(caught.value, TrainerLost)


def test_restarts_before_a_checkpoint_are_forgiven(tmp_path: Path) -> None:
    with nest(tmp_path, max_restarts=1) as made:
        child = made.start("worker-0", ["exit", "3"])
        for _ in range(4):
            made.supervisor.heard("worker-0")
            ended(child)
            made.supervisor.restart_dead()
            made.supervisor.progress()
        assert (child.restarts, made.supervisor.restarts) == (0, 4)


def test_one_that_is_killed_again_and_again_while_it_starts_does_not_fail_by_itself(tmp_path: Path) -> None:
    with nest(tmp_path, max_restarts=3) as made:
        pipe = made.pipe("a")
        child = made.start("worker-0", ["wait", pipe])
        for _ in range(3):
            ready(pipe)
            assert child.process is not None
            child.process.kill()
            ended(child)
            made.supervisor.restart_dead()
        assert (child.restarts, child.failed_starts) == (3, 0)


def test_it_says_when_a_process_was_last_seen(tmp_path: Path) -> None:
    clock = Clock()
    with nest(tmp_path, clock) as made:
        made.start("worker-0", ["exit", "0"])
        made.start("worker-1", ["exit", "0"])
        clock.now += 7.0
        made.supervisor.heard("worker-0")
        clock.now += 5.0
        assert made.supervisor.last_seen(["worker-0", "worker-1", "worker-2"]) == (
            "worker-1 was started 12 s ago, worker-0 was heard 5 s ago"
        )
        assert made.supervisor.last_seen([]) == "none was started here"


def test_of_many_processes_those_are_named_that_were_silent_for_longest(tmp_path: Path) -> None:
    clock = Clock()
    with nest(tmp_path, clock) as made:
        for number in range(6):
            made.start(f"worker-{number}", ["exit", "0"])
            made.supervisor.heard(f"worker-{number}")
            clock.now += 1.0
        said = made.supervisor.last_seen(made.supervisor.children)
        assert said.startswith("worker-0 was heard 6 s ago, worker-1 was heard 5 s ago")
        assert said.endswith("worker-3 was heard 3 s ago, 2 others later")


def test_a_process_that_does_not_say_hello_in_time_is_killed_and_started_again(tmp_path: Path) -> None:
    clock = Clock()
    with nest(tmp_path, clock) as made:
        pipe = made.pipe("a")
        child = made.start("worker-0", ["wait", pipe])
        process = child.process
        clock.now += 60.0
        assert made.supervisor.restart_dead() == []
        clock.now += 1.0
        ((_, described),) = made.supervisor.restart_dead()
        assert described.endswith("did not say hello within 60 s")
        assert process is not None
        assert process.returncode == -signal.SIGKILL
        # The clock of the new process starts with it.
        assert made.supervisor.restart_dead() == []


def test_a_process_that_falls_silent_is_killed_and_started_again(tmp_path: Path) -> None:
    clock = Clock()
    with nest(tmp_path, clock) as made:
        child = made.start("worker-0", ["wait", made.pipe("a")])
        made.supervisor.heard("worker-0")
        clock.now += 15.0
        made.supervisor.heard("worker-0")
        clock.now += 20.0
        assert made.supervisor.restart_dead() == []
        clock.now += 2.0
        ((_, described),) = made.supervisor.restart_dead()
        assert described.endswith("was silent for 22 s")
        assert child.heard is None


def test_stop_waits_for_those_that_end_by_themselves(tmp_path: Path) -> None:
    with nest(tmp_path) as made:
        child = made.start("worker-0", ["exit", "0"])
        made.supervisor.heard("worker-0")
        made.supervisor.stop(20.0)
        assert child.process is not None
        assert child.process.returncode == 0


def test_stop_terminates_those_that_nobody_could_tell_to_end(tmp_path: Path) -> None:
    with nest(tmp_path) as made:
        pipe = made.pipe("a")
        child = made.start("worker-0", ["wait", pipe])
        ready(pipe)
        made.supervisor.stop(20.0)
        assert child.process is not None
        assert child.process.returncode == -signal.SIGTERM


def test_stop_terminates_then_kills_those_that_do_not_end(tmp_path: Path) -> None:
    ticks = itertools.count(0.0, 5.0)  # every look at the clock finds the deadline passed
    with nest(tmp_path, lambda: next(ticks)) as made:
        pipes = [made.pipe("a"), made.pipe("b")]
        soft, hard = made.start("worker-0", ["wait", pipes[0]]), made.start("worker-1", ["resist", pipes[1]])
        for pipe in pipes:
            ready(pipe)
        for child in (soft, hard):
            made.supervisor.heard(child.name)
        made.supervisor.stop(1.0)
        assert hard.process is not None
        assert soft.process is not None
        assert hard.process.returncode == -signal.SIGKILL
        assert soft.process.returncode in (-signal.SIGTERM, -signal.SIGKILL)
        made.supervisor.stop(1.0)  # nothing left to stop


def test_last_words_of_a_process_without_a_log(tmp_path: Path) -> None:
    with nest(tmp_path) as made:
        assert made.supervisor.last_words("nobody") == f"{tmp_path / 'logs/nobody.log'} is empty"
