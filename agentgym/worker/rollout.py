"""One play: an environment and the policies of its agents, from a lease to an episode.

Whatever happens, `play` returns an episode: what an environment or a policy does wrong is data on it.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from agentgym.config import EnvConfig
from agentgym.episode import EndReason, Episode, Status, status_of
from agentgym.errors import EnvError, IntegrityError, ModelError, PolicyError
from agentgym.messages import AgentId, Message
from agentgym.protocol import Lease
from agentgym.rewards import Rewards, score
from agentgym.worker.calls import EnvCalls
from agentgym.worker.driver import Driver, Outcome, State
from agentgym.worker.seat import Seat

SeatMaker = Callable[[AgentId, Driver, Lease], Seat]
NO_REWARDS = Rewards()


@dataclass(frozen=True, slots=True)
class Play:
    """What `play` returns."""

    episode: Episode
    reusable: bool
    """Whether the environment may be used again: False after a failure or a timeout."""


def unplayed(lease: Lease, env_id: str, failure: EnvError) -> Episode:
    """Return the failed episode of a lease whose environment could not be made."""
    return Episode(
        env_id=env_id,
        task_index=lease.task_index,
        seed=lease.seed,
        group_id=lease.group_id,
        member=lease.member,
        end_reason=EndReason.ENV_FAILED,
        trajectories=(),
        error=f"{env_id}: {failure}",
    )


class Rollout:
    """Plays the episode of one lease."""

    def __init__(
        self,
        lease: Lease,
        driver: Driver,
        *,
        config: EnvConfig,
        calls: EnvCalls,
        make_seat: SeatMaker,
        rewards: Rewards = NO_REWARDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the play; nothing is called yet."""
        self._lease = lease
        self._driver = driver
        self._config = config
        self._calls = calls
        self._make_seat = make_seat
        self._rewards = rewards
        self._clock = clock
        self._seats: dict[AgentId, Seat] = {}

    async def play(self) -> Play:
        """Play to the end and return the episode, a failed one if need be."""
        started = self._clock()
        reason, error = await self._ending()
        episode = self._episode(reason, error, self._clock() - started)
        if status_of(reason) is not Status.FAILED:
            try:
                episode = await self._scored(episode)
            except EnvError as failure:
                episode = replace(
                    episode, end_reason=EndReason.ENV_FAILED, error=f"{self._config.id}: {failure}"
                )
        clean = episode.status is not Status.FAILED and reason is not EndReason.TIMEOUT
        return Play(episode, reusable=clean)

    async def _ending(self) -> tuple[EndReason, str]:
        """Play all turns; return why the episode ended, and what failed if something did."""
        try:
            async with asyncio.timeout(self._config.episode_timeout):
                return await self._turns(), ""
        except EnvError as failure:  # before TimeoutError, which EnvTimeoutError is too
            return EndReason.ENV_FAILED, f"{self._config.id}: {failure}"
        except ModelError as failure:  # the chat template refuses what the environment said
            return EndReason.ENV_FAILED, f"{self._config.id}: {failure}"
        except (PolicyError, IntegrityError) as failure:  # no answer, or one that does not fit to its prompt
            return EndReason.POLICY_FAILED, str(failure)
        except TimeoutError:
            return EndReason.TIMEOUT, ""

    def _episode(self, reason: EndReason, error: str, seconds: float) -> Episode:
        trajectories = tuple(t for seat in self._seats.values() for t in seat.trajectories())
        return Episode(
            env_id=self._config.id,
            task_index=self._lease.task_index,
            seed=self._lease.seed,
            group_id=self._lease.group_id,
            member=self._lease.member,
            end_reason=reason,
            trajectories=trajectories,
            checksums=tuple(t.checksum() for t in trajectories),
            metrics={"seconds": seconds},
            agent_metrics={seat.agent: seat.metrics for seat in self._seats.values()},
            error=error,
        )

    async def _scored(self, episode: Episode) -> Episode:
        """Return the episode with what reward functions give; they run where the environment's calls run."""
        rewards, driver = self._rewards, self._driver
        if not (driver.scores or rewards.functions):
            return episode
        if self._calls.stuck:
            raise EnvError("the episode cannot be scored: the environment never returned from its last call")
        scores = await self._calls.run(
            "scoring",
            self._config.reward_timeout,
            lambda: [*driver.score(episode), *score(rewards.functions, episode)],
        )
        return rewards.credit(episode, scores)

    async def _turns(self) -> EndReason:
        state = await self._calls.run(
            "reset", self._config.reset_timeout, self._driver.reset, self._lease.seed
        )
        self._credit(state.outcomes)
        truncated = False
        while not state.over:
            answers = await self._answers(state)
            cut = [answer for answer in answers.values() if isinstance(answer, EndReason)]
            if cut:
                timeout = self._config.step_timeout
                self._credit(await self._calls.run("reading rewards", timeout, self._driver.outstanding))
                return cut[0]
            state = await self._calls.run("step", self._config.step_timeout, self._driver.act, answers)
            self._credit(state.outcomes)
            truncated = truncated or any(outcome.truncated for outcome in state.outcomes)
        return EndReason.ENV_TRUNCATED if truncated else EndReason.TERMINATED

    async def _answers(self, state: State) -> dict[AgentId, Message | EndReason]:
        requests = state.requests
        if len(requests) == 1:  # nearly always; saves a task per turn
            request = requests[0]
            return {request.agent: await self._seat(request.agent).answer(request.messages, request.info)}
        answers = await asyncio.gather(
            *(self._seat(r.agent).answer(r.messages, r.info) for r in requests), return_exceptions=True
        )
        by_agent: dict[AgentId, Message | EndReason] = {}
        for request, answer in zip(requests, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            by_agent[request.agent] = answer
        return by_agent

    def _seat(self, agent: AgentId) -> Seat:
        if agent not in self._seats:
            self._seats[agent] = self._make_seat(agent, self._driver, self._lease)
        return self._seats[agent]

    def _credit(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            reward = self._rewards.weigh(outcome.reward, outcome.info.get("rewards", {}))
            self._seat(outcome.agent).earn(reward, outcome.info)
