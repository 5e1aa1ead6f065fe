"""What is played on the worker's event loop: in its thread, with the limits of a thread."""

import threading

import pytest
from builders import config_of, within

from agentgym.errors import EnvTimeoutError
from agentgym.messages import assistant
from agentgym.worker.pool import EnvPool


async def nap(seconds: float, timeout: float) -> None:
    pool = EnvPool(config_of("toy_envs:Naps").env, slots=1)
    host = await pool.take()
    hop = await host.run("reset", 5.0, "reset", 1)
    said = hop.moves[0].state.requests[0].messages[0]["content"]
    assert said == f"thread {threading.get_ident()}", "it is called where the loop runs"
    try:
        await host.run("step", timeout, "act", {"agent": assistant(str(seconds))}, {})
    finally:
        pool.give_back(host, reusable=True)
        await pool.close()


def test_a_call_is_made_in_the_thread_of_the_loop() -> None:
    within(10, nap(0.0, 5.0))


def test_a_call_beyond_its_limit_fails_as_it_does_in_a_thread() -> None:
    with pytest.raises(EnvTimeoutError, match=r"step took 0\.\d+ s, and 0\.05 s are allowed"):
        within(10, nap(0.2, 0.05))
