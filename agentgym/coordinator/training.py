"""The optimizer steps of a run: which one is worked on, which groups it holds, which come next.

Each policy in training has a trainer. A step takes its groups once, and every trainer gets what its policy said in
them; the step is done when all of them are. So the weights of all policies have the same version number, and the
checkpoints of a step, one by each trainer, belong together.

A step's groups count against the capacity until its weights are published, so that where groups are finished in the
order in which they were opened, no token is further behind than `rollout.max_staleness` when it is trained. Of a group
that others have overtaken tokens may be older; `assemble` masks them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentgym.advantages.menu import Baselines
from agentgym.config import Config
from agentgym.coordinator.assemble import Assembled, assemble, batch_of
from agentgym.coordinator.dispatcher import Dispatcher
from agentgym.coordinator.peers import TrainerPeer
from agentgym.coordinator.schedule import Schedule, Step
from agentgym.coordinator.status import nobody_answered, too_old
from agentgym.coordinator.store import Places
from agentgym.coordinator.surroundings import Report, Send, Store
from agentgym.errors import RunError
from agentgym.origins import located
from agentgym.protocol import StepDone

UNLUCKY_STEPS = 8
"""So many batches one after another may have nothing that a policy can learn from."""


@dataclass(slots=True)
class Work:
    """A step that is worked on, or done."""

    step: Step
    parts: dict[str, Assembled]
    """By policy: what its trainer was given."""
    results: dict[str, StepDone] = field(default_factory=dict)
    """By policy: what its trainer made of it."""

    @property
    def waiting_for(self) -> list[str]:
        """The policies whose trainers have not finished it."""
        return [policy for policy in self.parts if policy not in self.results]


class Training:
    """What the trainers were given, and what became of it."""

    def __init__(
        self,
        config: Config,
        *,
        dispatcher: Dispatcher,
        store: Store,
        reporter: Report,
        send: Send,
        done: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Go on after step `done`, with the state of its checkpoint; `send` sends a message to a peer."""
        self._config = config
        self._dispatcher = dispatcher
        self._store = store
        self._reporter = reporter
        self._send = send
        self._schedule = Schedule(config)
        self.done = done
        """The last step that is finished."""
        self.last = self._schedule.last_step
        """The step with which the run ends."""
        self._work: Work | None = None
        self._held = 0
        """Groups in training, or trained while their weights are not yet published."""
        self._asked: set[str] = set()
        """The policies whose trainers wait for a batch."""
        self._unlucky = 0
        self._baselines: Baselines = (state or {}).get("baselines", {})

    @property
    def number(self) -> int | None:
        """The step that is worked on."""
        return self._work.step.number if self._work else None

    @property
    def waiting_for(self) -> list[str]:
        """The policies whose trainers work on it."""
        return self._work.waiting_for if self._work else []

    @property
    def over(self) -> bool:
        """Whether the last step is finished."""
        return self.done >= self.last

    @property
    def next(self) -> Step | None:
        """The step that episodes are played for; None after the last one."""
        number = (self.number or self.done) + 1
        return self._schedule.step(number) if number <= self.last else None

    def stop_soon(self) -> int:
        """End after one more step, with a checkpoint; return its number."""
        self.last = min(self.last, (self.number or self.done) + 1)
        return self.last

    def open_groups(self, step: Step) -> None:
        """Open groups for the step that is next, up to its capacity."""
        left = min(self._schedule.phase_end(step.number), self.last) - step.number + 1
        # The first one after a warm-up is not played with the weights before it.
        first = step.number == self._schedule.warmup_steps + 1
        if step.warmup or not first or self._held == 0:
            self._dispatcher.top_up(step, steps_left=left, in_training=self._held)

    def asked(self, policy: str, number: int) -> None:
        """Take in that a policy's trainer asks for a step. Raises RunError where it is not the next one."""
        # Others may still work on the step that this one has finished.
        ahead = self._work is not None and policy in self._work.results
        if number != self.done + 1 + ahead:
            raise RunError(f"the trainer of {policy!r} asks for step {number} after step {self.done + ahead}")
        self._asked.add(policy)

    def feed(self, trainers: Mapping[str, TrainerPeer]) -> bool:
        """Give the trainers their batches, if all have asked and the groups are there; return whether they got them.

        Raises:
            RunError: no agent ever says a word.
        """
        policies = self._config.policies_to_train
        if self._work is not None or self.over or not self._asked.issuperset(policies):
            return False
        step = self._schedule.step(self.done + 1)
        groups = self._dispatcher.take(step)
        if groups is None:
            return False
        ids = [group.group_id for group in groups]
        parts = assemble(
            groups,
            policies=policies,
            algorithm=self._config.algorithm,
            max_tokens=self._config.sampling.max_tokens,
            warmup=step.warmup,
            version=self.done,
            max_staleness=self._config.rollout.max_staleness,
            baselines=self._baselines,
        )
        idle = [policy for policy, part in parts.items() if not part.samples]
        if idle:
            self._store.drop(ids)
            self._nothing_to_learn(step, idle[0], parts[idle[0]])
            return False
        self._unlucky = 0
        baselines = parts[policies[0]].baselines
        due, state = self._checkpoint_due(step), {**self._dispatcher.state(), "baselines": dict(baselines)}
        batches = [
            (
                trainers[policy].identity,
                part.origins,
                batch_of(part, step, trainer=self._config.trainer, checkpoint=due, state=state),
            )
            for policy, part in parts.items()
        ]

        def send(places: Places) -> None:
            for identity, origins, (header, arrays) in batches:
                self._send(located(header, origins, self._store.folder, places), identity, arrays)

        self._store.consume(step.number, ids, send)
        self._work, self._asked, self._baselines = Work(step, parts), set(), baselines
        self._held += len(groups)
        episodes = parts[policies[0]].episodes
        self._reporter.batch_sent(step, parts, self._dispatcher.ratings.tags(episodes))
        return True

    def finished(self, policy: str, header: StepDone) -> Work | None:
        """Take in that a policy's trainer has finished a step; return the step when all have.

        Raises:
            RunError: it was given another step.
        """
        work = self._work
        if work is None or header.step != work.step.number or policy in work.results:
            raise RunError(f"the trainer of {policy!r} finished step {header.step}, which it was not given")
        work.results[policy] = header
        if work.waiting_for:
            return None
        self._work, self.done = None, work.step.number
        if header.checkpoint:  # the others were asked for theirs too
            oldest = self._dispatcher.leases.oldest_id
            self._store.forget(self.done, keep=self._config.coordinator.keep_episodes, oldest_lease=oldest)
        if not header.weights:
            self._held = 0
        return work

    def published(self, version: int) -> None:
        """Take in that all servers have the weights after a step: its groups count no longer."""
        if self._work is None or self._work.step.number - 1 == version:
            self._held = self._work.step.groups if self._work else 0

    def _nothing_to_learn(self, step: Step, policy: str, part: Assembled) -> None:
        """Let other groups be played in place of these; end a run whose agents never say a word."""
        episodes = part.episodes
        self._unlucky += 1
        mine = [t for e in episodes for t in e.trajectories if t.trainable and t.policy == policy]
        if mine and self._unlucky < UNLUCKY_STEPS:
            self._reporter.say(
                f"all {len(episodes)} episodes of step {step.number} were too old; playing others"
            )
        elif mine:
            oldest = max(0, self.done - self._config.rollout.max_staleness)
            raise RunError(
                too_old(step.number, policy, mine, tries=self._unlucky, usable=(oldest, self.done))
            )
        elif len(self._config.policies_to_train) > 1 and self._unlucky < UNLUCKY_STEPS:
            self._reporter.say(f"nobody played {policy!r} in the {len(episodes)} episodes of step {step.number}; "
                               "playing others")  # fmt: skip
        else:
            raise RunError(nobody_answered(step.number, policy, episodes))

    def _checkpoint_due(self, step: Step) -> bool:
        learned = step.number - self._schedule.warmup_steps
        every = self._config.trainer.checkpoint_every
        # What a checkpoint covers can be removed from the disk.
        full = self._store.bytes_used > self._config.coordinator.max_store_gib * 2**30 / 2
        evaluated = self._config.evaluation.due(learned)
        return full or evaluated or step.number == self.last or learned % every == 0
