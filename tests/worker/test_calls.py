import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from builders import within

from agentgym.errors import EnvError, EnvTimeoutError, RunError
from agentgym.worker.calls import EnvCalls


@contextmanager
def gate() -> Iterator[threading.Event]:
    """An event that is set at the latest when the test ends, so that no thread stays behind."""
    event = threading.Event()
    try:
        yield event
    finally:
        event.set()


def raises(error: BaseException) -> Any:
    raise error


def test_a_call_runs_in_another_thread_and_returns_its_value() -> None:
    async def scene() -> None:
        calls = EnvCalls(2)
        name = await calls.run("step", 5.0, lambda a, b: (a + b, threading.current_thread().name), 1, 2)
        assert (name[0], name[1].startswith("env")) == (3, True)

    within(10, scene())


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        TimeoutError("the database did not answer"),
        StopIteration("nothing left"),
        concurrent.futures.CancelledError("inner"),
        asyncio.CancelledError("inner"),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_an_environment_raises_is_an_environment_error_with_its_cause(error: BaseException) -> None:
    async def scene() -> None:
        with pytest.raises(EnvError, match=f"^step raised {type(error).__name__}: ") as caught:
            await EnvCalls(1).run("step", 5.0, raises, error)
        assert caught.value.__cause__ is error
        assert not isinstance(caught.value, EnvTimeoutError)

    within(10, scene())


def test_our_own_errors_keep_their_words() -> None:
    async def scene() -> None:
        with pytest.raises(EnvError, match=r"^reset: the game is broken$"):
            await EnvCalls(1).run("reset", 5.0, raises, EnvError("the game is broken"))
        with pytest.raises(EnvError, match=r"^reset: no$"):
            await EnvCalls(1).run("reset", 5.0, raises, RunError("no"))

    within(10, scene())


def test_a_call_that_never_returns_is_left_behind() -> None:
    async def scene(released: threading.Event) -> None:
        calls = EnvCalls(4)
        with pytest.raises(EnvTimeoutError, match=r"^step did not return within 0\.05 s$"):
            await calls.run("step", 0.05, released.wait)
        assert not calls.exhausted
        assert await calls.run("step", 5.0, lambda: "others go on") == "others go on"

    with gate() as released:
        within(10, scene(released))


def test_a_call_that_finds_no_free_thread_is_late_too() -> None:
    async def scene(released: threading.Event) -> None:
        calls = EnvCalls(1)
        for _ in range(2):
            with pytest.raises(EnvTimeoutError):
                await calls.run("step", 0.05, released.wait)

    with gate() as released:
        within(10, scene(released))


def test_too_many_lost_threads_are_reported_until_they_come_back() -> None:
    async def scene(released: threading.Event) -> None:
        calls = EnvCalls(4)
        back = threading.Semaphore(0)

        def wait() -> None:
            released.wait()
            back.release()

        for lost in range(2):
            assert not calls.exhausted, lost
            with pytest.raises(EnvTimeoutError):
                await calls.run("step", 0.05, wait)
        assert calls.exhausted
        released.set()
        # The two threads are free again when two more calls have gone through them.
        for _ in range(2):
            assert back.acquire(timeout=5.0)
        both = threading.Barrier(4)
        await asyncio.gather(*(calls.run("step", 5.0, both.wait) for _ in range(4)))
        assert not calls.exhausted

    with gate() as released:
        within(20, scene(released))


def test_a_cancelled_call_counts_as_lost_until_it_returns() -> None:
    async def scene(released: threading.Event) -> None:
        calls = EnvCalls(2)
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wait() -> None:
            loop.call_soon_threadsafe(started.set)
            released.wait()

        task = asyncio.create_task(calls.run("step", 60.0, wait))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert calls.exhausted

    with gate() as released:
        within(10, scene(released))


def test_calls_of_one_environment_run_in_one_thread() -> None:
    async def scene() -> None:
        calls = EnvCalls(4)
        one, other = calls.of_one_env(), calls.of_one_env()
        threads = [await one.run("step", 5.0, threading.get_ident) for _ in range(5)]
        assert len(set(threads)) == 1
        assert await other.run("step", 5.0, threading.get_ident) not in threads
        for env in (one, other):
            env.close()

    asyncio.run(scene())


def test_a_lost_thread_of_an_environment_counts_for_the_worker() -> None:
    async def scene() -> None:
        calls = EnvCalls(2)
        stuck = threading.Event()
        with pytest.raises(EnvTimeoutError):
            await calls.of_one_env().run("step", 0.05, stuck.wait)
        assert calls.exhausted
        stuck.set()

    asyncio.run(scene())
