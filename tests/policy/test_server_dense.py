"""A real vLLM with a tiny dense model and a tied output layer, in a process of its own, against transformers.

Running requests keep their keys and values when weights change (`kv_on_update = "keep"`).
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from policy_builders import RunningServer, adapted, dense_tied_model, perturbed, reference_logprobs

from agentgym.policy.client import Completion, PolicyClient, Sampling
from agentgym.protocol import Heartbeat

PROMPT = [2, 40, 41, 42, 1, 3, 50, 51, 52, 53, 1, 4]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("dense")
    running = RunningServer(dense_tied_model(folder / "model"), folder, kv_on_update="keep")
    yield running
    running.stop()


async def together(server: RunningServer, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
    client = PolicyClient([server.address])
    answers = await asyncio.gather(*(client.complete(p, sampling, timeout=60.0) for p in prompts))
    client.close()
    return answers


def test_a_dense_model_has_no_routes(server: RunningServer):
    [answer] = asyncio.run(together(server, [PROMPT], Sampling(max_tokens=5)))
    assert answer.routes is None


def test_a_tied_output_layer_follows_live_updates(server: RunningServer, tmp_path: Path):
    for version, model in enumerate([server.model, perturbed(server.model, tmp_path / "v1", seed=1)]):
        if version:
            server.load(version, model)
        for answer in asyncio.run(together(server, [PROMPT] * 3, Sampling(max_tokens=30))):
            assert np.abs(answer.logprobs - reference_logprobs(model, PROMPT, answer.tokens)).max() <= 1e-5
            assert answer.versions.tolist() == [version] * 30


def test_adapters_leave_a_tied_output_layer_right(server: RunningServer, tmp_path: Path):
    file, merged = adapted(server.model, tmp_path / "v1", seed=1)
    server.load(1, file)
    for answer in asyncio.run(together(server, [PROMPT] * 3, Sampling(max_tokens=30))):
        assert np.abs(answer.logprobs - reference_logprobs(merged, PROMPT, answer.tokens)).max() <= 1e-5


def test_kept_keys_and_values_leave_the_switch_exact(server: RunningServer, tmp_path: Path):
    old, new = (perturbed(server.model, tmp_path / f"v{v}", seed=v) for v in (2, 3))
    server.load(2, old)
    prompts = [[*PROMPT, 60 + i] for i in range(4)]

    async def play() -> list[Completion]:
        client = PolicyClient([server.address])
        long = [
            asyncio.create_task(client.complete(p, Sampling(max_tokens=400), timeout=60.0)) for p in prompts
        ]
        # When this one is done, the others are in the middle.
        await client.complete(PROMPT, Sampling(max_tokens=40), timeout=60.0)
        await asyncio.to_thread(server.load, 3, new)
        answers = await asyncio.gather(*long)
        client.close()
        return answers

    for prompt, answer in zip(prompts, asyncio.run(play()), strict=True):
        switch = answer.versions.tolist().index(3)
        assert answer.versions.tolist() == [2] * switch + [3] * (400 - switch)
        under_old = np.abs(answer.logprobs - reference_logprobs(old, prompt, answer.tokens)) <= 1e-4
        assert under_old[:switch].all()
        assert not under_old[switch : switch + 5].all()


def test_the_prefix_cache_never_mixes_weights(server: RunningServer, tmp_path: Path):
    one, other = (perturbed(server.model, tmp_path / f"v{v}", seed=v) for v in (4, 5))
    prompt = PROMPT * 25  # longer than two blocks of the cache
    # A resumed trainer makes version 4 again, from other weights; a pool goes back to an earlier snapshot.
    for version, model in ((4, one), (4, other), (5, one), (4, other), (4, one)):
        server.load(version, model)
        for _ in range(2):  # the second one finds the first one's prompt
            (answer,) = asyncio.run(together(server, [prompt], Sampling(max_tokens=20)))
            assert np.abs(answer.logprobs - reference_logprobs(model, prompt, answer.tokens)).max() <= 1e-5
            assert answer.versions.tolist() == [version] * 20


def test_heartbeats_say_what_the_server_did_and_how_full_it_is(server: RunningServer):
    before = server.expect(Heartbeat).stats
    asyncio.run(together(server, [PROMPT] * 8, Sampling(max_tokens=400)))
    beats = [server.expect(Heartbeat).stats]
    while beats[-1]["requests"] < before["requests"] + 8:
        beats.append(server.expect(Heartbeat).stats)
    assert beats[-1]["tokens"] >= before["tokens"] + 3200
    assert all(0.0 <= beat["busy"] <= 1.0 for beat in beats)
    assert max(beat["running"] for beat in beats) == 8.0
    assert 0.0 < max(beat["kv_usage"] for beat in beats) < 0.1
    assert 0.0 in (server.expect(Heartbeat).stats["kv_usage"] for _ in range(10))


def test_a_drained_server_ends(server: RunningServer):
    processes = server.process_ids()
    assert len(processes) == 2
    assert server.drain() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
