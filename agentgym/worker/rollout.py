"""One play: an environment and the policies of its agents, from a lease to an episode.

Whatever happens, `play` returns an episode: what an environment or a policy does wrong is data on it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from agentgym.config import EnvConfig
from agentgym.episode import EndReason, Episode, Status, status_of
from agentgym.errors import DivergedError, EnvError, IntegrityError, ModelError, PolicyError
from agentgym.messages import AgentId, Message
from agentgym.policy.scripted import Script
from agentgym.prefix import Prefix
from agentgym.protocol import Lease
from agentgym.rewards import Rewards, Score
from agentgym.worker.driver import Outcome, State
from agentgym.worker.pool import Host
from agentgym.worker.seat import Seat
from agentgym.worker.table import Hop, Move, Opening

SeatMaker = Callable[[AgentId, Opening, Lease], Seat]
NO_REWARDS = Rewards()

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Play:
    """What `play` returns."""

    episode: Episode
    reusable: bool
    """Whether the environment may be used again: False after a failure or a timeout."""
    diverged: bool = False
    """Whether it was to be a fork, and was played from the start because the environment did not do the same again."""


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
        sampling_seed=lease.sampling_seed,
    )


class Rollout:
    """Plays the episode of one lease."""

    def __init__(
        self,
        lease: Lease,
        host: Host,
        *,
        config: EnvConfig,
        make_seat: SeatMaker,
        rewards: Rewards = NO_REWARDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the play; nothing is called yet."""
        self._lease = lease
        self._host = host
        self._config = config
        self._make_seat = make_seat
        self._rewards = rewards
        self._clock = clock
        self._seats: dict[AgentId, Seat] = {}
        self._truncated = self._env_scores = False
        self._prefix = Prefix(lease.prefix)
        self._diverged = False

    async def play(self) -> Play:
        """Play to the end and return the episode, a failed one if need be."""
        started = self._clock()
        reason, error = await self._ending()
        episode = self._episode(reason, error, self._clock() - started)
        if status_of(reason) is not Status.FAILED:
            try:
                episode = await self._scored(episode)
            except EnvError as failure:
                self._log(failure)
                episode = replace(
                    episode, end_reason=EndReason.ENV_FAILED, error=f"{self._config.id}: {failure}"
                )
        clean = episode.status is not Status.FAILED and reason is not EndReason.TIMEOUT
        return Play(episode, reusable=clean, diverged=self._diverged)

    async def _ending(self) -> tuple[EndReason, str]:
        """Play all turns; return why the episode ended, and what failed if something did."""
        try:
            async with asyncio.timeout(self._config.episode_timeout):
                reason = await self._turns()
                if not self._prefix.over:
                    raise DivergedError(f"it ended by {reason.value!r} before the turn of the record")
                return reason, ""
        except DivergedError as difference:
            _logger.info(
                "%s, seed %d is played from the start: %s", self._config.id, self._lease.seed, difference
            )
            self._prefix, self._seats, self._truncated, self._diverged = Prefix({}), {}, False, True
            return await self._ending()
        except EnvError as failure:  # before TimeoutError, which EnvTimeoutError is too
            self._log(failure)
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
            sampling_seed=self._lease.sampling_seed,
        )

    async def _scored(self, episode: Episode) -> Episode:
        """Return the episode with what reward functions give; they run where the environment's calls run."""
        rewards = self._rewards
        if not (self._env_scores or rewards.paths):
            return episode
        if self._host.stuck:
            raise EnvError("the episode cannot be scored: the environment never returned from its last call")
        scores = await self._host.run(
            "scoring", self._config.reward_timeout, "score", episode, list(rewards.paths)
        )
        return rewards.credit(episode, [Score(*score) for score in scores])

    def _log(self, failure: EnvError) -> None:
        """Log where users' code failed: the traceback here, or the one that came with the error from a process."""
        notes = "".join(f"\n{note}" for note in getattr(failure, "__notes__", []))
        cause = failure.__cause__
        _logger.warning(
            "%s, seed %d: %s%s", self._config.id, self._lease.seed, failure, notes, exc_info=cause
        )

    async def _turns(self) -> EndReason:
        hop: Hop = await self._host.run("reset", self._config.reset_timeout, "reset", self._lease.seed)
        self._env_scores = hop.scores
        while True:
            scripts = self._meet(hop)
            for move in hop.moves:
                cut = self._take_in(move)
                if cut is not None:
                    self._credit(move.outstanding)
                    return cut
            if hop.failure is not None:
                raise hop.failure
            state = hop.moves[-1].state
            if state.over:
                return EndReason.ENV_TRUNCATED if self._truncated else EndReason.TERMINATED
            answers = await self._answers(state)
            hop = await self._host.run("step", self._config.step_timeout, "act", answers, scripts)

    def _meet(self, hop: Hop) -> dict[AgentId, Script]:
        """Seat the agents that are new; return the scripts of those that play where the environment is."""
        scripts = {}
        for agent, opening in hop.openings.items():
            seat = self._seats[agent] = self._make_seat(agent, opening, self._lease)
            if seat.script is not None:
                scripts[agent] = seat.script
        return scripts

    def _take_in(self, move: Move) -> EndReason | None:
        """Record a move; return why the play ends here, if one of the agents cannot go on."""
        for agent, message in move.answers.items():
            self._seats[agent].say(message)
        self._credit(move.state.outcomes)
        for request in move.state.requests:
            cut = self._seats[request.agent].hear(request.messages)
            if cut is not None:
                return cut
        return None

    async def _answers(self, state: State) -> dict[AgentId, Message]:
        """Return the answers of those whom a model plays."""
        agents = [r.agent for r in state.requests if self._seats[r.agent].script is None]
        if not self._prefix.over:
            again = self._prefix.next({agent: self._seats[agent].prompt for agent in agents})
            if again is not None:
                return {agent: self._seats[agent].repeat(recorded) for agent, recorded in again.items()}
        if len(agents) <= 1:  # nearly always; saves a task per turn
            return {agent: await self._seats[agent].answer() for agent in agents}
        answers = await asyncio.gather(
            *(self._seats[agent].answer() for agent in agents), return_exceptions=True
        )
        by_agent: dict[AgentId, Message] = {}
        for agent, answer in zip(agents, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            by_agent[agent] = answer
        return by_agent

    def _credit(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            reward = self._rewards.weigh(outcome.reward, outcome.info.get("rewards", {}))
            self._seats[outcome.agent].earn(reward, outcome.info)
            self._truncated |= outcome.truncated
