"""`agentgym play`: one environment, one policy, on the terminal."""

import asyncio
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from agentgym.config import EnvConfig, SamplingConfig, ServerConfig
from agentgym.errors import ConfigError
from agentgym.metrics import render_episode
from agentgym.model import check_model
from agentgym.policy.client import Policy
from agentgym.policy.template import ChatTokenizer
from agentgym.policy_config import PolicyConfig
from agentgym.protocol import Lease
from agentgym.registry import spec
from agentgym.rewards import Rewards
from agentgym.worker.local_server import local_server, tiny_tokenizer
from agentgym.worker.pool import EnvPool
from agentgym.worker.rollout import Rollout
from agentgym.worker.seating import Seating, Served

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
    if Path(policy).is_dir():
        check_model(Path(policy))
        asyncio.run(_play_served(env_id, Path(policy), episodes, seed))
    else:
        asyncio.run(_play(env_id, None, policy, tiny_tokenizer(), 1 << 20, episodes, seed))


async def _play_served(env_id: str, model: Path, episodes: int, seed: int) -> None:
    async with local_server(model, ServerConfig()) as server:
        served = server.served
        await _play(env_id, served.client, str(model), served.tokenizer, served.max_model_len, episodes, seed)


async def _play(
    env_id: str,
    client: Policy | None,
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
    env = EnvConfig(id=env_id)
    rewards = Rewards.of(env, env_spec)
    pool = EnvPool(env, slots=1)
    seating = Seating(
        env,
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
        host = await pool.take()
        play = await Rollout(lease, host, config=env, make_seat=seating.seat, rewards=rewards).play()
        pool.give_back(host, reusable=play.reusable)
        console.print(Markdown(render_episode(play.episode, tokenizer.decode)))
    await pool.close()
