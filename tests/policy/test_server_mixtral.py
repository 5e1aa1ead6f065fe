"""A real vLLM with an upcycled Llama, which is a Mixtral with a tied output layer, against transformers."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from policy_builders import RunningServer, gone, mixtral_model, perturbed, reference_logprobs, same_routes

from agentgym.policy.client import Completion, PolicyClient, Sampling
from agentgym.protocol import Heartbeat

SILENCE = 20.0
PROMPT = [2, 40, 41, 42, 1, 3, 50, 51, 52, 53, 1, 4]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("mixtral")
    running = RunningServer(mixtral_model(folder), folder, silence=SILENCE)
    yield running
    running.stop()


async def answer(server: RunningServer) -> Completion:
    client = PolicyClient([server.address])
    try:
        return await client.complete(PROMPT, Sampling(max_tokens=40), timeout=60.0)
    finally:
        client.close()


def test_logprobs_and_routes_are_those_of_transformers_before_and_after_an_update(
    server: RunningServer, tmp_path: Path
):
    for version, model in enumerate([server.model, perturbed(server.model, tmp_path / "v1", seed=1)]):
        if version:
            server.load(version, model)
        found = asyncio.run(answer(server))
        assert np.abs(found.logprobs - reference_logprobs(model, PROMPT, found.tokens)).max() <= 1e-5
        assert found.versions.tolist() == [version] * 40
        assert found.routes is not None
        assert found.routes.shape[1:] == (2, 2)
        assert same_routes(found.routes, model, [*PROMPT, *found.tokens.tolist()])


def test_the_server_ends_when_vllms_own_process_stands_still(server: RunningServer) -> None:
    _, *vllm = server.process_ids()
    for pid in vllm:
        os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 3 * SILENCE
    while server.parent.poll() is None and time.monotonic() < deadline:
        server.tell(Heartbeat())  # this coordinator is not silent
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.parent.wait(0.5)
    assert server.parent.poll() == 1
    assert "vLLM's own process has not answered for 20 s" in server.log.read_text()
    assert all(gone(pid) for pid in vllm)
