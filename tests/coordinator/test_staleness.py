"""No trained token is older than `rollout.max_staleness`, whatever the delays, crashes and speeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from builders import config_of, episode_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentgym.coordinator.assemble import Assembled
from agentgym.coordinator.dispatcher import Dispatcher
from agentgym.coordinator.peers import TrainerPeer
from agentgym.coordinator.schedule import Step
from agentgym.coordinator.store import Places
from agentgym.coordinator.training import Training
from agentgym.protocol import Lease, StepDone
from agentgym.segments import Place

TASKS, MEMBERS = 2, 2
WORKERS = st.sampled_from([b"a", b"b", b"c"])


@dataclass
class Playing:
    """A lease in play, and the versions that sampled its turns so far, by agent."""

    worker: bytes
    lease: Lease
    versions: dict[str, list[int]] = field(default_factory=lambda: {"first": [], "second": []})


class Shelf:
    """A store that keeps nothing; what is asked of it is done at once."""

    bytes_used = 0
    folder = Path("episodes")

    def consume(self, step: int, group_ids: Sequence[int], done: Callable[[Places], None]) -> None:
        done({(group, member): Place(1, 0, 0, 0) for group in group_ids for member in range(MEMBERS)})

    def drop(self, group_ids: Sequence[int]) -> None:
        pass


class Run(RuleBasedStateMachine):
    """Two policy servers that load when they like, three workers, a trainer; all at speeds of their own."""

    @initialize(max_staleness=st.integers(0, 2), servers=st.integers(1, 2))
    def begin(self, max_staleness: int, servers: int) -> None:
        config = config_of(
            run={"steps": 10_000},
            rollout={
                "tasks_per_step": TASKS,
                "group_size": MEMBERS,
                "max_staleness": max_staleness,
                "group_timeout": 10.0,
            },
        )
        self.bound = max_staleness
        self.dispatcher = Dispatcher(config)
        self.training = Training(
            config,
            dispatcher=self.dispatcher,
            store=Shelf(),  # type: ignore[arg-type]
            reporter=self,  # type: ignore[arg-type]
            send=lambda header, to, arrays=None: None,
            done=0,
        )
        self.now, self.reward, self.published = 0.0, 0, 0
        self.servers = [0] * servers
        """Their versions."""
        self.plays: dict[int, Playing] = {}
        self.top_up()

    def top_up(self) -> None:
        step = self.training.next
        assert step is not None
        self.training.open_groups(step)

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

    @precondition(lambda self: self.training.number is None)
    @rule()
    def train(self) -> None:
        self.training.asked("learner", self.training.done + 1)
        self.training.feed({"learner": TrainerPeer("trainer", "learner", b"trainer")})
        self.top_up()

    def say(self, text: str) -> None:
        assert "were too old" in text

    def batch_sent(self, step: Step, parts: Mapping[str, Assembled], ratings: Mapping[str, float]) -> None:
        """Look at what the trainer is given."""
        version, assembled = step.number - 1, parts["learner"]
        assert assembled.samples
        assert len(assembled.ages) == sum(int(sample.loss_mask.sum()) for sample in assembled.samples)
        assert 0 <= assembled.ages.min() <= assembled.ages.max() <= self.bound
        for sample in assembled.samples:
            ages = version - sample.versions[sample.loss_mask]
            assert 0 <= ages.min() <= ages.max() <= self.bound

    @precondition(lambda self: self.training.number is not None)
    @rule()
    def finish_step(self) -> None:
        done = StepDone(step=self.training.number, metrics={}, weights="weights")
        self.training.finished("learner", done)

    @rule(server=st.integers(0, 1))
    def load(self, server: int) -> None:
        """A server loads the trainer's weights; when all have them, they are published."""
        self.servers[server % len(self.servers)] = self.training.done
        if set(self.servers) == {self.training.done} and self.published != self.training.done:
            self.published = self.training.done
            self.training.published(self.published)
        self.top_up()

    def round(self, stragglers: set[int]) -> None:
        """All that can be played is answered once, and finished but for some; a step is trained and published."""
        self.lease(b"a", 100)
        for lease_id, playing in sorted(self.plays.items()):
            for versions in playing.versions.values():
                if len(versions) < 4:
                    versions.append(self.servers[0])
            if lease_id not in stragglers:
                self.finish_play(lease_id)
        if self.training.number is None:
            self.train()
        if self.training.number is not None:
            self.finish_step()
        for server in range(len(self.servers)):
            self.load(server)

    @invariant()
    def capacity_is_never_exceeded(self) -> None:
        groups = self.dispatcher.groups
        assert groups.open + groups.ready + self.training._held <= (self.bound + 1) * TASKS


class Wild(Run):
    """Plays end in any order, workers die, groups and leases run out of time, servers come back with old weights."""

    @rule(data=st.data(), rounds=st.integers(1, 3))
    def rounds(self, data: st.DataObject, rounds: int) -> None:
        """One play may be slower than some steps."""
        self.lease(b"a", 100)
        slow = data.draw(st.sampled_from([None, *sorted(self.plays)]))
        for _ in range(rounds):
            self.round(set() if slow is None else {slow})

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

    @rule()
    def one_round(self) -> None:
        self.round(set())

    @precondition(lambda self: self.plays)
    @rule(count=st.integers(1, 4))
    def finish(self, count: int) -> None:
        for lease_id in sorted(self.plays)[:count]:
            self.finish_play(lease_id)

    def batch_sent(self, step: Step, parts: Mapping[str, Assembled], ratings: Mapping[str, float]) -> None:
        super().batch_sent(step, parts, ratings)
        assert parts["learner"].metrics["stale_share"] == 0.0


Wild.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
test_no_trained_token_is_older_than_the_bound = Wild.TestCase
InOrder.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
test_what_is_played_in_order_is_never_too_old = InOrder.TestCase
