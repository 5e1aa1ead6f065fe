"""A real vLLM with a tiny mixture of experts, in a process of its own, against transformers.

Running requests compute their keys and values anew when weights change (`kv_on_update = "recompute"`).
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from policy_builders import (
    RunningServer,
    adapted,
    gone,
    moe_model,
    perturbed,
    reference_logprobs,
    same_routes,
)
from safetensors.numpy import load_file, save_file

from agentgym.adapters import DOWN, UP, adapter_metadata
from agentgym.errors import PolicyError
from agentgym.policy.client import Completion, PolicyClient, Sampling
from agentgym.protocol import Error, Healthy, Loaded, LoadWeights
from agentgym.wire import open_socket, unpack

PROMPT = [2, 40, 41, 42, 1, 3, 50, 51, 52, 53, 1, 4]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("moe")
    running = RunningServer(moe_model(folder / "model"), folder, kv_on_update="recompute")
    yield running
    running.stop()


def complete(
    server: RunningServer, prompt: list[int], sampling: Sampling, routes_start: int = 0
) -> Completion:
    async def ask() -> Completion:
        client = PolicyClient([server.address])
        try:
            return await client.complete(prompt, sampling, routes_start=routes_start, timeout=60.0)
        finally:
            client.close()

    return asyncio.run(ask())


def test_logprobs_are_those_of_transformers(server: RunningServer):
    answer = complete(server, PROMPT, Sampling(max_tokens=40))
    expected = reference_logprobs(server.model, PROMPT, answer.tokens)
    assert np.abs(answer.logprobs - expected).max() <= 1e-5
    assert answer.finish_reason == "length"
    assert answer.versions.tolist() == [0] * 40


def test_logprobs_are_those_of_the_tempered_distribution(server: RunningServer):
    answer = complete(server, PROMPT, Sampling(max_tokens=20, temperature=0.5))
    expected = reference_logprobs(server.model, PROMPT, answer.tokens, temperature=0.5)
    assert np.abs(answer.logprobs - expected).max() <= 1e-5


def test_a_stop_token_ends_the_answer_and_is_part_of_it(server: RunningServer):
    first = complete(server, PROMPT, Sampling(max_tokens=10, temperature=0.0))
    stop = int(first.tokens[5])
    stopped = complete(server, PROMPT, Sampling(max_tokens=10, temperature=0.0, stop_token_ids=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.tokens.tolist() == first.tokens[: first.tokens.tolist().index(stop) + 1].tolist()


def test_routes_are_those_of_transformers_over_two_turns(server: RunningServer):
    first = complete(server, PROMPT, Sampling(max_tokens=30))
    ids = [*PROMPT, *first.tokens.tolist()]
    assert first.routes is not None
    assert first.routes.dtype == np.uint8
    assert first.routes.shape == (len(ids) - 1, 2, 2)
    assert same_routes(first.routes, server.model, ids)
    prompt = [*ids, 3, 60, 61, 1, 4]
    second = complete(server, prompt, Sampling(max_tokens=10), routes_start=len(first.routes))
    assert second.routes is not None
    whole = [*prompt, *second.tokens.tolist()]
    assert same_routes(second.routes, server.model, whole, start=len(first.routes))


def test_an_update_in_flight_splits_answers_exactly_at_the_version(server: RunningServer, tmp_path: Path):
    new = perturbed(server.model, tmp_path / "v1", seed=1)
    prompts = [[*PROMPT, 60 + i] for i in range(4)]

    async def play() -> list[Completion]:
        client = PolicyClient([server.address])
        long = [
            asyncio.create_task(client.complete(p, Sampling(max_tokens=400), timeout=120.0)) for p in prompts
        ]
        # When this one is done, the others are in the middle.
        await client.complete(PROMPT, Sampling(max_tokens=40), timeout=60.0)
        await asyncio.to_thread(server.load, 1, new)
        answers = await asyncio.gather(*long)
        client.close()
        return answers

    for prompt, answer in zip(prompts, asyncio.run(play()), strict=True):
        assert set(answer.versions.tolist()) == {0, 1}
        under_old = np.abs(answer.logprobs - reference_logprobs(server.model, prompt, answer.tokens)) <= 1e-4
        under_new = np.abs(answer.logprobs - reference_logprobs(new, prompt, answer.tokens)) <= 1e-4
        switch = answer.versions.tolist().index(1)
        assert under_old[:switch].all()
        assert under_new[switch:].all()
        # The weights differ so much that a token rarely has the same probability under both.
        assert under_old[switch:].mean() < 0.05
        assert under_new[:switch].mean() < 0.05
        # Each token was routed by the weights that sampled the one behind it.
        ids = [*prompt, *answer.tokens.tolist()]
        first_new = len(prompt) + switch - 1
        assert answer.routes is not None
        assert same_routes(answer.routes[:first_new], server.model, ids[: first_new + 1])
        assert same_routes(answer.routes[first_new:], new, ids, start=first_new)
    server.load(2, server.model)


def test_logprobs_and_routes_are_right_after_live_updates(server: RunningServer, tmp_path: Path):
    for version in (3, 4):
        new = perturbed(server.model, tmp_path / f"v{version}", seed=version, scale=0.1)
        server.load(version, new)
        answer = complete(server, PROMPT, Sampling(max_tokens=40))
        assert np.abs(answer.logprobs - reference_logprobs(new, PROMPT, answer.tokens)).max() <= 1e-5
        assert answer.versions.tolist() == [version] * 40
        assert answer.routes is not None
        assert same_routes(answer.routes, new, [*PROMPT, *answer.tokens.tolist()])
    server.tell(LoadWeights(version=5, path=str(server.model)))  # a model folder, as a pool's version 0 is
    assert server.expect(Loaded).version == 5
    answer = complete(server, PROMPT, Sampling(max_tokens=20))
    assert np.abs(answer.logprobs - reference_logprobs(server.model, PROMPT, answer.tokens)).max() <= 1e-5


def test_a_file_with_other_weights_is_refused_and_nothing_changes(server: RunningServer, tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    assert "damaged" in server.load_refused(6, tmp_path / "model.safetensors")
    assert "no weight file" in server.load_refused(6, tmp_path / "missing.safetensors")
    answer = complete(server, PROMPT, Sampling(max_tokens=10))
    assert answer.versions.tolist() == [5] * 10


def test_adapters_stand_for_the_model_folders_weights_with_them_in(server: RunningServer, tmp_path: Path):
    # Other weights are loaded before: nothing of them is left, nor of the adapters before.
    server.load(7, perturbed(server.model, tmp_path / "v7", seed=7))
    for version, matrices in ((8, "_proj"), (9, "o_proj")):
        file, merged = adapted(server.model, tmp_path / f"v{version}", seed=version, matrices=matrices)
        assert file.stat().st_size < (merged / "model.safetensors").stat().st_size / 2
        server.load(version, file)
        answer = complete(server, PROMPT, Sampling(max_tokens=40))
        assert answer.versions.tolist() == [version] * 40
        assert np.abs(answer.logprobs - reference_logprobs(merged, PROMPT, answer.tokens)).max() <= 1e-5
        assert answer.routes is not None
        assert same_routes(answer.routes, merged, [*PROMPT, *answer.tokens.tolist()])


def test_adapters_of_another_model_are_refused_and_nothing_changes(server: RunningServer, tmp_path: Path):
    name = "model.layers.0.self_attn.o_proj"
    rows, columns = load_file(server.model / "model.safetensors")[name + ".weight"].shape

    def refused(base: Path = server.model, **shapes: tuple[int, int]) -> str:
        tensors = {key: np.zeros(shape, np.float32) for key, shape in shapes.items()}
        save_file(tensors, tmp_path / "adapters.safetensors", adapter_metadata(1.0, base))
        return server.load_refused(10, tmp_path / "adapters.safetensors")

    assert "adapts no matrix" in refused(**{"model.layers.7.self_attn.o_proj" + DOWN: (4, columns)})
    assert "do not fit" in refused(**{name + DOWN: (4, columns), name + UP: (rows, 3)})
    other = perturbed(server.model, tmp_path / "other", seed=0)
    assert "other weights than" in refused(other, **{name + DOWN: (4, columns), name + UP: (rows, 4)})
    assert "B None for" in refused(**{name + DOWN: (4, columns)})
    assert complete(server, PROMPT, Sampling(max_tokens=3)).versions.tolist() == [9] * 3


def test_a_prompt_that_does_not_fit_is_refused(server: RunningServer):
    with pytest.raises(
        PolicyError, match=r"500 tokens and an answer of up to 20 do not fit into the context"
    ):
        complete(server, PROMPT * 41 + PROMPT[:8], Sampling(max_tokens=20))


@pytest.mark.parametrize(
    ("prompt", "start", "text"),
    [
        ([], 0, "empty"),
        ([5, 109], 0, "outside 0 to 108"),
        ([5, -1], 0, "outside"),
        ([5, 6], 2, "routes_start"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    server: RunningServer, prompt: list[int], start: int, text: str
):
    with pytest.raises(PolicyError, match=text):
        complete(server, prompt, Sampling(max_tokens=2), routes_start=start)


def test_a_cancelled_request_stops_in_the_engine(server: RunningServer):
    async def play() -> Healthy:
        client = PolicyClient([server.address])
        task = asyncio.create_task(client.complete(PROMPT, Sampling(max_tokens=400), timeout=60.0))
        while (await client.health(server.address, timeout=30.0)).running == 0:
            pass
        task.cancel()
        await asyncio.wait([task])
        while (health := await client.health(server.address, timeout=30.0)).running:
            pass
        client.close()
        return health

    assert asyncio.run(play()).max_model_len == 512


def test_garbage_is_answered_and_the_server_goes_on(server: RunningServer):
    socket = open_socket(zmq.Context.instance(), zmq.DEALER)
    socket.connect(server.address)
    for frames in (
        [b"x"],
        [b"nonsense", b"1", b""],
        [b"generate", b"2", b"\xff\xff"],
        [b"generate", b"3", b"\x80"],
    ):
        socket.send_multipart(frames)
        assert socket.poll(30_000)
        assert isinstance(unpack(socket.recv_multipart()).header, Error)
    socket.close()
    assert len(complete(server, PROMPT, Sampling(max_tokens=3)).tokens) == 3


def test_the_server_and_vllm_die_with_their_parent(server: RunningServer):
    processes = server.process_ids()
    assert len(processes) >= 2
    os.kill(server.parent.pid, signal.SIGKILL)
    assert all(gone(pid) for pid in processes)
