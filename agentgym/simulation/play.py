"""One simulated play: turns, tokens and seconds that are drawn, in a record like that of a real one."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

from agentgym.config import Config
from agentgym.episode import NOT_SAMPLED, REPLAYED, EndReason, Episode, Trajectory, Turn
from agentgym.messages import AgentId, assistant
from agentgym.protocol import Lease, Recorded
from agentgym.simulation.engine import Spans
from agentgym.simulation.quantity import draw_of

MAX_TURNS = 32
"""Of environments that name no limit."""
SILENCE = assistant("")

Ask = Callable[[str, int, int, int], Awaitable[Spans]]
"""Samples an answer: the policy, the tokens of the prompt that are new and those that are not, those to be sampled."""


@dataclass(slots=True)
class _Seat:
    agent: AgentId
    policy: str
    served: bool
    trainable: bool
    recorded: Iterator[Recorded]
    """Of a fork: the answers that are given first."""
    tokens: int = 0
    answers: list[tuple[int, int, Spans, str]] = field(default_factory=list)
    """(first token, token after the last, versions, why it ended) of each."""


class Play:
    """Plays a lease. What is drawn depends on the run's seed and the lease's place alone, not on who plays it when."""

    def __init__(self, lease: Lease, config: Config, agents: Sequence[AgentId], ask: Ask) -> None:
        """Prepare the play of a lease by these agents."""
        self._lease = lease
        self._config = config
        self._ask = ask
        self._rng: Generator = np.random.default_rng([config.run.seed, lease.group_id, lease.member])
        self._seats = [self._seat(agent) for agent in agents]
        settings = config.simulation
        self._env_seconds = draw_of(settings.env_seconds)
        self._prompt_tokens = draw_of(settings.prompt_tokens)
        self._answer_tokens = draw_of(settings.answer_tokens)

    async def play(self) -> Episode:
        """Play to the end."""
        rng, config = self._rng, self._config
        begun = max(map(len, self._lease.prefix.values()), default=1)
        turns = max(begun, round(draw_of(config.simulation.turns)(rng)))
        fails = rng.random() < config.simulation.failed_plays
        limit = config.env.max_turns or MAX_TURNS
        try:
            async with asyncio.timeout(config.env.episode_timeout):
                cut = await self._turns(min(turns, limit))
            reason = cut or (EndReason.TERMINATED if turns <= limit else EndReason.MAX_TURNS)
        except TimeoutError:
            reason = EndReason.TIMEOUT
        return self._episode(EndReason.ENV_FAILED if fails else reason)

    async def _turns(self, turns: int) -> EndReason | None:
        await asyncio.sleep(self._env_seconds(self._rng))
        for _ in range(turns):
            for seat in self._seats:
                if not await self._answer(seat):
                    return EndReason.CONTEXT
            await asyncio.sleep(self._env_seconds(self._rng))
        return None

    async def _answer(self, seat: _Seat) -> bool:
        """Let an agent answer; False where its context is full."""
        config, rng = self._config, self._rng
        prompt = max(1, round(self._prompt_tokens(rng)))
        room = min(config.server.max_model_len, config.env.max_tokens or 2**31) - seat.tokens - prompt
        if room < 1:
            return False
        answer = max(1, min(round(self._answer_tokens(rng)), config.sampling.max_tokens, room))
        spans, finish = [(0, NOT_SAMPLED)], "stop"
        recorded = next(seat.recorded, None)
        if recorded is not None and recorded["tokens"]:
            answer, finish = len(recorded["tokens"]), REPLAYED
        elif seat.served and not self._lease.teacher:
            spans = await self._ask(seat.policy, prompt, seat.tokens, answer)
        first = seat.tokens + prompt
        seat.tokens = first + answer
        seat.answers.append((first, seat.tokens, spans, finish))
        return True

    def _seat(self, agent: AgentId) -> _Seat:
        config = self._config
        policy = self._lease.policies.get(agent) or self._lease.policies["*"]
        name = policy.partition("@")[0]
        recorded = iter(self._lease.prefix.get(agent, ()))
        return _Seat(agent, policy, name in config.served, name in config.policies_to_train, recorded)

    def _episode(self, reason: EndReason) -> Episode:
        lease, failed = self._lease, reason is EndReason.ENV_FAILED
        seats = [seat for seat in self._seats if seat.answers and not failed]
        trajectories = tuple(_trajectory(seat, float(self._rng.integers(2))) for seat in seats)
        return Episode(
            env_id=self._config.env.id,
            task_index=lease.task_index,
            seed=lease.seed,
            group_id=lease.group_id,
            member=lease.member,
            end_reason=reason,
            trajectories=trajectories,
            checksums=tuple(t.checksum() for t in trajectories),
            error="simulated" if failed else "",
            sampling_seed=lease.sampling_seed,
        )


def _trajectory(seat: _Seat, reward: float) -> Trajectory:
    K = seat.answers[-1][1]
    mask, versions = np.zeros(K, np.bool_), np.full(K, NOT_SAMPLED, np.int32)
    for first, end, spans, _ in seat.answers:
        mask[first:end] = True
        for start, version in spans:
            versions[first + start : end] = version
    return Trajectory(
        agent=seat.agent,
        policy=seat.policy,
        trainable=seat.trainable,
        tokens=np.zeros(K, np.int32),
        loss_mask=mask,
        logprobs=np.zeros(K, np.float32),
        versions=versions,
        routes=None,
        turns=tuple(
            Turn(first, end, SILENCE, finish, reward if end == K else 0.0, {}, 0.0)
            for first, end, _, finish in seat.answers
        ),
    )
