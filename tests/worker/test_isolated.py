import asyncio
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from builders import config_of, within

from agentgym.errors import ConfigError, EnvError, EnvTimeoutError
from agentgym.messages import assistant
from agentgym.policy.scripted import Script
from agentgym.worker import isolated
from agentgym.worker.pool import EnvPool
from agentgym.worker.table import Hop

HELLO = {"agent": assistant("hello")}
SECONDS = 60.0
"""For what should be quick; many times what an idle machine needs."""


@asynccontextmanager
async def pool_of(env_id: str, **env: Any) -> AsyncIterator[EnvPool]:
    pool = EnvPool(config_of(env_id, env={"isolation": "process", **env}).env, slots=8)
    try:
        yield pool
    finally:
        await pool.close()


async def reset(host: Any, seed: int = 1) -> Hop:
    hop: Hop = await host.run("reset", SECONDS, "reset", seed)
    return hop


async def say_hello(host: Any, seconds: float = SECONDS) -> Hop:
    hop: Hop = await host.run("step", seconds, "act", HELLO, {})
    return hop


def heard(hop: Hop) -> str:
    (request,) = hop.moves[-1].state.requests
    return request.messages[0]["content"]


def pid_of(hop: Hop) -> int:
    return int(heard(hop).removeprefix("pid "))


