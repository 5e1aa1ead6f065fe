import asyncio
import time

import pytest

from agentgym.errors import RunError
from agentgym.simulation.clock import run_virtually


def test_an_hour_passes_at_once_and_sleepers_wake_in_order() -> None:
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((name, asyncio.get_running_loop().time()))

    async def scene() -> None:
        await asyncio.gather(sleeper("late", 3600.0), sleeper("early", 1.5), sleeper("middle", 1800.0))

    begun = time.monotonic()
    run_virtually(scene())
    assert woken == [("early", 1.5), ("middle", 1800.0), ("late", 3600.0)]
    assert time.monotonic() - begun < 60.0


def test_deadlines_are_in_virtual_time() -> None:
    async def scene() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(500.0):
                await asyncio.sleep(501.0)
        return asyncio.get_running_loop().time()

    assert run_virtually(scene()) == 500.0


def test_a_function_for_a_thread_runs_at_once() -> None:
    async def scene() -> tuple[int, float]:
        return await asyncio.to_thread(max, 3, 4), asyncio.get_running_loop().time()

    assert run_virtually(scene()) == (4, 0.0)


def test_a_deadlock_is_said_and_not_waited_for() -> None:
    async def scene() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RunError, match="stands still"):
        run_virtually(scene())
