"""`agentgym play`: one environment, one policy, on the terminal."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import zmq
from rich.console import Console
from rich.markdown import Markdown

from agentgym.config import EnvConfig, PolicyConfig, SamplingConfig
from agentgym.errors import ConfigError, PolicyError, PolicyUnavailableError
from agentgym.metrics import render_episode
from agentgym.model import check_model
from agentgym.policy.client import PolicyClient
from agentgym.policy.template import ChatTokenizer
from agentgym.protocol import Lease
from agentgym.registry import make, spec
from agentgym.rewards import Rewards
from agentgym.tiny_model import init_model
from agentgym.worker.calls import EnvCalls
from agentgym.worker.driver import DRIVERS
from agentgym.worker.rollout import Rollout
from agentgym.worker.seating import Seating, Served

START_SECONDS = 180.0
MAX_TOKENS = 128
SCRIPTED = "scripted"
"""As a policy's name: the last one that the environment lists, by custom its best."""


def play(env_id: str, *, policy: str, episodes: int, seed: int) -> None:
    """Play `episodes` episodes and print them.

    Raises:
        ConfigError: there is no such environment or scripted policy.
        ModelError: `policy` is a folder without a complete model.
        PolicyError: the policy server did not start.
    """
    with tempfile.TemporaryDirectory(prefix="agentgym-") as scratch:
        model = Path(policy) if Path(policy).is_dir() else None
        if model is not None:
            check_model(model)
            asyncio.run(_play_served(env_id, model, episodes, seed, Path(scratch)))
        else:
            # A scripted policy needs no model; the tiny one's tokenizer writes its record.
            tokenizer_of = Path(scratch) / "model"
            init_model(tokenizer_of)
            asyncio.run(_play(env_id, None, policy, ChatTokenizer(tokenizer_of), 1 << 20, episodes, seed))


async def _play_served(env_id: str, model: Path, episodes: int, seed: int, scratch: Path) -> None:
    address = f"ipc://{scratch}/server"
    log = scratch / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "agentgym", "serve", "--model", str(model), "--bind", address,
             "--parent-pid", str(os.getpid())],
            stdout=output, stderr=output,
        )  # fmt: skip
    client = PolicyClient([address], context=zmq.Context())
    try:
        context = await _wait_for(client, address, server, log)
        await _play(env_id, client, str(model), ChatTokenizer(model), context, episodes, seed)
    finally:
        client.close()
        server.terminate()
        server.wait()


async def _wait_for(client: PolicyClient, address: str, server: subprocess.Popen[bytes], log: Path) -> int:
    """Return the context length of the server once it answers."""
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            return (await client.health(address, timeout=1.0)).max_model_len
        except (PolicyError, PolicyUnavailableError):
            await asyncio.sleep(0.2)
    raise PolicyError(f"the policy server did not start:\n{log.read_text()[-2000:]}")


async def _play(
    env_id: str,
    client: PolicyClient | None,
    policy: str,
    tokenizer: ChatTokenizer,
    context: int,
    episodes: int,
    seed: int,
) -> None:
    env_spec = spec(env_id)
    if policy == SCRIPTED:
        if not env_spec.scripted:
            raise ConfigError(
                f"{env_id} has no scripted policy; name one as 'module:Class', or a model's folder"
            )
        policy = list(env_spec.scripted)[-1]
    calls = EnvCalls(4)
    config = EnvConfig(id=env_id)
    rewards = Rewards.of(config, env_spec)
    driver = DRIVERS[env_spec.kind](make(env_id))
    seating = Seating(
        config,
        env_spec,
        {policy: PolicyConfig(model=policy) if client else PolicyConfig(scripted=policy)},
        sampling=SamplingConfig(max_tokens=MAX_TOKENS),
        tokenizer=tokenizer,
        served={policy: Served(client, tokenizer, context)} if client else {},
    )
    console = Console()
    for number in range(episodes):
        lease = Lease(
            lease_id=number,
            task_index=number,
            seed=seed + number,
            group_id=number,
            member=0,
            sampling_seed=number,
            policies={"*": policy},
        )
        rollout = Rollout(lease, driver, config=config, calls=calls, make_seat=seating.seat, rewards=rewards)
        episode = (await rollout.play()).episode
        console.print(Markdown(render_episode(episode, tokenizer.decode)))
    driver.close()
