"""`agentgym replay` and `agentgym fork`: the answers of a record, given to its environment once more."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from rich.console import Console

from agentgym.config import EnvConfig
from agentgym.episode import Episode
from agentgym.episode_json import EpisodeWriter, record_of
from agentgym.errors import ConfigError, EnvError
from agentgym.evaluation.summary import print_summary
from agentgym.messages import AgentId
from agentgym.policy.template import ChatTokenizer
from agentgym.prefix import prefix_of
from agentgym.protocol import Lease, Recorded
from agentgym.registry import spec
from agentgym.replay.record import Log, RecordedPolicy, RecordedSpeaker, first_difference
from agentgym.replay.source import Source, read_source, turns_of, was_sampled
from agentgym.rewards import Rewards
from agentgym.worker.local_server import local_server, tiny_tokenizer
from agentgym.worker.pool import EnvPool
from agentgym.worker.rollout import Play, Rollout, SeatMaker
from agentgym.worker.seat import Seat
from agentgym.worker.seating import Seating, Served
from agentgym.worker.table import Opening

MOST_AT_ONCE = 64
"""Continuations that are played at the same time."""


def replay(path: Path, *, number: int, console: Console) -> bool:
    """Play a recorded episode again; print the first difference, or that there is none, and return whether that is so.

    Raises:
        ConfigError: there is no such episode.
    """
    source = read_source(path, number)
    cast, log = Cast(source), Log(source.episode)
    played = asyncio.run(_play_again(cast, log))
    difference = first_difference(log, played, cast.decode)
    title = f"{source.env.id}, seed {source.episode.seed}"
    if difference is None:
        answers = sum(len(t.turns) for t in source.episode.trajectories)
        end = source.episode.end_reason.value
        console.print(f"{title}: the same again, {answers} answers to the end by {end!r}", highlight=False)
    else:
        console.print(f"{title}: the first difference is at {difference}", highlight=False, markup=False)
    return difference is None


def fork(path: Path, *, number: int, turn: int, count: int, out: Path | None, console: Console) -> None:
    """Continue a recorded episode in `count` ways, after the first `turn` answers of each agent; print what came of it.

    Raises:
        ConfigError: there is no such episode or turn, or its policies cannot go on.
        EnvError: the environment did not come to the same turn again.
        PolicyError: a policy server did not start.
    """
    source = read_source(path, number)
    longest = max((len(turns_of(source.episode, a)) for a in source.episode.agents), default=0)
    if not 0 <= turn < longest:
        raise ConfigError(
            f"--turn {turn}: the episode has {longest} answers of an agent; give 0 to {longest - 1}"
        )
    kinds = {name: source.policies[name].kind for name in map(source.policy_of, source.episode.agents)}
    for name, kind in kinds.items():
        if kind in ("pool", "endpoint"):
            raise ConfigError(
                f"policies.{name} is a {kind}, which cannot go on from the middle of an episode"
            )
    if "model" not in kinds.values():
        raise ConfigError("no model plays in this episode, and scripted policies would go on as they did")
    episodes = asyncio.run(_fork(source, turn, count, sorted(n for n, k in kinds.items() if k == "model")))
    print_summary(episodes, count, console)
    if out is not None:
        cast = Cast(source)
        writer = EpisodeWriter(
            out, config=source.config, group=count, forked={"from": str(path), "turn": turn}
        )
        for episode in episodes:
            writer.write(record_of(episode, cast.tokenizer_of("").decode))
        writer.close()
        console.print(f"episodes  agentgym show {out}", highlight=False)


async def continuations(source: Source, live: Mapping[str, Served], turn: int, count: int) -> list[Episode]:
    """Return `count` plays that have the first `turn` answers of each agent in common with the record.

    They are the members of one group, and can be compared. `live` are the policies that go on, by name.

    Raises:
        EnvError: the environment did not come to the same turn again.
    """
    slots = min(count, MOST_AT_ONCE)
    pool, free = EnvPool(source.env, slots=slots), asyncio.Semaphore(slots)
    env_spec = spec(source.env.id)
    seating = Seating(
        source.env,
        env_spec,
        {name: policy for name, policy in source.policies.items() if policy.kind in ("model", "scripted")},
        sampling=source.sampling,
        tokenizer=Cast(source).tokenizer_of(""),
        served=live,
        trained={source.policy_of(t.agent) for t in source.episode.trajectories if t.trainable},
    )
    rewards, prefix = Rewards.of(source.env, env_spec), prefix_of(source.episode, turn)

    async def one(member: int) -> Play:
        async with free:
            lease = _lease(source.episode, member, prefix)
            return await _play(lease, pool, env=source.env, make_seat=seating.seat, rewards=rewards)

    try:
        plays = await asyncio.gather(*map(one, range(count)))
    finally:
        await pool.close()
    diverged = sum(play.diverged for play in plays)
    if diverged:
        raise EnvError(
            f"the episode cannot be continued: in {diverged} of {count} plays its environment did not do the same "
            "again; `agentgym replay` shows where"
        )
    return [play.episode for play in plays]


class Cast:
    """Seats the agents of a record, with its answers."""

    def __init__(self, source: Source) -> None:
        """Prepare for a play."""
        self.source = source
        self.env_spec = spec(source.env.id)
        self.tokenizer_of = cache(self._tokenizer)

    def decode(self, agent: AgentId, tokens: Sequence[int]) -> str:
        """Return the text of an agent's tokens."""
        return self.tokenizer_of(self.source.policy_of(agent)).decode(tokens)

    def seat(self, agent: AgentId, opening: Opening, lease: Lease, log: Log) -> Seat:
        """Return the seat of an agent in one play."""
        source, policy = self.source, self.source.policy_of(agent)
        mine = [t for t in source.episode.trajectories if t.agent == agent]
        known = source.policies.get(policy)
        tokenizer = self.tokenizer_of(policy)
        policies, served, speakers = {}, {}, {}
        if known is not None and known.kind in ("model", "pool"):
            policies[policy] = known
            served[policy] = Served(RecordedPolicy(agent, log), tokenizer, source.server.max_model_len)
        if not any(map(was_sampled, mine)):
            speakers[policy] = RecordedSpeaker(agent, log)
        return Seating(
            source.env,
            self.env_spec,
            policies,
            sampling=source.sampling,
            tokenizer=tokenizer,
            served=served,
            speakers=speakers,
            trained=[policy] if any(t.trainable for t in mine) else [],
        ).seat(agent, opening, lease)

    def _tokenizer(self, policy: str) -> ChatTokenizer:
        """Return the tokenizer of a policy; the words of others are spelled as the trained one reads them."""
        models = self.source.models
        for name in (policy, *self.source.config["policies_to_train"], *models):
            if name in models:
                return ChatTokenizer(models[name])
        return tiny_tokenizer()


