"""What a coordinator stands in: the time, the wire, the disk and what it reports to.

A run has the real ones, which are the defaults here; a simulation brings others of the same shape.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentgym.config import Config
from agentgym.coordinator.assemble import Assembled
from agentgym.coordinator.evaluations import Evaluation
from agentgym.coordinator.groups import SetAside
from agentgym.coordinator.schedule import Step
from agentgym.coordinator.store import EpisodeStore, Places, StoredGroup
from agentgym.door import Door
from agentgym.episode import Episode
from agentgym.errors import RunError, WireError
from agentgym.keys import load_keys
from agentgym.protocol import Header, StepDone
from agentgym.wire import Arrays, Packet, refuse_public_bind

OnPacket = Callable[[Packet], None]
OnGarbage = Callable[[bytes, WireError], None]


class Send(Protocol):
    """Sends a message to a peer."""

    def __call__(self, header: Header, to: bytes, arrays: Arrays | None = None) -> None:
        """Send it now."""
        ...


class Line(Protocol):
    """The coordinator's end of the wire; `agentgym.door.Door` is one."""

    counts: Counter[str]
    """What happened at it since the run began, for TensorBoard."""

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        ...

    def send(self, header: Header, arrays: Arrays | None = None, *, to: bytes) -> None:
        """Send a message to a peer."""
        ...

    def close(self) -> None:
        """Hang up, when what was sent has left."""
        ...


class Store(Protocol):
    """Where episodes are kept; see `agentgym.coordinator.store.EpisodeStore`, which is one."""

    folder: Path
    """Where the messages lie that `consume` names."""

    @property
    def bytes_used(self) -> int:
        """The size of the episodes."""
        ...

    def go_on(self, step: int) -> list[StoredGroup]:
        """Undo what steps after `step` consumed, and return the groups that are pending."""
        ...

    def next_lease(self) -> int:
        """Return an id that no stored episode has, nor any after it."""
        ...

    def members(self, group_id: int) -> dict[int, Episode]:
        """Return the stored episodes of a group by member."""
        ...

    def add(self, group: StoredGroup, packet: Packet, done: Callable[[], None]) -> None:
        """Keep an episode as its worker sent it; `done` is called when it is safe."""
        ...

    def consume(self, step: int, group_ids: Sequence[int], done: Callable[[Places], None]) -> None:
        """Mark groups as taken by a step; `done` is called when that is safe, with where their episodes lie."""
        ...

    def drop(self, group_ids: Sequence[int]) -> None:
        """Remove groups that no step will take."""
        ...

    def set_aside(self, tasks: Sequence[SetAside]) -> None:
        """Remove groups that were dropped, and keep the tasks that failed, with their errors."""
        ...

    def forget(self, step: int, *, keep: int, oldest_lease: int) -> None:
        """Remove what steps up to `step` consumed, but for the last `keep` episodes or so, and what leases left behind.

        `oldest_lease`: none that is out is older.
        """
        ...

    def close(self) -> None:
        """Write what waits."""
        ...


class Report(Protocol):
    """What is told how a run goes; `agentgym.coordinator.report.Reporter` is one."""

    def say(self, text: str) -> None:
        """Take in a line that people should read."""
        ...

    def loaded(self, seconds: float) -> None:
        """Take in how long a policy server took to load weights."""
        ...

    def evaluated(self, evaluation: Evaluation) -> None:
        """Take in what the evaluation of a checkpoint found."""
        ...

    def batch_sent(self, step: Step, parts: Mapping[str, Assembled], ratings: Mapping[str, float]) -> None:
        """Take in what the trainers were given for a step, by policy."""
        ...

    def step_done(
        self,
        step: Step,
        parts: Mapping[str, Assembled],
        results: Mapping[str, StepDone],
        numbers: dict[str, float],
    ) -> None:
        """Take in what the trainers made of it, by policy."""
        ...


def check_doors(config: Config) -> None:
    """Raise ConfigError where the addresses of a configuration could not be bound with its keys."""
    keys = load_keys(config.coordinator.keys)
    if keys is not None:
        keys.server_options()
    for address in (config.coordinator.bind, config.server.bind):
        if address is not None:
            refuse_public_bind(address, keyed=keys is not None)


def open_door(config: Config, address: str, on_packet: OnPacket, on_garbage: OnGarbage) -> Door:
    """Bind the coordinator's address, and the one for other machines if the configuration has one."""
    settings = config.coordinator
    return Door(
        [address, *([settings.bind] if settings.bind else [])],
        on_packet,
        on_garbage,
        keys=load_keys(settings.keys),
        # Of a worker that does not read: a lease, its end, and what it is told besides until it counts as dead.
        queue=1000 + 4 * config.workers.slots,
        silence=settings.heartbeat_timeout,
    )


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of the world that a coordinator uses; those of a run are the defaults."""

    clock: Callable[[], float] = time.monotonic
    """Seconds, from any beginning."""
    bind: Callable[[Config, str, OnPacket, OnGarbage], Line] = open_door
    """Opens the coordinator's address."""
    open_store: Callable[[Path, Callable[[RunError], None]], Store] = EpisodeStore
    """Opens the store of a run directory, with what is told when nothing can be written."""
    watch_seconds: float = 0.25
    """Between two looks at what is overdue."""


OF_A_RUN = Surroundings()
