"""`agentgym eval`: the policies of a configuration on fixed tasks, many episodes at once, recorded as they end.

Tasks come from a stream of their own: the same seeds for every evaluation with the same `run.seed`, and others than
those that are trained on. An episode that fails is recorded like any other; only a policy server that dies ends the
evaluation, and the same command then goes on with what is missing.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from agentgym.config import Config
from agentgym.coordinator.lineup import Lineups, agents_of
from agentgym.episode import EndReason, Episode
from agentgym.episode_json import EpisodeRecord, EpisodeWriter, dialogue, read_episodes
from agentgym.errors import ConfigError, EnvError
from agentgym.evaluation.plan import Plan
from agentgym.evaluation.summary import print_summary
from agentgym.model import check_context, check_model
from agentgym.policy.endpoint import api_key
from agentgym.policy.scripted import load_scripted
from agentgym.protocol import Lease
from agentgym.registry import spec
from agentgym.rewards import Rewards
from agentgym.worker.local_server import local_server, tiny_tokenizer
from agentgym.worker.pool import EnvPool
from agentgym.worker.rollout import Rollout, unplayed
from agentgym.worker.seating import Seating, Served

Key = tuple[int, int]
"""Task and member of an episode."""


def evaluate(plan: Plan, *, out: Path | None, console: Console) -> None:
    """Play what is missing in `out`, if that is given, and print what all of it says.

    Raises:
        ConfigError: a policy or the environment is not as the configuration says, or `out` is of something else.
        ModelError: a model folder is not complete.
        PolicyError: a policy server did not start, or died.
    """
    known = _played(plan, out) if out is not None else {}
    left = [key for key in plan.episode_keys() if key not in known]
    if known:
        console.print(f"{out}: {len(known)} episodes are there, {len(left)} are missing", highlight=False)
    if left:
        lineups = _check(plan.config)
        leases = [lease for lease in plan.leases(lineups) if (lease.task_index, lease.member) not in known]
        writer = EpisodeWriter(out, **plan.header) if out is not None else None
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task(plan.config.env.id, total=len(left))

            def done(record: EpisodeRecord) -> None:
                known[record.episode.task_index, record.episode.member] = record.episode
                if writer is not None:
                    writer.write(record)
                progress.advance(bar)

            try:
                asyncio.run(_play(plan.config, leases, done))
            finally:
                if writer is not None:
                    writer.close()
    print_summary([known[key] for key in sorted(known)], plan.group, console)
    if out is not None:
        console.print(f"episodes  agentgym show {out}", highlight=False)


def _played(plan: Plan, out: Path) -> dict[Key, Episode]:
    """Return what a file holds of a plan; what no policy answered is played again."""
    if not out.exists():
        return {}
    file = read_episodes(out)
    before, now = file.header, plan.header
    differing = [key for key in now if before.get(key) != now[key]]
    if differing:
        if "config" in differing and isinstance(before.get("config"), dict):
            differing += [k for k in now["config"] if before["config"].get(k) != now["config"][k]]
        raise ConfigError(
            f"{out} holds an evaluation with other settings ({', '.join(differing)} differ); give another --out, "
            "or the settings that it was begun with"
        )
    episodes = (record.episode for record in file.records)
    wanted = set(plan.episode_keys())
    return {
        key: e
        for e in episodes
        if e.end_reason is not EndReason.POLICY_FAILED and (key := (e.task_index, e.member)) in wanted
    }


def _check(config: Config) -> Lineups:
    """Look at what the play will need, so that what is wrong is said before a server is started.

    Returns:
        Who plays whom.
    """
    for name in config.mapped:
        policy = config.policies[name]
        match policy.kind:
            case "scripted":
                load_scripted(policy.scripted or "", config.run.seed, env_spec=spec(config.env.id))
            case "model":
                folder = Path(policy.model or "")
                check_context(folder, check_model(folder), config.server.max_model_len)
            case "endpoint":
                api_key(name, policy)
            case "pool":
                raise ConfigError(
                    f"policies.{name} is a pool, which only a training run has; say who plays with --policy {name}=WHO"
                )
    return Lineups(config, agents_of(config))


async def _play(config: Config, leases: Sequence[Lease], done: Callable[[EpisodeRecord], None]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        served: dict[str, Served] = {}
        watches: list[asyncio.Task[Any]] = []
        for name in config.mapped:
            if config.policies[name].kind == "model":
                server = await stack.enter_async_context(local_server(config.model_of(name), config.server))
                served[name] = server.served
                watches.append(asyncio.create_task(server.died()))
        crew = asyncio.create_task(_Tables(config, served, done).play(leases))
        try:
            await asyncio.wait([crew, *watches], return_when=asyncio.FIRST_COMPLETED)
            for task in [*watches, crew]:
                if task.done():
                    task.result()
        finally:
            for task in [*watches, crew]:
                task.cancel()
            await asyncio.gather(*watches, crew, return_exceptions=True)


class _Tables:
    """Plays leases, several at once."""

    def __init__(
        self, config: Config, served: Mapping[str, Served], done: Callable[[EpisodeRecord], None]
    ) -> None:
        self._config = config
        self._spec = spec(config.env.id)
        self._rewards = Rewards.of(config.env, self._spec)
        self._done = done
        self._tokenizers = {name: one.tokenizer for name, one in served.items()}
        self._scripted_tokenizer = next(iter(self._tokenizers.values()), None) or tiny_tokenizer()
        self._seating = Seating(
            config.env,
            self._spec,
            {name: config.policies[name] for name in config.mapped},
            sampling=config.sampling,
            tokenizer=self._scripted_tokenizer,
            served=served,
        )

    async def play(self, leases: Sequence[Lease]) -> None:
        """Play all leases."""
        left, slots = iter(leases), min(self._config.workers.slots, len(leases))
        pool = EnvPool(self._config.env, slots=slots)
        try:
            await asyncio.gather(*(self._work(left, pool) for _ in range(slots)))
        finally:
            await pool.close()
            await self._seating.close()

    async def _work(self, leases: Iterator[Lease], pool: EnvPool) -> None:
        """Play one after the other."""
        for lease in leases:
            try:
                host = await pool.take()
            except EnvError as failure:
                self._record(unplayed(lease, self._config.env.id, failure))
                continue
            reusable = False
            try:
                rollout = Rollout(
                    lease,
                    host,
                    config=self._config.env,
                    make_seat=self._seating.seat,
                    rewards=self._rewards,
                )
                play = await rollout.play()
                reusable = play.reusable
            finally:
                pool.give_back(host, reusable=reusable)
            self._record(play.episode)

    def _record(self, episode: Episode) -> None:
        texts = tuple(
            dialogue(t, self._tokenizers.get(t.policy, self._scripted_tokenizer).decode)
            for t in episode.trajectories
        )
        self._done(EpisodeRecord(episode, texts))
