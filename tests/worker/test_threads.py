import asyncio
import concurrent.futures
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from builders import config_of, within
from toy_envs import raising

from agentgym.errors import EnvError, EnvTimeoutError, RunError
from agentgym.worker.pool import EnvPool
from agentgym.worker.table import call_env
from agentgym.worker.threads import EnvThread, Mailbox


@contextmanager
def gate() -> Iterator[threading.Event]:
    """An event that is set at the latest when the test ends, so that no thread stays behind."""
    event = threading.Event()
    try:
        yield event
    finally:
        event.set()


def test_calls_of_one_environment_run_in_one_thread_that_is_not_the_loops() -> None:
    async def scene() -> None:
        mailbox = Mailbox()
        one, other = EnvThread(mailbox), EnvThread(mailbox)
        threads = [await one.run("step", 5.0, threading.get_ident) for _ in range(5)]
        assert len(set(threads)) == 1
        assert await other.run("step", 5.0, threading.get_ident) not in threads
        assert threading.get_ident() not in threads
        for thread in (one, other):
            thread.close()

    within(10, scene())


def test_many_threads_finish_at_once_and_every_result_arrives() -> None:
    async def scene() -> None:
        mailbox = Mailbox()
        threads = [EnvThread(mailbox) for _ in range(32)]
        together = threading.Barrier(32)

        def call(number: int) -> int:
            together.wait(5.0)
            return number

        for _ in range(50):
            numbers = await asyncio.gather(
                *(t.run("step", 5.0, lambda n=n: call(n)) for n, t in enumerate(threads))  # type: ignore[misc]
            )
            assert numbers == list(range(32))
        for thread in threads:
            thread.close()

    within(30, scene())


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
def test_whatever_an_environment_raises_is_an_environment_error_with_its_cause_and_its_place(
    error: BaseException,
) -> None:
    async def scene() -> None:
        thread = EnvThread(Mailbox())
        with pytest.raises(EnvError, match=rf"^step raised {type(error).__name__}: ") as caught:
            await thread.run("step", 5.0, lambda: call_env("step", raising(error)))
        assert caught.value.__cause__ is error
        assert "toy_envs.py, line " in str(caught.value)
        assert not isinstance(caught.value, EnvTimeoutError)
        thread.close()

    within(10, scene())


def test_our_own_errors_keep_their_words() -> None:
    with pytest.raises(EnvError, match=r"^reset: the game is broken$"):
        call_env("reset", raising(EnvError("the game is broken")))
    with pytest.raises(EnvError, match=r"^reset: no$"):
        call_env("reset", raising(RunError("no")))


def test_a_call_that_never_returns_is_left_behind_until_it_does() -> None:
    async def scene(released: threading.Event) -> None:
        mailbox = Mailbox()
        thread, other = EnvThread(mailbox), EnvThread(mailbox)
        assert not thread.stuck
        with pytest.raises(
            EnvTimeoutError, match=r"^step did not return within 0\.05 s\n  at .*threading\.py"
        ):
            await thread.run("step", 0.05, released.wait)
        assert thread.stuck
        assert await other.run("step", 5.0, lambda: "others go on") == "others go on"
        released.set()
        assert await thread.run("step", 5.0, lambda: "back") == "back"
        assert not thread.stuck
        for done in (thread, other):
            done.close()

    with gate() as released:
        within(10, scene(released))


def test_a_cancelled_call_is_left_behind_too() -> None:
    async def scene(released: threading.Event) -> None:
        thread = EnvThread(Mailbox())
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wait() -> None:
            loop.call_soon_threadsafe(started.set)
            released.wait()

        task = asyncio.create_task(thread.run("step", 60.0, wait))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert thread.stuck

    with gate() as released:
        within(10, scene(released))


def test_a_pool_with_as_many_lost_threads_as_plays_asks_to_be_replaced() -> None:
    async def scene(released: threading.Event) -> None:
        pool = EnvPool(config_of("toy_envs:Deaf", env={"kwargs": {"ends": released}}).env, slots=2)
        hosts: list[Any] = [await pool.take() for _ in range(2)]
        for lost, host in enumerate(hosts):
            assert not pool.exhausted, lost
            with pytest.raises(EnvTimeoutError):
                await host.run("step", 0.05, "reset", 1)
            pool.give_back(host, reusable=False)
        assert pool.exhausted
        released.set()
        while pool.exhausted:
            await asyncio.sleep(0.01)
        await pool.close()

    with gate() as released:
        within(20, scene(released))


STUCK = """
import asyncio, threading
from agentgym.worker.threads import EnvThread, Mailbox

async def main():
    try:
        await EnvThread(Mailbox()).run("step", 0.05, threading.Event().wait)
    except TimeoutError:
        print("left behind", flush=True)

asyncio.run(main())
"""


def test_a_lost_thread_does_not_keep_the_process_from_ending() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "left behind\n"), ended.stderr
