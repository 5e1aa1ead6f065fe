"""Leases: which episode is being played where.

Every lease leaves the table exactly once: its episode arrives, or it is taken back because its worker died, fell
silent or overran the deadline, or it is withdrawn because its group went on without it. What is taken back is issued
again under a new id, at most `max_retries` times, then given up. An answer to a lease that has left the table is late:
it is counted and never used.
"""

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from agentgym.messages import AgentId
from agentgym.protocol import Lease, Recorded


@dataclass(frozen=True, slots=True)
class Ticket:
    """An episode to be played, and how often that was tried."""

    task_index: int
    seed: int
    group_id: int
    member: int
    sampling_seed: int
    policies: dict[str, str]
    teacher: str = ""
    prefix: dict[AgentId, list[Recorded]] = field(default_factory=dict)
    tries: int = 0


class _Issued(NamedTuple):
    ticket: Ticket
    worker: bytes
    deadline: float


class LeaseTable:
    """The episodes that wait for a worker and those that are being played."""

    def __init__(self, *, max_retries: int, timeout: float, first_id: int = 1) -> None:
        """Make an empty table; `timeout` is the seconds that a lease may be out."""
        self._max_retries = max_retries
        self._timeout = timeout
        self._next_id = first_id
        self._waiting: deque[Ticket] = deque()
        self._issued: dict[int, _Issued] = {}
        self._held: Counter[bytes] = Counter()
        self.counts: Counter[str] = Counter()
        """issued, finished, taken_back, given_up, withdrawn, late."""

    @property
    def next_id(self) -> int:
        """The id of the next lease."""
        return self._next_id

    @property
    def oldest_id(self) -> int:
        """The id of the oldest lease that is out, or of the next one."""
        return min(self._issued, default=self._next_id)

    @property
    def waiting(self) -> int:
        """Episodes that wait for a worker."""
        return len(self._waiting)

    @property
    def taught(self) -> bool:
        """Whether a teacher plays the next episode."""
        return bool(self._waiting) and bool(self._waiting[0].teacher)

    @property
    def playing(self) -> int:
        """Leases that are out."""
        return len(self._issued)

    def held(self, worker: bytes) -> int:
        """Return how many leases a worker has."""
        return self._held[worker]

    def add(self, ticket: Ticket) -> None:
        """Queue an episode."""
        self._waiting.append(ticket)

    def issue(self, worker: bytes, now: float) -> Lease | None:
        """Lease the next episode to a worker; None if none waits."""
        if not self._waiting:
            return None
        ticket = self._waiting.popleft()
        lease_id, self._next_id = self._next_id, self._next_id + 1
        self._issued[lease_id] = _Issued(ticket, worker, now + self._timeout)
        self._held[worker] += 1
        self.counts["issued"] += 1
        return Lease(
            lease_id=lease_id,
            task_index=ticket.task_index,
            seed=ticket.seed,
            group_id=ticket.group_id,
            member=ticket.member,
            sampling_seed=ticket.sampling_seed,
            policies=ticket.policies,
            teacher=ticket.teacher,
            prefix=ticket.prefix,
        )

    def late(self, lease_id: int, worker: bytes) -> bool:
        """Whether a lease is no longer out when this worker answers it, or never was; that is counted."""
        issued = self._issued.get(lease_id)
        late = issued is None or issued.worker != worker
        self.counts["late"] += late
        return late

    def finish(self, lease_id: int, worker: bytes) -> Ticket | None:
        """Take in the answer to a lease; None if it is `late`."""
        if self.late(lease_id, worker):
            return None
        self.counts["finished"] += 1
        return self._forget(lease_id)

    def try_again(self, ticket: Ticket) -> bool:
        """Queue an episode again, ahead of others; False if its tries are used up and it is given up."""
        if ticket.tries >= self._max_retries:
            self.counts["given_up"] += 1
            return False
        self._waiting.appendleft(replace(ticket, tries=ticket.tries + 1))
        return True

    def take_back(self, worker: bytes) -> list[Ticket]:
        """Remove the leases of a dead worker and return their episodes."""
        return self._remove([i for i, issued in self._issued.items() if issued.worker == worker])

    def overdue(self, now: float) -> list[tuple[int, bytes, Ticket]]:
        """Remove the leases past their deadline and return (lease id, worker, episode) of each."""
        late = [(i, issued.worker) for i, issued in self._issued.items() if issued.deadline < now]
        tickets = self._remove([lease_id for lease_id, _ in late])
        return [(lease_id, worker, t) for (lease_id, worker), t in zip(late, tickets, strict=True)]

    def withdraw(self, group_id: int) -> list[tuple[int, bytes]]:
        """Remove the episodes of a closed group; return the (lease id, worker) pairs of those being played."""
        kept = deque(ticket for ticket in self._waiting if ticket.group_id != group_id)
        out = [(i, issued.worker) for i, issued in self._issued.items() if issued.ticket.group_id == group_id]
        self.counts["withdrawn"] += len(self._waiting) - len(kept) + len(out)
        self._waiting = kept
        for lease_id, _ in out:
            self._forget(lease_id)
        return out

    def _remove(self, lease_ids: list[int]) -> list[Ticket]:
        self.counts["taken_back"] += len(lease_ids)
        return [self._forget(lease_id) for lease_id in lease_ids]

    def _forget(self, lease_id: int) -> Ticket:
        issued = self._issued.pop(lease_id)
        self._held[issued.worker] -= 1
        return issued.ticket