async def _play_again(cast: Cast, log: Log) -> Episode:
    source = cast.source

    def seat(agent: AgentId, opening: Opening, lease: Lease) -> Seat:
        return cast.seat(agent, opening, lease, log)

    rewards, lease = Rewards.of(source.env, cast.env_spec), _lease(source.episode, source.episode.member, {})
    pool = EnvPool(source.env, slots=1)
    try:
        play = await _play(lease, pool, env=source.env, make_seat=seat, rewards=rewards)
        return play.episode
    finally:
        await pool.close()


def _lease(record: Episode, member: int, prefix: dict[AgentId, list[Recorded]]) -> Lease:
    return Lease(
        lease_id=member,
        task_index=record.task_index,
        seed=record.seed,
        group_id=record.group_id,
        member=member,
        sampling_seed=record.sampling_seed,
        policies={"*": "", **{t.agent: t.policy for t in record.trajectories}},
        prefix=prefix,
    )


async def _play(
    lease: Lease, pool: EnvPool, *, env: EnvConfig, make_seat: SeatMaker, rewards: Rewards
) -> Play:
    host = await pool.take()
    reusable = False
    try:
        play = await Rollout(lease, host, config=env, make_seat=make_seat, rewards=rewards).play()
        reusable = play.reusable
    finally:
        pool.give_back(host, reusable=reusable)
    return play


async def _fork(source: Source, turn: int, count: int, names: list[str]) -> list[Episode]:
    async with contextlib.AsyncExitStack() as stack:
        live = {}
        for name in names:
            server = await stack.enter_async_context(local_server(source.models[name], source.server))
            live[name] = server.served
        return await continuations(source, live, turn, count)
