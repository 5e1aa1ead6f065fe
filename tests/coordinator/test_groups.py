from builders import episode_of

from agentgym.coordinator.groups import Group, GroupBuffer, SetAside


def buffer_of(*sizes: int, timeout: float = 10.0) -> GroupBuffer:
    """A buffer with an open group of each size; group g plays task 10 + g."""
    buffer = GroupBuffer(timeout=timeout)
    for group, size in enumerate(sizes):
        buffer.start(group, 10 + group, size)
    return buffer


def test_a_group_is_ready_when_every_member_has_an_episode() -> None:
    buffer = buffer_of(2)
    buffer.add(episode_of(member=1), 0.0)
    assert (buffer.open, buffer.ready) == (1, 0)
    buffer.add(episode_of(member=0), 0.0)
    assert (buffer.open, buffer.ready) == (0, 1)
    (group,) = buffer.take(1)
    assert (sorted(group.episodes), group.task_index, buffer.ready) == ([0, 1], 10, 0)


def test_groups_are_taken_in_the_order_in_which_they_became_ready() -> None:
    buffer = buffer_of(1, 1, 1)
    for group in (2, 0, 1):
        buffer.add(episode_of(group=group), 0.0)
    assert [group.group_id for group in buffer.take(2)] == [2, 0]


def test_an_episode_counts_once() -> None:
    buffer = buffer_of(3)
    first, second = episode_of([1.0]), episode_of([2.0])
    buffer.add(first, 0.0)
    buffer.add(second, 0.0)
    buffer.add(episode_of(group=9), 0.0)
    assert buffer.counts["late"] == 2
    buffer.give_up(0, 1, "broken")
    buffer.add(episode_of(member=2), 0.0)
    (group,) = buffer.take(1)
    assert group.episodes[0] is first


def test_a_group_goes_on_without_members_that_were_given_up() -> None:
    buffer = buffer_of(3)
    buffer.give_up(0, 2, "broken")
    buffer.give_up(9, 0, "broken")
    buffer.add(episode_of(member=0), 0.0)
    buffer.add(episode_of(member=1), 0.0)
    assert (buffer.ready, buffer.counts["dropped"]) == (1, 0)


def test_a_group_with_nothing_to_compare_is_dropped() -> None:
    buffer = buffer_of(3, 1, 1)
    buffer.add(episode_of(), 0.0)
    buffer.give_up(0, 1, "broken")
    buffer.give_up(0, 2, "worse")
    assert (buffer.open, buffer.ready, buffer.counts["dropped"]) == (2, 0, 1)
    buffer.give_up(1, 0, "broken")
    buffer.add(episode_of(group=2), 0.0)
    assert (buffer.open, buffer.ready, buffer.counts["dropped"]) == (0, 1, 2)
    assert buffer.take_dropped() == [SetAside(10, 3, 2, "worse", 0), SetAside(11, 1, 1, "broken", 1)]
    assert buffer.take_dropped() == []


def test_a_group_waits_for_stragglers_from_its_first_member_on() -> None:
    buffer = buffer_of(3, 3, timeout=10.0)
    assert buffer.expire(1000.0) == []
    buffer.add(episode_of(member=0), 1000.0)
    buffer.add(episode_of(member=1), 1009.0)
    assert buffer.expire(1010.0) == []
    (late,) = buffer.expire(1011.0)
    assert (late.group_id, buffer.ready, buffer.open, buffer.counts["short"]) == (0, 1, 1, 1)
    buffer.add(episode_of(member=2), 1012.0)
    assert buffer.counts["late"] == 1


def test_a_lonely_member_of_an_expired_group_is_dropped() -> None:
    buffer = buffer_of(3)
    buffer.add(episode_of(member=0), 0.0)
    assert len(buffer.expire(11.0)) == 1
    assert (buffer.ready, buffer.open, buffer.counts["dropped"]) == (0, 0, 1)
    assert buffer.take_dropped() == [SetAside(10, 3, 0, "only 1 of 3 members finished in time", 0)]


def test_the_tasks_that_no_step_consumed_are_known() -> None:
    buffer = buffer_of(1, 1, 2)
    buffer.add(episode_of(group=1), 0.0)
    buffer.add(episode_of(group=0), 0.0)
    assert buffer.pending() == [(0, 10), (1, 11), (2, 12)]
    buffer.take(1)
    assert buffer.pending() == [(0, 10), (2, 12)]


def differs(group: Group) -> bool:
    return len({episode.reward("agent") for episode in group.members}) > 1


def play(buffer: GroupBuffer, group: int, *rewards: float) -> None:
    """Open a group and play its members."""
    buffer.start(group, 10 + group, len(rewards))
    for member, reward in enumerate(rewards):
        buffer.add(episode_of([reward], group=group, member=member), 0.0)


def test_groups_that_teach_nothing_are_dropped_at_once_and_counted() -> None:
    buffer = GroupBuffer(timeout=10.0, max_filtered=5, teaches=differs)
    play(buffer, 0, 1.0, 1.0)
    play(buffer, 1, 1.0, 0.0)
    assert (buffer.open, buffer.ready, buffer.counts["filtered"]) == (0, 1, 1)
    assert buffer.take_dropped() == [SetAside(10, 2, 0, "", 0)]
    assert buffer.pending() == [(1, 11)]
    assert [group.group_id for group in buffer.take(1)] == [1]


def test_no_more_groups_than_allowed_are_left_out_of_a_step() -> None:
    buffer = GroupBuffer(timeout=10.0, max_filtered=2, teaches=differs)
    for group in range(4):
        play(buffer, group, 1.0, 1.0)
    assert (buffer.ready, buffer.counts["filtered"]) == (2, 2)
    buffer.take(2)
    play(buffer, 4, 1.0, 1.0)
    assert (buffer.ready, buffer.counts["filtered"]) == (0, 3)


def test_a_play_that_is_compared_with_nothing_is_kept() -> None:
    buffer = GroupBuffer(timeout=10.0, max_filtered=2, teaches=differs)
    play(buffer, 0, 1.0)
    assert buffer.ready == 1
