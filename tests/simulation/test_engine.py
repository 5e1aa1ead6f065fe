import asyncio

import pytest

from agentgym.errors import PolicyUnavailableError
from agentgym.simulation.clock import run_virtually
from agentgym.simulation.engine import Engine, Spans


def now() -> float:
    return asyncio.get_running_loop().time()


async def ended(future: asyncio.Future[Spans]) -> float:
    await future
    return now()


def test_one_request_alone_gets_the_speed_of_one() -> None:
    async def scene() -> float:
        return await ended(Engine(alone=50.0, full=1000.0, slots=100).ask(0.0, 100))

    assert run_virtually(scene()) == pytest.approx(2.0)


def test_a_full_server_gives_all_together_its_full_speed_and_others_wait() -> None:
    async def scene() -> list[float]:
        engine = Engine(alone=50.0, full=1000.0, slots=100)
        return await asyncio.gather(*(ended(engine.ask(0.0, 10)) for _ in range(101)))

    times = run_virtually(scene())
    assert times[:100] == pytest.approx([1.0] * 100)
    assert times[100] == pytest.approx(1.0 + 10 / 50.0)


def test_requests_share_the_speed_however_long_they_are() -> None:
    async def scene() -> tuple[float, float, float]:
        engine = Engine(alone=10.0, full=10.0, slots=2)  # two are half as fast
        short, long = engine.ask(0.0, 10), engine.ask(0.0, 30)
        times = await ended(short), await ended(long)
        engine.look()
        return *times, engine.work

    assert run_virtually(scene()) == pytest.approx((2.0, 4.0, 40.0))


def test_a_prompt_takes_its_share_of_the_time() -> None:
    async def scene() -> float:
        return await ended(Engine(alone=10.0, full=10.0, slots=1).ask(5.0, 10))

    assert run_virtually(scene()) == pytest.approx(1.5)


def test_tokens_have_the_version_that_sampled_them_and_none_is_sampled_while_weights_are_loaded() -> None:
    async def scene() -> tuple[Spans, float]:
        engine = Engine(alone=10.0, full=10.0, slots=1)
        answer = engine.ask(2.0, 20)
        await asyncio.sleep(1.0)
        engine.pause()
        await asyncio.sleep(5.0)
        engine.go_on(3)
        return await answer, now()

    assert run_virtually(scene()) == ([(0, 0), (8, 3)], pytest.approx(7.2))


def test_weights_that_come_during_the_prompt_sample_the_whole_answer() -> None:
    async def scene() -> Spans:
        engine = Engine(alone=10.0, full=10.0, slots=1)
        answer = engine.ask(20.0, 5)
        await asyncio.sleep(1.0)
        engine.go_on(1)
        return await answer

    assert run_virtually(scene()) == [(0, 1)]


def test_who_waits_for_a_server_that_dies_hears_of_it_and_so_does_who_asks_later() -> None:
    async def scene() -> None:
        engine = Engine(alone=10.0, full=10.0, slots=1)
        waiting = [engine.ask(0.0, 10), engine.ask(0.0, 10)]
        engine.close()
        for future in (*waiting, engine.ask(0.0, 10)):
            with pytest.raises(PolicyUnavailableError):
                await future

    run_virtually(scene())


def test_a_request_that_is_given_up_makes_room() -> None:
    async def scene() -> float:
        engine = Engine(alone=10.0, full=10.0, slots=1)
        first, second = engine.ask(0.0, 1000), engine.ask(0.0, 10)
        await asyncio.sleep(1.0)
        first.cancel()
        engine.abort(first)
        return await ended(second)

    assert run_virtually(scene()) == pytest.approx(2.0)
