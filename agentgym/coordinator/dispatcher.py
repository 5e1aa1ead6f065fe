"""Which episodes are played next, and what becomes of the finished ones. No sockets here.

Groups are opened while fewer than the step's capacity are open, waiting or in training, and never more than the
steps that are left can use; of their episodes no more are in play than the policy servers can use. A failed play is
tried again where the policy failed, and given up where the environment did: the same seed would fail again. A task
that fails every time is set aside with its error, and another one is played.
"""

import logging
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from agentgym.config import Config
from agentgym.coordinator.assemble import teaches
from agentgym.coordinator.concurrency import Concurrency
from agentgym.coordinator.forks import Fork, Forks, fork_like
from agentgym.coordinator.groups import Group, GroupBuffer, SetAside
from agentgym.coordinator.leases import LeaseTable, Ticket
from agentgym.coordinator.lineup import EVERYBODY_ELSE, Lineups
from agentgym.coordinator.peers import ServerPeer
from agentgym.coordinator.pools import Pools
from agentgym.coordinator.schedule import Step, sampling_seeds, task_seed
from agentgym.coordinator.surroundings import Store
from agentgym.episode import EndReason, Episode, Status, sampled_tokens
from agentgym.errors import EnvError, RunError
from agentgym.log import worth_saying
from agentgym.messages import AgentId
from agentgym.prefix import replayed
from agentgym.protocol import Lease
from agentgym.ratings import Ratings

RATING_DECAY = 0.99
"""Win rates are over about the last hundred meetings: the trained policy changes."""

FAILING_TASKS = 8
"""Different tasks whose episodes fail one after another before it is the environment's fault, or the policy's."""

_logger = logging.getLogger(__name__)


