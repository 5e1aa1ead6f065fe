"""The rules about where it is played: in whatever process, the same tasks; on a worker's event loop, quickly."""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

from agentgym.check.rule import NotApplicable, rule
from agentgym.check.subject import Actions, Options, Play, Subject, attempt, difference
from agentgym.registry import EnvSpec
from agentgym.worker.isolated import HASH_SEED

OTHER_HASH_SEED = "20240229"
START_SECONDS = 120.0
INLINE_SECONDS = 0.01
"""A call of an environment that is played on the event loop may take this long."""
INLINE_TRIES = 5
"""The fastest counts, since machines have pauses."""

Recorded = tuple[int, str, list[Actions]]
"""Seed, by whom, actions."""


@rule(
    "processes",
    "Another process builds it and plays the same episodes, also where texts hash differently, as they do in workers.",
    "Register it in a module that workers can import; sort what comes out of sets, and use no hash() of texts.",
)
def processes(subject: Subject) -> Iterator[str]:
    """Play the recorded episodes again in a new process, which hashes texts as another worker may."""
    if subject.wanders:
        raise NotApplicable("episodes are not deterministic to begin with")
    plays = subject.plays
    recorded = [(play.seed, play.by, play.actions) for play in plays]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(
        target=_replay, args=(theirs, subject.env_id, subject.options, recorded), daemon=True
    )
    with hashing(subject.spec, OTHER_HASH_SEED):
        child.start()
    theirs.close()
    try:
        yield from _compare(subject, plays, ours)
    finally:
        child.kill()
        child.join()
        ours.close()


@contextlib.contextmanager
def hashing(env_spec: EnvSpec, seed: str | None = None) -> Iterator[None]:
    """Start processes that hash texts by `seed`, or as all processes of their own do that workers have."""
    before = os.environ.get("PYTHONHASHSEED")
    seed = HASH_SEED if env_spec.isolation == "process" else seed
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed  # read by an interpreter when it starts
    try:
        yield
    finally:
        os.environ.pop("PYTHONHASHSEED", None)
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before


def _compare(subject: Subject, plays: Sequence[Play], connection: Connection) -> Iterator[str]:
    waited, patience = 0.0, START_SECONDS
    for play in plays:
        while not connection.poll(1.0):
            waited += 1.0
            subject.on_call("another process")
            if waited > patience:
                yield f"it did not build and play an episode within {patience:g} s"
                return
        waited, patience = 0.0, START_SECONDS
        try:
            found = connection.recv()
        except EOFError:
            yield "it ended by itself; its last words are on stderr"
            return
        text = found if isinstance(found, str) else difference(play, found)
        if text:
            yield text
            return


def _replay(connection: Connection, env_id: str, options: Options, recorded: Sequence[Recorded]) -> None:
    """Play the recorded episodes and send what they gave; the body of the other process."""
    subject, problem = attempt(lambda: Subject(env_id, options))
    if subject is None:
        connection.send(f"building it {problem}")
        return
    for seed, by, actions in recorded:
        play, problem = attempt(
            lambda seed=seed, by=by, actions=actions: Play(  # type: ignore[misc]
                subject.new(), seed, recorded=actions, by=by, alone=subject.alone
            ).finish()
        )
        connection.send(play.record if play is not None else f"building it {problem}")
    subject.close()


@rule(
    "quick",
    "Every call of an environment that is played inline returns at once.",
    "Say isolation = 'shared', so that it gets a thread, or 'process'.",
)
def quick(subject: Subject) -> Iterator[str]:
    """Time each call of the recorded episodes."""
    if subject.spec.isolation != "inline":
        raise NotApplicable("it is not played inline")
    for play in subject.plays:
        fastest = [float("inf")] * len(play.frames)
        for _ in range(INLINE_TRIES):
            fastest = list(map(min, fastest, _call_seconds(subject.replay(play))))
            if max(fastest, default=0.0) <= INLINE_SECONDS:
                break
        else:
            slowest = max(range(len(fastest)), key=fastest.__getitem__)
            what = f"step {slowest}" if slowest else "reset"
            yield f"{what} took {1000 * fastest[slowest]:.0f} ms (seed {play.seed}, {play.by})"
            return


def _call_seconds(play: Play) -> list[float]:
    """Return how long each call of an episode took."""
    seconds, started = [], time.perf_counter()
    while play.advance():
        seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
    return seconds
