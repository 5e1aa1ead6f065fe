"""No trained token is older than `rollout.max_staleness`, whatever the delays, crashes and speeds."""

from dataclasses import dataclass, field

from builders import config_of, episode_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentgym.config import AlgorithmConfig
from agentgym.coordinator.assemble import Assembled, assemble
from agentgym.coordinator.dispatcher import Dispatcher
from agentgym.coordinator.schedule import Schedule
from agentgym.protocol import Lease

TASKS, MEMBERS = 2, 2
WORKERS = st.sampled_from([b"a", b"b", b"c"])


@dataclass
class Playing:
    """A lease in play, and the versions that sampled its turns so far, by agent."""

    worker: bytes
    lease: Lease
    versions: dict[str, list[int]] = field(default_factory=lambda: {"first": [], "second": []})


class Run(RuleBasedStateMachine):
    """Two policy servers that load when they like, three workers, a trainer; all at speeds of their own.

    It counts the groups in training as the coordinator does.
    """

    @initialize(max_staleness=st.integers(0, 2), servers=st.integers(1, 2))
    def begin(self, max_staleness: int, servers: int) -> None:
        config = config_of(
            rollout={
                "tasks_per_step": TASKS,
                "group_size": MEMBERS,
                "max_staleness": max_staleness,
                "group_timeout": 10.0,
            }
        )
        self.bound, self.schedule = max_staleness, Schedule(config)
        self.dispatcher = Dispatcher(config)
        self.now, self.reward = 0.0, 0
        self.done = self.published = self.held = 0
        """The trainer's version, the servers', and groups in training or not yet published."""
        self.training = False
        self.servers = [0] * servers
        self.plays: dict[int, Playing] = {}
        self.top_up()

    def top_up(self) -> None:
        step = self.schedule.step(self.done + self.training + 1)
        self.dispatcher.top_up(step, steps_left=1000, in_training=self.held)

    def finish_play(self, lease_id: int) -> None:
        playing = self.plays.pop(lease_id)
        self.reward += 1
        episode = episode_of(
            trajectories=[self._trajectory(agent, versions) for agent, versions in playing.versions.items()],
            group=playing.lease.group_id,
            member=playing.lease.member,
            task_index=playing.lease.task_index,
        )
        self.dispatcher.take_in(lease_id, playing.worker, episode, self.now)

    def _trajectory(self, agent: str, versions: list[int]) -> object:
        (trajectory,) = episode_of(
            {agent: [float(self.reward)] * max(1, len(versions))}, versions=versions or [self.published]
        ).trajectories
        return trajectory

    @rule(worker=WORKERS, count=st.integers(1, 8))
    def lease(self, worker: bytes, count: int) -> None:
        for _ in range(count):
            lease = self.dispatcher.issue(worker, self.now)
            if lease is not None:
                self.plays[lease.lease_id] = Playing(worker, lease)

    @precondition(lambda self: self.plays)
    @rule(data=st.data(), agent=st.sampled_from(["first", "second"]), server=st.integers(0, 1))
    def answer(self, data: st.DataObject, agent: str, server: int) -> None:
        """A server samples a turn."""
        playing = self.plays[data.draw(st.sampled_from(sorted(self.plays)))]
        if len(playing.versions[agent]) < 4:
            playing.versions[agent].append(self.servers[server % len(self.servers)])

    @precondition(lambda self: self.dispatcher.groups.ready >= TASKS and not self.training)
    @rule()
    def train(self) -> None:
        groups = self.dispatcher.take(self.schedule.step(self.done + 1))
        assert groups is not None
        assembled = assemble(
            groups,
            algorithm=AlgorithmConfig(),
            max_tokens=32,
            warmup=False,
            version=self.done,
            max_staleness=self.bound,
        )
        self.check(assembled)
        if assembled.samples:
            self.training, self.held = True, self.held + len(groups)
        self.top_up()

    def check(self, assembled: Assembled) -> None:
        trained = sum(int(sample.loss_mask.sum()) for sample in assembled.samples)
        assert len(assembled.ages) == trained
        for sample in assembled.samples:
            ages = self.done - sample.versions[sample.loss_mask]
            assert ages.min() >= 0
            assert ages.max() <= self.bound
        if trained:
            assert 0 <= assembled.ages.min() <= assembled.ages.max() <= self.bound

    @precondition(lambda self: self.training)
    @rule()
    def finish_step(self) -> None:
        self.done, self.training = self.done + 1, False

    @rule(server=st.integers(0, 1))
    def load(self, server: int) -> None:
        """A server loads what the trainer has published; when all have it, it is the version of the run."""
        self.servers[server % len(self.servers)] = self.done
        if self.servers == [self.done] * len(self.servers) and self.published != self.done:
            self.published = self.done
            self.held = TASKS if self.training else 0
        self.top_up()

    @invariant()
    def capacity_is_never_exceeded(self) -> None:
        groups = self.dispatcher.groups
        assert groups.open + groups.ready + self.held <= (self.bound + 1) * TASKS


class Wild(Run):
    """Plays end in any order, workers die, groups and leases run out of time, servers come back with old weights."""

    @precondition(lambda self: self.plays)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.finish_play(data.draw(st.sampled_from(sorted(self.plays))))
        self.top_up()

    @rule(worker=WORKERS)
    def die(self, worker: bytes) -> None:
        self.dispatcher.worker_lost(worker)
        self.plays = {i: playing for i, playing in self.plays.items() if playing.worker != worker}

    @rule(seconds=st.sampled_from([1.0, 11.0, 1000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for lease_id, _ in self.dispatcher.watch(self.now):
            self.plays.pop(lease_id, None)
        self.top_up()


class InOrder(Run):
    """Plays end in the order in which they began: then what is dispatched is young enough, and nothing is masked."""

    @precondition(lambda self: self.plays)
    @rule(count=st.integers(1, 4))
    def finish(self, count: int) -> None:
        for lease_id in sorted(self.plays)[:count]:
            self.finish_play(lease_id)

    def check(self, assembled: Assembled) -> None:
        super().check(assembled)
        assert assembled.metrics["stale_share"] == 0.0


Wild.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
test_no_trained_token_is_older_than_the_bound = Wild.TestCase
InOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
test_what_is_played_in_order_is_never_too_old = InOrder.TestCase
