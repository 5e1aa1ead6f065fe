from typing import Any

from agentgym.coordinator.leases import LeaseTable, Ticket


def table_of(tickets: int = 0, *, max_retries: int = 2, timeout: float = 10.0) -> LeaseTable:
    table = LeaseTable(max_retries=max_retries, timeout=timeout)
    for number in range(tickets):
        table.add(ticket_of(number))
    return table


def ticket_of(number: int = 0, **fields: Any) -> Ticket:
    record = {
        "task_index": number,
        "seed": number + 100,
        "group_id": number // 2,
        "member": number % 2,
        "policies": {"*": "learner"},
        **fields,
    }
    return Ticket(sampling_seed=number + 200, **record)


def test_episodes_are_leased_in_order_with_everything_a_worker_needs() -> None:
    table = table_of(1)
    table.add(ticket_of(1, policies={"*": "noisy"}, teacher="t"))
    first, second = table.issue(b"w", 0.0), table.issue(b"w", 0.0)
    assert first is not None
    assert second is not None
    assert (first.lease_id, first.task_index, first.seed, first.sampling_seed) == (1, 0, 100, 200)
    assert (second.lease_id, second.group_id, second.member) == (2, 0, 1)
    assert (second.policies, second.teacher) == ({"*": "noisy"}, "t")
    assert (table.issue(b"w", 0.0), table.waiting, table.playing) == (None, 0, 2)


def test_a_lease_leaves_once() -> None:
    table = table_of(1)
    table.issue(b"w", 0.0)
    assert table.finish(1, b"w") == ticket_of(0)
    assert table.finish(1, b"w") is None
    assert table.counts == {"issued": 1, "finished": 1, "late": 1}


def test_an_answer_of_another_worker_does_not_count() -> None:
    table = table_of(1)
    table.issue(b"w", 0.0)
    assert table.finish(1, b"stranger") is None
    assert table.finish(5, b"w") is None
    assert table.finish(1, b"w") is not None


def test_what_a_dead_worker_held_is_played_again_before_the_rest() -> None:
    table = table_of(4)
    for worker in (b"dead", b"alive", b"dead"):
        table.issue(worker, 0.0)
    taken = table.take_back(b"dead")
    assert [t.task_index for t in taken] == [0, 2]
    assert all(table.try_again(t) for t in taken)
    again = [table.issue(b"alive", 0.0) for _ in range(3)]
    assert [lease.task_index for lease in again if lease] == [2, 0, 3]
    assert [lease.lease_id for lease in again if lease] == [4, 5, 6]
    assert table.finish(1, b"dead") is None
    assert table.take_back(b"nobody") == []


def test_an_episode_is_given_up_after_its_tries() -> None:
    table = table_of(1, max_retries=2)
    for expected in (True, True, False):
        table.issue(b"w", 0.0)
        (ticket,) = table.take_back(b"w")
        assert table.try_again(ticket) == expected
    assert (table.waiting, table.playing, table.counts["given_up"]) == (0, 0, 1)


def test_a_lease_is_overdue_after_its_timeout() -> None:
    table = table_of(2, timeout=10.0)
    table.issue(b"w", 0.0)
    table.issue(b"v", 5.0)
    assert table.overdue(10.0) == []
    assert table.overdue(12.0) == [(1, b"w", ticket_of(0))]
    assert table.overdue(12.0) == []
    assert table.finish(1, b"w") is None
    assert table.finish(2, b"v") is not None


def test_the_episodes_of_a_closed_group_are_withdrawn_and_only_those() -> None:
    table = table_of(6)  # groups 0, 0, 1, 1, 2, 2
    for _ in range(3):
        table.issue(b"w", 0.0)
    assert table.withdraw(1) == [(3, b"w")]
    assert (table.waiting, table.playing, table.counts["withdrawn"]) == (2, 2, 2)
    assert table.finish(3, b"w") is None
    assert table.withdraw(1) == []


def test_a_resumed_table_goes_on_counting() -> None:
    table = LeaseTable(max_retries=1, timeout=1.0, first_id=table_of().next_id + 40)
    table.add(ticket_of())
    lease = table.issue(b"w", 0.0)
    assert lease is not None
    assert (lease.lease_id, table.next_id) == (41, 42)
