"""A lease leaves the table exactly once, whatever happens; checked against a model that is a dictionary."""

from collections import Counter, deque
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentgym.coordinator.leases import LeaseTable, Ticket

RETRIES, TIMEOUT = 2, 10.0
WORKERS = st.sampled_from([b"a", b"b", b"c"])


class Lives(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(max_retries=RETRIES, timeout=TIMEOUT)
        self.now, self.added = 0.0, 0
        self.waiting: deque[Ticket] = deque()
        self.out: dict[int, tuple[Ticket, bytes, float]] = {}
        self.exits: Counter[int] = Counter()
        """By lease id."""
        self.ends: Counter[str] = Counter()
        """Of episodes."""

    def leave(self, lease_id: int) -> Ticket:
        self.exits[lease_id] += 1
        return self.out.pop(lease_id)[0]

    def again(self, ticket: Ticket) -> None:
        if self.table.try_again(ticket):
            self.waiting.appendleft(replace(ticket, tries=ticket.tries + 1))
        else:
            assert ticket.tries == RETRIES
            self.ends["given_up"] += 1

    @rule(group=st.integers(0, 3), count=st.integers(1, 3))
    def add(self, group: int, count: int) -> None:
        for _ in range(count):
            number, self.added = self.added, self.added + 1
            ticket = Ticket(number, number, group, number, number, {"*": "learner"})
            self.table.add(ticket)
            self.waiting.append(ticket)

    @rule(worker=WORKERS, count=st.integers(1, 4))
    def issue(self, worker: bytes, count: int) -> None:
        for _ in range(count):
            lease = self.table.issue(worker, self.now)
            if not self.waiting:
                assert lease is None
                return
            ticket = self.waiting.popleft()
            assert lease is not None
            assert (lease.task_index, lease.member) == (ticket.task_index, ticket.member)
            assert lease.lease_id not in self.out
            assert not self.exits[lease.lease_id]
            self.out[lease.lease_id] = (ticket, worker, self.now + TIMEOUT)

    @precondition(lambda self: self.out or self.exits)
    @rule(data=st.data(), honest=st.booleans(), failed=st.booleans())
    def answer(self, data: st.DataObject, honest: bool, failed: bool) -> None:
        """Answers to leases that are out, and to those that have left; by their workers, and by others."""
        lease_id = data.draw(st.sampled_from(sorted({*self.out, *self.exits})))
        worker = self.out[lease_id][1] if honest and lease_id in self.out else b"stranger"
        ticket = self.table.finish(lease_id, worker)
        if lease_id not in self.out or not honest:
            assert ticket is None
            return
        assert ticket == self.leave(lease_id)
        if failed:
            self.again(ticket)
        else:
            self.ends["episode"] += 1

    @rule(worker=WORKERS)
    def die(self, worker: bytes) -> None:
        mine = [lease_id for lease_id, (_, holder, _) in self.out.items() if holder == worker]
        taken = self.table.take_back(worker)
        assert taken == [self.leave(lease_id) for lease_id in mine]
        for ticket in taken:
            self.again(ticket)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        late = {i: worker for i, (_, worker, deadline) in self.out.items() if deadline < self.now}
        found = self.table.overdue(self.now)
        assert {(i, worker) for i, worker, _ in found} == set(late.items())
        for lease_id, _, ticket in found:
            assert ticket == self.leave(lease_id)
            self.again(ticket)

    @rule(group=st.integers(0, 3))
    def withdraw(self, group: int) -> None:
        mine = {i: worker for i, (ticket, worker, _) in self.out.items() if ticket.group_id == group}
        assert set(self.table.withdraw(group)) == set(mine.items())
        unissued = [ticket for ticket in self.waiting if ticket.group_id == group]
        self.waiting = deque(ticket for ticket in self.waiting if ticket.group_id != group)
        self.ends["withdrawn"] += len(unissued) + len(mine)
        for lease_id in mine:
            self.leave(lease_id)

    @invariant()
    def a_lease_leaves_once_and_an_episode_ends_once(self) -> None:
        assert set(self.exits.values()) <= {1}
        assert self.table.next_id - 1 == len(self.exits) + len(self.out)
        assert (self.table.waiting, self.table.playing) == (len(self.waiting), len(self.out))
        assert self.added == self.ends.total() + len(self.waiting) + len(self.out)

    @invariant()
    def the_counts_say_so(self) -> None:
        counts = self.table.counts
        assert counts["issued"] == len(self.exits) + len(self.out)
        assert (counts["given_up"], counts["withdrawn"]) == (self.ends["given_up"], self.ends["withdrawn"])


Lives.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_every_lease_leaves_once = Lives.TestCase