def ends(pid: int, seconds: float = 20.0) -> bool:
    """Wait for the end of a process."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def test_interleaved_plays_of_an_environment_that_uses_global_random_are_as_when_played_alone() -> None:
    """Report 14: seeds are honoured by whatever draws from process-global generators."""

    async def scene() -> None:
        async with pool_of("isolated_envs:GlobalDice") as pool:
            hosts = [await pool.take() for _ in range(3)]

            async def alone(host: Any, seed: int) -> list[str]:
                return [heard(await reset(host, seed)), *[heard(await say_hello(host)) for _ in range(4)]]

            wanted = [await alone(host, seed) for seed, host in enumerate(hosts)]
            assert len({text for texts in wanted for text in texts}) == 15, "seeds differ, and so do turns"
            texts = [[heard(await reset(host, seed))] for seed, host in enumerate(hosts)]
            for turn in range(4):
                for number in ((0, 1, 2), (2, 0, 1), (1, 2, 0), (0, 2, 1))[turn]:
                    texts[number].append(heard(await say_hello(hosts[number])))
            assert texts == wanted
            assert await alone(hosts[2], 0) == wanted[0], "an instance that was used before plays the same"
            for host in hosts:
                pool.give_back(host, reusable=True)

    within(SECONDS, scene())


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        ("exit", r"step: its process ended with status 3; the last it wrote:"),
        ("crash", r"step: its process was killed by SIGSEGV; the last it wrote:"),
    ],
)
def test_a_process_that_ends_fails_its_play_with_its_status_and_last_words(deed: str, message: str) -> None:
    async def scene() -> None:
        async with pool_of("isolated_envs:Turn", kwargs={"deed": deed}) as pool:
            host = await pool.take()
            first = pid_of(await reset(host))
            with pytest.raises(EnvError, match=message) as caught:
                await say_hello(host)
            assert f"| now it does {deed}" in str(caught.value)
            assert ("isolated_envs.py" in str(caught.value)) == (deed == "crash"), "a crash says where"
            pool.give_back(host, reusable=False)
            host = await pool.take()
            assert pid_of(await reset(host)) != first, "the next play has a fresh process"
            pool.give_back(host, reusable=True)

    within(SECONDS, scene())


def test_a_process_that_writes_nonsense_into_its_socket_fails_its_play() -> None:
    async def scene() -> None:
        async with pool_of("isolated_envs:Turn", kwargs={"deed": "babble"}) as pool:
            host = await pool.take()
            pid = pid_of(await reset(host))
            with pytest.raises(
                EnvError, match="step: its process sent what cannot be read: 4 bytes are no plain"
            ):
                await say_hello(host)
            pool.give_back(host, reusable=False)
            assert await asyncio.to_thread(ends, pid)

    within(SECONDS, scene())


def test_what_is_raised_surfaces_with_its_place_and_the_traceback() -> None:
    """Report 2: an exception in `reset` reaches the one who waits."""

    async def scene() -> None:
        async with pool_of("isolated_envs:Turn", kwargs={"deed": "raise", "when": "reset"}) as pool:
            host = await pool.take()
            hop = await reset(host)
            assert isinstance(hop.failure, EnvError)
            assert re.match(
                r"reset raised KeyError: 'map' \(.*isolated_envs\.py, line \d+, in do\)$", str(hop.failure)
            )
            assert "self.do()" in hop.failure.__notes__[0]
            pool.give_back(host, reusable=False)

    within(SECONDS, scene())


def test_sys_exit_is_an_error_of_the_environment_and_not_the_end_of_its_process() -> None:
    async def scene() -> None:
        async with pool_of("isolated_envs:Turn", kwargs={"deed": "sys.exit"}) as pool:
            host = await pool.take()
            await reset(host)
            assert str((await say_hello(host)).failure).startswith("step raised SystemExit: 3")
            assert pid_of(await reset(host))
            pool.give_back(host, reusable=True)

    within(SECONDS, scene())


@pytest.mark.parametrize("deed", ["hang", "hang deaf"])
def test_a_call_that_never_returns_is_ended_with_all_that_it_started(deed: str, tmp_path: Path) -> None:
    """Report 24: a limit is a limit. Report 27: nothing stays behind."""

    async def scene() -> None:
        note = tmp_path / "pids"
        async with pool_of("isolated_envs:Turn", kwargs={"deed": deed, "note": str(note)}) as pool:
            host = await pool.take()
            pids = [pid_of(await reset(host))]
            with pytest.raises(EnvTimeoutError, match=r"^step did not return within 1 s") as caught:
                await say_hello(host, 1.0)
            if deed == "hang":
                assert re.search(r'isolated_envs\.py", line \d+ in do', str(caught.value)), caught.value
                pids += map(int, note.read_text().split())
            assert all(ends(pid) for pid in pids)
            with pytest.raises(EnvError, match="was ended before"):
                await reset(host)
            pool.give_back(host, reusable=False)
            host = await pool.take()
            assert pid_of(await reset(host)) not in pids
            pool.give_back(host, reusable=True)

    within(SECONDS, scene())


def test_a_play_that_is_cancelled_in_the_middle_of_a_call_leaves_no_process() -> None:
    async def scene() -> None:
        async with pool_of("isolated_envs:Turn", kwargs={"deed": "hang"}) as pool:
            host = await pool.take()
            pid = pid_of(await reset(host))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await say_hello(host)
            pool.give_back(host, reusable=False)
            assert await asyncio.to_thread(ends, pid)

    within(SECONDS, scene())


@pytest.mark.parametrize("deed", ["raise", "exit", "hang"])
def test_whatever_happens_while_closing_nothing_stays(deed: str) -> None:
    async def scene() -> None:
        async with pool_of("isolated_envs:Turn", kwargs={"deed": deed, "when": "close"}) as pool:
            host = await pool.take()
            pid = pid_of(await reset(host))
            with pytest.raises(EnvError, match=r"^close"):
                await host.close(1.0)
            assert ends(pid)

    within(SECONDS, scene())


def test_an_import_that_never_ends_fails_the_play_and_delays_the_end_no_longer_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(isolated, "END_SECONDS", 0.5)

    async def scene() -> None:
        async with pool_of("slow_to_import:Env", reset_timeout=0.5) as pool:
            with pytest.raises(EnvTimeoutError, match=r"importing it took more than 0\.5 s"):
                await pool.take()

    within(SECONDS, scene())


def test_an_environment_that_cannot_be_made_says_why() -> None:
    async def scene() -> None:
        for env_id, message in (
            ("toy_envs:Unmakeable", "making toy_envs:Unmakeable: .*no licence for this game"),
            ("isolated_envs:Turn", "takes"),
        ):
            async with pool_of(env_id, kwargs={"wrong": 1} if "takes" in message else {}) as pool:
                with pytest.raises(EnvError, match=message):
                    await pool.take()

    within(SECONDS, scene())


def test_what_is_no_plain_data_stays_where_it_is_and_is_named() -> None:
    async def scene() -> None:
        async with pool_of("isolated_envs:Unprintable") as pool:
            host = await pool.take()
            with pytest.raises(EnvError, match=r"cannot leave the environment's process: builtins\.object"):
                await reset(host)
            pool.give_back(host, reusable=False)

    within(SECONDS, scene())


def test_a_scripted_player_plays_in_the_environments_process() -> None:
    async def scene() -> None:
        async with pool_of("isolated_envs:Turn") as pool:
            host = await pool.take()
            await reset(host)
            script = Script("teacher", "isolated_envs:Hello", 1, 5)
            hop = await host.run("step", SECONDS, "act", {}, {"agent": script})
            (move,) = hop.moves
            assert (move.answers, move.state.over) == (HELLO, True)
            assert [(o.reward, o.info) for o in move.state.outcomes] == [(1.0, {"success": 1.0})]
            await reset(host)
            with pytest.raises(ConfigError, match="there is no scripted policy 'nobody'"):
                await host.run("step", SECONDS, "act", {}, {"agent": Script("teacher", "nobody", 1, 5)})
            await reset(host)
            with pytest.raises(EnvError, match="step: its process ended with status 9"):
                await host.run(
                    "step", SECONDS, "act", {}, {"agent": Script("foe", "isolated_envs:Bad", 1, 5)}
                )
            pool.give_back(host, reusable=False)

    within(SECONDS, scene())


def test_children_that_are_forked_from_one_process_are_quick_to_start_and_free_of_torch() -> None:
    async def scene() -> None:
        async with pool_of("isolated_envs:Turn") as pool:
            hosts = await asyncio.gather(*(pool.take() for _ in range(8)))
            pids = [pid_of(await reset(host)) for host in hosts]
            parents = {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] for pid in pids}
            assert len(set(pids)) == 8
            assert len(parents) == 1, "one process imported the environment for all"
            maps = Path(f"/proc/{pids[0]}/maps").read_text()
            assert "numpy" in maps
            assert "libtorch" not in maps
            for host in hosts:
                pool.give_back(host, reusable=True)
        assert all(ends(pid) for pid in pids)

    within(SECONDS, scene())


WORKER = """
import asyncio, sys
from builders import config_of
from agentgym.worker.pool import EnvPool

