"""An OpenAI-compatible server as people run it: vLLM's own, with the tiny model, as an opponent."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
from builders import lease_of, within

from agentgym.config import EnvConfig, SamplingConfig
from agentgym.episode import NOT_SAMPLED
from agentgym.errors import PolicyError
from agentgym.messages import system, user
from agentgym.policy.endpoint import Endpoint
from agentgym.policy.template import ChatTokenizer
from agentgym.policy_config import PolicyConfig
from agentgym.registry import spec
from agentgym.tiny_model import init_model
from agentgym.worker.pool import EnvPool
from agentgym.worker.rollout import Rollout
from agentgym.worker.seating import Seating

T = TypeVar("T")
pytestmark = pytest.mark.timeout(600)
TICTACTOE = "agentgym/TicTacToe-v0"
SAMPLING = SamplingConfig(max_tokens=6, temperature=0)
START_SECONDS = 480.0
KEY = "PATH"
"""An environment variable that is always set; its value is the key."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("endpoint") / "model"
    init_model(folder)
    return folder


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = model.parent / "server.log"
    arguments = {
        "model": model, "served-model-name": "judge", "host": "127.0.0.1", "port": port, "dtype": "float32",
        "max-model-len": 256, "max-num-seqs": 8, "kv-cache-memory-bytes": 1 << 26, "api-key": os.environ[KEY],
        "tool-call-parser": "hermes",
    }  # fmt: skip
    options = [f"--{name}={value}" for name, value in arguments.items()]
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options,
             "--enforce-eager", "--enable-auto-tool-choice"],
            stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    try:
        wait_for_health(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


def wait_for_health(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(url, timeout=5.0).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise AssertionError(f"vLLM's server did not start:\n{log.read_text()[-3000:]}")


def policy(url: str, model: str = "judge") -> PolicyConfig:
    return PolicyConfig(endpoint=url, model=model, api_key_env=KEY)


def with_endpoint(config: PolicyConfig, scene: Callable[[Endpoint], Coroutine[Any, Any, T]]) -> T:
    async def play() -> T:
        endpoint = Endpoint("judge", config, SAMPLING)
        try:
            return await scene(endpoint)
        finally:
            await endpoint.close()

    return within(60, play())


def test_vllms_own_server_answers(url: str) -> None:
    talk = [system("Be brief."), user("Hello?")]
    tool = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
    for tools in ([], [{"type": "function", "function": tool}]):
        message, finish = with_endpoint(policy(url), lambda e, t=tools: e.chat(talk, t, timeout=50.0))
        assert (message["role"], finish) in (("assistant", "length"), ("assistant", "stop"))
        assert isinstance(message["content"], str)


def test_what_vllms_own_server_refuses_is_shown(url: str) -> None:
    talk = [user("x" * 300)]
    with pytest.raises(PolicyError, match=r"/v1/chat/completions answered 400: .*256"):
        with_endpoint(policy(url), lambda e: e.chat(talk, [], timeout=50.0))
    with pytest.raises(PolicyError, match=r"answered 404: .*does not exist"):
        with_endpoint(policy(url, "nobody"), lambda e: e.chat([user("x")], [], timeout=50.0))
    without_key = PolicyConfig(endpoint=url, model="judge")
    with pytest.raises(PolicyError, match="answered 401: "):
        with_endpoint(without_key, lambda e: e.chat([user("x")], [], timeout=50.0))


def test_an_episode_against_vllms_own_server_is_recorded_and_not_trained(url: str, model: Path) -> None:
    async def scene() -> Any:
        tokenizer = ChatTokenizer(model)
        seating = Seating(
            EnvConfig(id=TICTACTOE),
            spec(TICTACTOE),
            {"judge": policy(url), "expert": PolicyConfig(scripted="expert")},
            sampling=SAMPLING,
            tokenizer=tokenizer,
            trained=["learner"],
        )
        lease = lease_of(policies={"player_1": "expert", "player_2": "judge"})
        env = EnvConfig(id=TICTACTOE)
        pool = EnvPool(env, slots=1)
        host = await pool.take()
        try:
            rollout = Rollout(lease, host, config=env, make_seat=seating.seat)
            return (await rollout.play()).episode, tokenizer
        finally:
            pool.give_back(host, reusable=True)
            await pool.close()
            await seating.close()

    episode, tokenizer = within(60, scene())
    (judge,) = (t for t in episode.trajectories if t.policy == "judge")
    assert not judge.trainable
    assert (judge.versions == NOT_SAMPLED).all()
    assert not np.any(judge.logprobs)
    turn = judge.turns[0]
    written = tokenizer.decode(judge.tokens[turn.start : turn.end].tolist())
    assert written == turn.message["content"] + "<|end|>"
