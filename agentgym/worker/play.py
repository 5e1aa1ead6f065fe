"""`agentgym play`: one environment on the terminal, each agent played by a scripted policy, a model or a person."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from agentgym.config import EnvConfig, SamplingConfig, ServerConfig
from agentgym.episode import Episode
from agentgym.episode_json import EpisodeRecord, dialogue
from agentgym.episode_print import print_episode
from agentgym.errors import ConfigError
from agentgym.messages import SINGLE_AGENT, AgentId
from agentgym.model import check_model
from agentgym.policy.scripted import load_scripted
from agentgym.policy_config import PolicyConfig
from agentgym.protocol import Lease
from agentgym.registry import EnvSpec, make, spec
from agentgym.rewards import Rewards
from agentgym.worker.human import Human
from agentgym.worker.local_server import local_server, tiny_tokenizer
from agentgym.worker.pool import EnvPool
from agentgym.worker.rollout import Rollout
from agentgym.worker.seating import Seating

MAX_TOKENS = 128
EPISODE_SECONDS = 86_400.0
HUMAN = "human"
"""As a policy's name: the person at the terminal."""
SCRIPTED = "scripted"
"""As a policy's name: the last one that the environment lists, by custom its best."""


@dataclass(frozen=True, slots=True)
class Game:
    """What is played, and by whom."""

    env_id: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    policy: str = SCRIPTED
    """HUMAN, SCRIPTED, a scripted policy's name, "module:Class", or a model's folder."""
    agent: AgentId | None = None
    """Whom `policy` plays; None: the first agent."""
    opponent: str | None = None
    """Who plays the other agents; None: the best scripted policy, or `policy` where there is none."""

    def lineup(self, env_spec: EnvSpec) -> dict[AgentId, str]:
        """Return who plays each agent; "*" is every agent that is not named.

        Raises:
            ConfigError: there is no such agent or policy.
        """
        env = make(self.env_id, **self.kwargs)
        agents = list(getattr(env, "possible_agents", [SINGLE_AGENT]))
        env.close()
        agent = self.agent or agents[0]
        if agent not in agents:
            raise ConfigError(f"{self.env_id} has no agent {agent!r}; its agents are {', '.join(agents)}")
        policy = _named(self.policy, env_spec)
        opponent = SCRIPTED if env_spec.scripted else policy
        lineup = {"*": _named(self.opponent or opponent, env_spec), agent: policy}
        for name in lineup.values():
            if Path(name).is_dir():
                check_model(Path(name))
            elif name != HUMAN:
                load_scripted(name, 0, env_spec=env_spec)
        return lineup if len(agents) > 1 else {"*": policy}


def play(game: Game, *, episodes: int, seed: int, console: Console) -> None:
    """Play and print episodes.

    Raises:
        ConfigError: there is no such environment, agent or scripted policy.
        ModelError: a policy is a folder without a complete model.
        PolicyError: a policy server did not start.
    """
    env_spec = spec(game.env_id)
    lineup = game.lineup(env_spec)
    seeds = range(seed, seed + episodes)
    try:
        asyncio.run(_play(game, env_spec, lineup, seeds, console))
    except KeyboardInterrupt:  # the person has left
        console.print("\nleft", highlight=False)


def _named(policy: str, env_spec: EnvSpec) -> str:
    if policy != SCRIPTED:
        return policy
    if not env_spec.scripted:
        raise ConfigError(
            f"{env_spec.id} has no scripted policy; name one as 'module:Class', or a model's folder"
        )
    return list(env_spec.scripted)[-1]


async def _play(
    game: Game, env_spec: EnvSpec, lineup: dict[AgentId, str], seeds: Sequence[int], console: Console
) -> None:
    # Who thinks at the keyboard is not cut off.
    env = EnvConfig(id=game.env_id, kwargs=game.kwargs, episode_timeout=EPISODE_SECONDS)
    names = sorted(set(lineup.values()) - {HUMAN})
    policies = {n: PolicyConfig(model=n) if Path(n).is_dir() else PolicyConfig(scripted=n) for n in names}
    async with contextlib.AsyncExitStack() as stack:
        served = {}
        for name in names:
            if policies[name].kind == "model":
                server = await stack.enter_async_context(local_server(Path(name), ServerConfig()))
                served[name] = server.served
        tokenizers = {name: one.tokenizer for name, one in served.items()}
        tokenizer = next(iter(tokenizers.values()), None) or tiny_tokenizer()
        seating = Seating(
            env,
            env_spec,
            policies,
            sampling=SamplingConfig(max_tokens=MAX_TOKENS),
            tokenizer=tokenizer,
            served=served,
            speakers={HUMAN: Human(console)},
        )
        pool = EnvPool(env, slots=1)
        stack.push_async_callback(pool.close)
        for number, seed in enumerate(seeds):
            lease = Lease(
                lease_id=number,
                task_index=number,
                seed=seed,
                group_id=number,
                member=0,
                sampling_seed=number,
                policies=lineup,
            )
            episode = await _episode(lease, env, pool, seating, Rewards.of(env, env_spec))
            texts = tuple(
                dialogue(t, tokenizers.get(t.policy, tokenizer).decode) for t in episode.trajectories
            )
            print_episode(EpisodeRecord(episode, texts), console)


async def _episode(
    lease: Lease, env: EnvConfig, pool: EnvPool, seating: Seating, rewards: Rewards
) -> Episode:
    host = await pool.take()
    reusable = False
    try:
        play = await Rollout(lease, host, config=env, make_seat=seating.seat, rewards=rewards).play()
        reusable = play.reusable
    finally:
        pool.give_back(host, reusable=reusable)
    return play.episode