async def main():
    env = config_of("isolated_envs:Turn", env={"kwargs": {"deed": "hang", "note": sys.argv[1]}}).env
    host = await EnvPool(env, slots=1).take()
    await host.run("reset", 60.0, "reset", 1)
    print("started", flush=True)
    await host.run("step", 600.0, "act", {"agent": {"role": "assistant", "content": "go"}}, {})

asyncio.run(main())
"""


def test_nothing_is_left_when_the_worker_is_killed_in_the_middle_of_a_call(tmp_path: Path) -> None:
    """Report 3: no environment process survives the process that it works for."""
    note = tmp_path / "pids"
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(note)], stdout=subprocess.PIPE, env={**os.environ, **paths}
    )
    assert worker.stdout is not None
    with worker.stdout:
        assert worker.stdout.readline() == b"started\n"
    deadline = time.monotonic() + SECONDS
    while not note.exists() or not note.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.02)  # the note is written by a process that nobody can wait for
    child, helper = map(int, note.read_text().split())
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    assert ends(child)
    assert ends(helper)


def test_when_the_process_that_children_are_forked_from_dies_the_next_play_has_another() -> None:
    async def scene() -> None:
        async with pool_of("isolated_envs:Turn") as pool:
            host = await pool.take()
            child = pid_of(await reset(host))
            zygote = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(zygote, signal.SIGKILL)
            assert ends(child), "the kernel ends it"
            with pytest.raises(EnvError, match="step: its process is gone"):
                await say_hello(host)
            pool.give_back(host, reusable=False)
            host = await pool.take()
            await reset(host)
            assert (await say_hello(host)).moves[-1].state.over
            pool.give_back(host, reusable=True)

    within(SECONDS, scene())