class Dispatcher:
    """The work of a run: tasks, groups and leases."""

    def __init__(
        self,
        config: Config,
        state: dict[str, Any] | None = None,
        *,
        agents: Sequence[AgentId] = (),
        snapshots: Path = Path("snapshots"),
        store: Store | None = None,
    ) -> None:
        """Begin with the first task, or where `state` of an earlier run says.

        Args:
            config: of the run.
            state: what `state` returned.
            agents: of the environment; empty where it does not name them.
            snapshots: a folder for the pools.
            store: the episodes on disk, those of an earlier run among them.
        """
        state = state or {}
        self._config = config
        self._env_key = crc32(config.env.id.encode())
        self._store = store
        self._stored = deque(store.go_on(int(state.get("step", 0))) if store else [])
        next_task, next_group = int(state.get("next_task", 0)), int(state.get("next_group", 0))
        self._next_task = max([next_task, *(group.task_index + 1 for group in self._stored)])
        self._next_group = max([next_group, *(group.group_id + 1 for group in self._stored)])
        self._again = self._begun(state.get("pending", []), next_group, next_task)
        self._failing: list[int] = []
        """The tasks of the episodes that failed since one succeeded."""
        self._unscored_in_a_row = 0
        self._teaches = partial(teaches, algorithm=config.algorithm, max_tokens=config.sampling.max_tokens)
        self.groups = GroupBuffer(
            timeout=config.rollout.group_timeout,
            scored=bool(config.rollout.group_rewards),
            max_filtered=config.rollout.max_filtered,
            teaches=self._teaches,
        )
        self.leases = LeaseTable(
            max_retries=config.coordinator.max_retries,
            timeout=config.env.patience,
            first_id=max(int(state.get("next_lease", 1)), store.next_lease() if store else 1),
        )
        self.counts: Counter[str] = Counter(state.get("counts", {}))
        """Episodes by status since the run began: ok, truncated, failed; the tokens they sampled; forks that came to
        their turn (forked), and those whose environment did not do the same again (diverged)."""
        self.last_error = ""
        self.ratings = Ratings(decay=RATING_DECAY)
        if "ratings" in state:
            self.ratings.restore(state["ratings"])
        self.concurrency = Concurrency(config)
        self._lineups = Lineups(config, agents)
        self._forks = Forks(config)
        self._lineup: dict[AgentId, str] | None = None
        """Of the next group, which may have to wait for a pool."""
        self._fork: Fork | None = None
        """What the next group begins from, if it is a fork."""
        self.pools = Pools(config, snapshots, self.ratings, state)

    def _begun(
        self, pending: Sequence[Sequence[int]], next_group: int, next_task: int
    ) -> deque[tuple[int, int]]:
        """Return (group id, task) of what the earlier run began, and of which no episode is left.

        What is drawn for a group is drawn by its id, so they keep theirs: those that were `pending` in the checkpoint,
        and those that were opened in order after it.
        """
        groups = {group.group_id for group in self._stored}
        tasks = {group.task_index for group in self._stored}
        ids = (group_id for group_id in range(next_group, self._next_group) if group_id not in groups)
        new = (task for task in range(next_task, self._next_task) if task not in tasks)
        left = ((group_id, task) for group_id, task in pending if group_id not in groups)
        return deque([*left, *zip(ids, new, strict=False)])

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold to go on without losing or repeating a task."""
        return {
            "next_task": self._next_task,
            "next_group": self._next_group,
            "next_lease": self.leases.next_id,
            "pending": [
                *self.groups.pending(),
                *((group.group_id, group.task_index) for group in self._stored),
                *self._again,
            ],
            "counts": dict(self.counts),
            "ratings": self.ratings.state(),
            "pools": self.pools.state(),
        }

    def top_up(self, step: Step, *, steps_left: int, in_training: int) -> None:
        """Open groups for `step`, up to its capacity and to what the `steps_left` steps of its phase need.

        Groups are opened in order: one that must wait for a pool's snapshot holds up those behind it.
        """
        held = self.groups.open + self.groups.ready
        wanted = min(step.capacity - in_training, steps_left * step.groups) - held
        for _ in range(wanted):
            if not self._open_group(step):
                return

    @property
    def may_issue(self) -> bool:
        """Whether an episode waits, and fewer are in play than the servers can use."""
        room = self.leases.playing < self.concurrency.limit or self.leases.taught
        return self.leases.waiting > 0 and room

    def issue(self, worker: bytes, now: float) -> Lease | None:
        """Lease the next episode to a worker; None if there `may_issue` none."""
        return self.leases.issue(worker, now) if self.may_issue else None

    def adapt(self, servers: Collection[ServerPeer]) -> None:
        """Let more or fewer episodes be in play, by what the policy servers say of themselves."""
        self.concurrency.adapt(servers, playing=self.leases.playing, wanted=self.leases.waiting > 0)

    def take_in(self, lease_id: int, worker: bytes, episode: Episode, now: float) -> Group | None:
        """Take in the episode of a lease; return its group, or None where the episode is of no use.

        Raises:
            RunError: so many plays failed one after another that the run cannot go on.
        """
        ticket = self.leases.finish(lease_id, worker)
        if ticket is None:
            return None
        self.counts[episode.status.value] += 1
        if (episode.group_id, episode.member) != (ticket.group_id, ticket.member):
            self._failed(
                ticket,
                f"the worker answered member {ticket.member} of group {ticket.group_id} with "
                f"member {episode.member} of group {episode.group_id}",
                again=True,
            )
        elif episode.status is Status.FAILED:
            self._failed(ticket, episode.error, again=episode.end_reason is not EndReason.ENV_FAILED)
        else:
            self._failing.clear()
            self.counts["tokens"] += sum(map(sampled_tokens, episode.trajectories))
            if ticket.prefix:
                self._count_fork(episode)
            elif not ticket.teacher:
                self.ratings.add(episode)
            return self.groups.add(episode, now)
        return None

    def scored(self, group: Group, scored: list[Episode] | EnvError) -> None:
        """Take in the scored episodes of a group, or why it could not be scored, and is dropped.

        Raises:
            RunError: so many groups could not be scored one after another that the run cannot go on.
        """
        if not isinstance(scored, EnvError):
            self._unscored_in_a_row = 0
            self.groups.scored(group.group_id, scored)
            return
        self.last_error = str(scored)
        self.groups.unscored(group.group_id, str(scored))
        self._unscored_in_a_row += 1
        if self._unscored_in_a_row >= max(4, self._config.rollout.tasks_per_step):
            raise RunError(
                f"{self._unscored_in_a_row} groups could not be scored one after another; the last one: {scored}"
            )

    def unreadable(self, lease_id: int, worker: bytes, error: str) -> None:
        """Take in that the answer to a lease could not be read. Raises RunError as `take_in` does."""
        ticket = self.leases.finish(lease_id, worker)
        if ticket is not None:
            self.counts[Status.FAILED.value] += 1
            self._failed(ticket, error, again=True)

    def worker_lost(self, worker: bytes) -> int:
        """Queue the episodes of a dead worker again; return how many it held."""
        tickets = self.leases.take_back(worker)
        self._retry(tickets, "its worker was lost")
        return len(tickets)

    def take_dropped(self) -> list[SetAside]:
        """Return the tasks whose groups were dropped since the last time."""
        tasks = self.groups.take_dropped()
        for task in tasks:
            if not task.error:
                continue
            _logger.warning(
                "task %d is set aside, %d of its %d episodes failed: %s",
                task.task_index, task.given_up, task.size, task.error,
            )  # fmt: skip
        return tasks

    def _count_fork(self, episode: Episode) -> None:
        repeated = replayed(episode) > 0
        self.counts["forked" if repeated else "diverged"] += 1
        if not repeated and worth_saying(count := self.counts["diverged"]):
            _logger.warning(
                "task %d was not the same again, given the same answers, and was played from the start (the %d. time)",
                episode.task_index, count,
            )  # fmt: skip

    def _failed(self, ticket: Ticket, error: str, *, again: bool) -> None:
        self.last_error = error
        _logger.warning("task %d, member %d failed: %s", ticket.task_index, ticket.member, error)
        self._failing.append(ticket.task_index)
        enough = len(self._failing) >= max(16, self._config.episodes_per_step)
        if enough and len(set(self._failing)) >= FAILING_TASKS:
            raise RunError(
                f"{len(self._failing)} episodes failed one after another, none succeeded; the last one: {error}"
            )
        if again:
            self._retry([ticket], error)
        else:
            self.groups.give_up(ticket.group_id, ticket.member, error)

    def watch(self, now: float) -> list[tuple[int, bytes]]:
        """Deal with what is overdue; return the (lease id, worker) pairs to be cancelled."""
        unwanted = []
        for group in self.groups.expire(now):
            unwanted += self.leases.withdraw(group.group_id)
            _logger.warning(
                "group %d went on with %d of %d members after %g s",
                group.group_id, len(group.episodes), group.size, self._config.rollout.group_timeout,
            )  # fmt: skip
        overdue = self.leases.overdue(now)
        self._retry([ticket for _, _, ticket in overdue], "its worker did not answer in time")
        return unwanted + [(lease_id, worker) for lease_id, worker, _ in overdue]

    def take(self, step: Step) -> list[Group] | None:
        """Return the groups of a step, or None while there are not enough."""
        if self.groups.ready < step.groups:
            return None
        groups = self.groups.take(step.groups)
        if not step.warmup:
            self._forks.offer(groups, self._teaches)
        return groups

    def _retry(self, tickets: list[Ticket], why: str) -> None:
        for ticket in tickets:
            if not self.leases.try_again(ticket):
                _logger.error("task %d, member %d is given up", ticket.task_index, ticket.member)
                self.groups.give_up(ticket.group_id, ticket.member, f"tried {ticket.tries + 1} times: {why}")

    def _open_group(self, step: Step) -> bool:
        """Open the next group; False if a pool that it plays against is not ready."""
        if self._stored:
            return self._restore_group(step)
        group_id, task = self._again[0] if self._again else (self._next_group, self._next_task)
        if self._lineup is None and not step.warmup and not self._again:
            self._fork = self._forks.draw(group_id, partial(self._drawn, group_id))
        if self._fork is not None:
            task = self._fork.task_index
        policies = self._policies(step, group_id, task)
        if policies is None:
            return False
        fork, self._fork = self._fork, None
        if self._again:
            self._again.popleft()
        else:
            self._next_group += 1
            self._next_task += fork is None
        self.groups.start(group_id, task, step.group_size, lineup=policies, forked=fork is not None)
        self._queue(step, group_id, task, range(step.group_size), policies, fork)
        return True

    def _restore_group(self, step: Step) -> bool:
        """Open the next group that an earlier run left on the disk; what it has not of it is played."""
        stored = self._stored[0]
        group_id, task = stored.group_id, stored.task_index
        policies = self._drawn(group_id, task) if stored.complete else self._policies(step, group_id, task)
        if policies is None:
            return False
        self._stored.popleft()
        assert self._store is not None
        episodes = self._store.members(group_id)
        fork = fork_like(episodes.values())
        if not stored.complete:
            # Members are compared: who met another snapshot than the others will is played again.
            episodes = {member: e for member, e in episodes.items() if _played_by(e, policies)}
        size = len(episodes) if stored.complete else stored.size
        self.groups.restore(group_id, task, size, episodes, lineup=policies, forked=fork is not None)
        missing = [] if stored.complete else [member for member in range(size) if member not in episodes]
        self._queue(step, group_id, task, missing, policies, fork)
        return True

    def _policies(self, step: Step, group_id: int, task: int) -> Mapping[AgentId, str] | None:
        """Return who plays whom in a group; None if a pool is not ready."""
        if self._lineup is None:
            self._lineup = self._drawn(group_id, task)
        policies = self._lineup
        if not step.warmup:  # there the teacher plays for the pools too
            snapshots = self.pools.enter(group_id, set(policies.values()), self.groups.is_open)
            if snapshots is None:
                return None
            policies = {agent: snapshots.get(policy, policy) for agent, policy in policies.items()}
        self._lineup = None
        return policies

    def _drawn(self, group_id: int, task: int) -> dict[AgentId, str]:
        return self._lineups.draw(group_id=group_id, task_index=task, seed=self._seed(task))

    def _seed(self, task: int) -> int:
        return task_seed(self._config.run.seed, self._env_key, task)

    def _queue(
        self,
        step: Step,
        group_id: int,
        task: int,
        members: Sequence[int],
        policies: Mapping[AgentId, str],
        fork: Fork | None,
    ) -> None:
        seed = self._seed(task)
        own_seeds = sampling_seeds(self._config.run.seed, group_id, 1 + max(members, default=0))
        for member in members:
            self.leases.add(
                Ticket(
                    task_index=task,
                    seed=seed,
                    group_id=group_id,
                    member=member,
                    sampling_seed=fork.sampling_seed if fork else own_seeds[member],
                    policies=dict(policies),
                    teacher=self._config.warmup.policy if step.warmup else "",
                    prefix=fork.prefix if fork else {},
                )
            )


def _played_by(episode: Episode, policies: Mapping[AgentId, str]) -> bool:
    return all(t.policy == policies.get(t.agent, policies[EVERYBODY_ELSE]) for t in episode.trajectories)
