"""The optimizer steps of a run: which one the trainer works on, which groups it holds, which come next.

A step's groups count against the capacity until its weights are published, so that where groups are finished in the
order in which they were opened, no token is further behind than `rollout.max_staleness` when it is trained. Of a group
that others have overtaken tokens may be older; `assemble` masks them.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from agentgym.advantages.menu import Baselines
from agentgym.config import Config
from agentgym.coordinator.assemble import Assembled, assemble, batch_of
from agentgym.coordinator.dispatcher import Dispatcher
from agentgym.coordinator.schedule import Schedule, Step
from agentgym.coordinator.status import nobody_answered
from agentgym.coordinator.surroundings import Report, Send, Store
from agentgym.errors import RunError
from agentgym.protocol import StepDone


class Training:
    """What the trainer was given, and what became of it."""

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
        self._current: tuple[Step, Assembled] | None = None
        self._held = 0
        """Groups in training, or trained while their weights are not yet published."""
        self._asked = False
        self._baselines: Baselines = (state or {}).get("baselines", {})

    @property
    def number(self) -> int | None:
        """The step that the trainer works on."""
        return self._current[0].number if self._current else None

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
        first = (
            step.number == self._schedule.warmup_steps + 1
        )  # is not played with the weights before the warm-up
        if step.warmup or not first or self._held == 0:
            self._dispatcher.top_up(step, steps_left=left, in_training=self._held)

    def asked(self, number: int) -> None:
        """Take in that the trainer asks for a step. Raises RunError where it is not the next one."""
        if number != self.done + 1:
            raise RunError(f"the trainer asks for step {number}; step {self.done + 1} is next")
        self._asked = True

    def feed(self, trainer: bytes | None) -> bool:
        """Give the trainer its batch, if it asked for one and the groups are there; return whether it got one.

        Raises:
            RunError: no agent ever says a word.
        """
        if not self._asked or self._current is not None or self.over:
            return False
        assert trainer is not None
        step = self._schedule.step(self.done + 1)
        groups = self._dispatcher.take(step)
        if groups is None:
            return False
        ids = [group.group_id for group in groups]
        assembled = assemble(
            groups,
            algorithm=self._config.algorithm,
            max_tokens=self._config.sampling.max_tokens,
            warmup=step.warmup,
            version=self.done,
            max_staleness=self._config.rollout.max_staleness,
            baselines=self._baselines,
        )
        if not assembled.samples:
            self._store.drop(ids)
            self._nothing_to_learn(step, assembled)
            return False
        header, arrays = batch_of(
            assembled,
            step,
            microbatch_tokens=self._config.trainer.tokens_per_microbatch,
            checkpoint=self._checkpoint_due(step),
            state={**self._dispatcher.state(), "baselines": dict(assembled.baselines)},
        )
        self._store.consume(step.number, ids, partial(self._send, header, trainer, arrays))
        self._current, self._asked = (step, assembled), False
        self._baselines = assembled.baselines
        self._held += len(groups)
        self._reporter.batch_sent(step, assembled, self._dispatcher.ratings.tags(assembled.episodes))
        return True

    def finished(self, header: StepDone) -> tuple[Step, Assembled]:
        """Take in that a step is finished, and return it. Raises RunError where the trainer was given another one."""
        if self._current is None or header.step != self._current[0].number:
            raise RunError(f"the trainer finished step {header.step}, which it was not given")
        (step, assembled), self._current = self._current, None
        self.done = step.number
        if header.checkpoint:
            self._store.forget(step.number, keep=self._config.coordinator.keep_episodes)
        if not header.weights:
            self._held = 0
        return step, assembled

    def published(self, version: int) -> None:
        """Take in that all servers have the weights after a step: its groups count no longer."""
        if self._current is None or self._current[0].number - 1 == version:
            self._held = self._current[0].groups if self._current else 0

    def _nothing_to_learn(self, step: Step, assembled: Assembled) -> None:
        """Let other groups be played in place of stale ones; end a run whose agents never say a word."""
        episodes = assembled.episodes
        if any(trajectory.trainable for episode in episodes for trajectory in episode.trajectories):
            self._reporter.say(
                f"all {len(episodes)} episodes of step {step.number} were too old; playing others"
            )
            return
        raise RunError(nobody_answered(step.number, episodes))

    def _checkpoint_due(self, step: Step) -> bool:
        learned = step.number - self._schedule.warmup_steps
        every = self._config.trainer.checkpoint_every
        # What a checkpoint covers can be removed from the disk.
        full = self._store.bytes_used > self._config.coordinator.max_store_gib * 2**30 / 2
        return full or step.number == self.last or learned % every == 0
