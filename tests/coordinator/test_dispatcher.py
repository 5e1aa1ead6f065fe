import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import config_of, episode_of, trajectory_of, within
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentgym.config import Config
from agentgym.coordinator.dispatcher import Dispatcher
from agentgym.coordinator.schedule import Schedule, Step
from agentgym.coordinator.store import StoredGroup
from agentgym.episode import EndReason, Episode
from agentgym.errors import RunError
from agentgym.protocol import Lease
from agentgym.simulation.ledger import Entry, Ledger

TASKS, MEMBERS, STALENESS = 3, 2, 1
WORKER = b"worker"


def small_config(**sections: Any) -> Config:
    rollout = {
        "tasks_per_step": TASKS,
        "group_size": MEMBERS,
        "max_staleness": STALENESS,
        "group_timeout": 10.0,
    }
    return config_of(rollout=rollout, coordinator={"max_retries": 2}, **sections)


def filled(config: Config | None = None, **top_up: int) -> tuple[Dispatcher, Step]:
    """A dispatcher whose capacity for step 1 is used."""
    config = config or small_config()
    dispatcher, step = Dispatcher(config), Schedule(config).step(1)
    dispatcher.top_up(step, **{"steps_left": 100, "in_training": 0, **top_up})
    return dispatcher, step


def issued(dispatcher: Dispatcher, count: int, worker: bytes = WORKER) -> list[Lease]:
    leases = [dispatcher.issue(worker, 0.0) for _ in range(count)]
    assert None not in leases
    return [lease for lease in leases if lease]


def answer(lease: Lease, end: EndReason = EndReason.TERMINATED) -> Episode:
    return episode_of(
        group=lease.group_id, member=lease.member, task_index=lease.task_index, end=end, error="why"
    )


def test_groups_are_opened_up_to_the_capacity_and_to_what_is_left() -> None:
    assert filled()[0].groups.open == TASKS * (STALENESS + 1)
    assert filled(in_training=TASKS)[0].groups.open == TASKS
    assert filled(steps_left=1)[0].groups.open == TASKS
    assert filled(in_training=100)[0].groups.open == 0


def test_members_of_a_group_play_the_same_task_with_seeds_of_their_own() -> None:
    dispatcher, _ = filled()
    first, second, third = issued(dispatcher, 3)
    assert (first.seed, first.task_index, first.group_id) == (second.seed, second.task_index, second.group_id)
    assert (first.member, second.member) == (0, 1)
    assert first.sampling_seed != second.sampling_seed
    assert third.seed != first.seed
    assert (first.policies, first.teacher) == ({"*": "learner"}, "")


def test_warm_up_leases_name_the_teacher() -> None:
    dispatcher, _ = filled(small_config(warmup={"steps": 1, "policy": "expert"}))
    assert issued(dispatcher, 1)[0].teacher == "expert"


def test_members_of_a_group_play_the_same_policies_and_groups_take_turns_with_the_seats() -> None:
    config = small_config(
        policies={"foe": {"scripted": "random"}},
        policy_mapping={"b": {"foe": 0.9, "learner": 0.1}},
        seat_rotation=True,
    )
    dispatcher = Dispatcher(config, agents=["a", "b"])
    dispatcher.top_up(Schedule(config).step(1), steps_left=100, in_training=0)
    leases = issued(dispatcher, TASKS * (STALENESS + 1) * MEMBERS)
    by_group: dict[int, list[dict[str, str]]] = {}
    for lease in leases:
        by_group.setdefault(lease.group_id, []).append(lease.policies)
    assert all(members == [members[0]] * MEMBERS for members in by_group.values())
    with_foe = {group: members[0] for group, members in by_group.items() if "foe" in members[0].values()}
    assert with_foe
    for group, policies in with_foe.items():
        assert policies["ab"[group % 2]] == "learner"


def test_groups_against_a_pool_wait_for_its_snapshot_and_keep_their_order(tmp_path: Path) -> None:
    config = small_config(policies={"past": {"pool": "learner"}}, policy_mapping={"b": "past"})
    dispatcher, step = Dispatcher(config, snapshots=tmp_path), Schedule(config).step(1)
    pool = dispatcher.pools.by_name["past"]

    async def first_weights() -> None:
        dispatcher.pools.take_due("learner", 0, "")
        await dispatcher.pools.written()

    for ready in (lambda: None, lambda: within(5, first_weights())):
        ready()
        dispatcher.top_up(step, steps_left=100, in_training=0)
        assert dispatcher.groups.open == 0
    pool.loaded = pool.version
    dispatcher.top_up(step, steps_left=100, in_training=0)
    leases = issued(dispatcher, TASKS * (STALENESS + 1) * MEMBERS)
    assert {lease.policies["b"] for lease in leases} == {"past@0"}
    group = dispatcher.groups.add(answer(leases[0]), 0.0)
    assert group is not None
    assert group.lineup["b"] == "past"  # its snapshots are one policy
    assert [lease.task_index for lease in leases[::MEMBERS]] == list(range(TASKS * (STALENESS + 1)))


def test_matches_are_rated_and_a_checkpoint_keeps_the_ratings() -> None:
    config = small_config(policies={"foe": {"scripted": "random"}}, policy_mapping={"b": "foe"})
    dispatcher = Dispatcher(config)
    dispatcher.top_up(Schedule(config).step(1), steps_left=1, in_training=0)
    for lease in issued(dispatcher, 2):
        mine = trajectory_of([1.0], agent="a")
        foes = trajectory_of([0.0], agent="b", policy="foe", trainable=False)
        match = episode_of(trajectories=[mine, foes], group=lease.group_id, member=lease.member)
        dispatcher.take_in(lease.lease_id, WORKER, match, 0.0)
    assert dispatcher.ratings.win_rate("learner", "foe") == 1.0
    again = Dispatcher(config, json.loads(json.dumps(dispatcher.state())))
    assert again.ratings.matrix() == {"learner": {"foe": 1.0}, "foe": {"learner": 0.0}}
    assert again.ratings.elo == dispatcher.ratings.elo


def test_a_teachers_matches_are_not_the_learners() -> None:
    config = small_config(
        policies={"foe": {"scripted": "random"}}, policy_mapping={"b": "foe"}, warmup={"steps": 1}
    )
    dispatcher = Dispatcher(config)
    dispatcher.top_up(Schedule(config).step(1), steps_left=1, in_training=0)
    (lease,) = issued(dispatcher, 1)
    match = episode_of(
        trajectories=[trajectory_of([1.0], agent="a"), trajectory_of([0.0], agent="b", policy="foe")],
        group=lease.group_id,
        member=lease.member,
    )
    dispatcher.take_in(lease.lease_id, WORKER, match, 0.0)
    assert (dispatcher.counts["ok"], dispatcher.ratings.matrix()) == (1, {})


def test_a_step_is_taken_when_all_of_its_groups_are_ready() -> None:
    dispatcher, step = filled()
    leases = issued(dispatcher, TASKS * MEMBERS)
    for lease in leases[:-1]:
        dispatcher.take_in(lease.lease_id, WORKER, answer(lease), 0.0)
    assert dispatcher.take(step) is None
    dispatcher.take_in(leases[-1].lease_id, WORKER, answer(leases[-1]), 0.0)
    groups = dispatcher.take(step)
    assert groups is not None
    assert [group.group_id for group in groups] == [0, 1, 2]
    assert dispatcher.counts == {"ok": 6, "tokens": 12}


def test_the_environments_failure_is_not_tried_again_and_the_policys_is() -> None:
    dispatcher, _ = filled()
    first, second = issued(dispatcher, 2)
    waiting = dispatcher.leases.waiting
    dispatcher.take_in(first.lease_id, WORKER, answer(first, EndReason.ENV_FAILED), 0.0)
    assert dispatcher.leases.waiting == waiting
    dispatcher.take_in(second.lease_id, WORKER, answer(second, EndReason.POLICY_FAILED), 0.0)
    assert dispatcher.leases.waiting == waiting + 1
    (again,) = issued(dispatcher, 1)
    assert (again.group_id, again.member, again.seed) == (second.group_id, second.member, second.seed)
    assert dispatcher.last_error == "why"


@pytest.mark.parametrize("unreadable", [True, False])
def test_an_answer_that_is_wrong_is_played_again_then_given_up(unreadable: bool) -> None:
    dispatcher, _ = filled()
    for _ in range(3):
        (lease,) = issued(dispatcher, 1)
        assert (lease.group_id, lease.member) == (0, 0)
        if unreadable:
            dispatcher.unreadable(lease.lease_id, WORKER, "an episode message is wrong")
        else:
            dispatcher.take_in(lease.lease_id, WORKER, episode_of(group=1, member=0), 0.0)
    assert dispatcher.leases.counts["given_up"] == 1
    assert dispatcher.groups.counts["late"] == 0
    assert (
        "wrong" if unreadable else "answered member 0 of group 0 with member 0 of group 1"
    ) in dispatcher.last_error


def test_failures_without_a_success_between_end_the_run() -> None:
    dispatcher, step = filled()
    for number in range(16):
        dispatcher.top_up(step, steps_left=100, in_training=0)
        (lease,) = issued(dispatcher, 1)
        failed = answer(lease, EndReason.ENV_FAILED)
        if number < 15:
            dispatcher.take_in(lease.lease_id, WORKER, failed, 0.0)
            continue
        with pytest.raises(
            RunError, match="16 episodes failed one after another, none succeeded; the last one: why"
        ):
            dispatcher.take_in(lease.lease_id, WORKER, failed, 0.0)


def test_a_success_starts_the_count_of_failures_again() -> None:
    dispatcher, step = filled()
    for number in range(60):
        dispatcher.top_up(step, steps_left=100, in_training=0)
        dispatcher.take(step)
        (lease,) = issued(dispatcher, 1)
        end = EndReason.TERMINATED if number % 15 == 14 else EndReason.ENV_FAILED
        dispatcher.take_in(lease.lease_id, WORKER, answer(lease, end), 0.0)


def test_stragglers_of_a_group_that_went_on_are_cancelled() -> None:
    config = config_of(
        rollout={"tasks_per_step": 1, "group_size": 4, "max_staleness": 0, "group_timeout": 10.0}
    )
    dispatcher, step = filled(config)
    leases = issued(dispatcher, 3)
    for lease in leases[:2]:
        dispatcher.take_in(lease.lease_id, WORKER, answer(lease), 0.0)
    assert dispatcher.watch(10.0) == []
    assert dispatcher.watch(11.0) == [(leases[2].lease_id, WORKER)]
    assert (dispatcher.leases.waiting, dispatcher.leases.playing) == (0, 0)
    groups = dispatcher.take(step)
    assert groups is not None
    assert [sorted(group.episodes) for group in groups] == [[0, 1]]


def test_an_overdue_lease_is_cancelled_and_played_again() -> None:
    dispatcher, _ = filled()
    (lease,) = issued(dispatcher, 1)
    limit = 2 * 300.0 + 3 * 30.0  # the episode twice; reset, step and reward functions once
    assert dispatcher.watch(limit) == []
    assert dispatcher.watch(limit + 1) == [(lease.lease_id, WORKER)]
    (again,) = issued(dispatcher, 1)
    assert again.member == lease.member


def test_a_resumed_run_plays_the_tasks_that_were_not_consumed_and_then_new_ones() -> None:
    config = small_config()
    dispatcher, step = filled(config)
    played = issued(dispatcher, TASKS * MEMBERS + 1)
    for lease in played:
        dispatcher.take_in(lease.lease_id, WORKER, answer(lease), 0.0)
    taken = dispatcher.take(step)
    assert taken is not None
    state = dispatcher.state()
    assert state["pending"] == [(3, 3), (4, 4), (5, 5)]
    resumed = Dispatcher(config, state)
    resumed.top_up(step, steps_left=100, in_training=0)
    leases = issued(resumed, TASKS * (STALENESS + 1) * MEMBERS)
    assert [lease.task_index for lease in leases[::MEMBERS]] == [3, 4, 5, 6, 7, 8]
    assert {lease.group_id for lease in leases}.isdisjoint(group.group_id for group in taken)
    assert leases[0].lease_id == state["next_lease"]
    assert resumed.counts == dispatcher.counts

    # A task keeps its group and its seeds, whoever plays it.
    def draws(leases: list[Lease]) -> dict[tuple[int, int], tuple[int, int, int]]:
        return {(e.task_index, e.member): (e.group_id, e.seed, e.sampling_seed) for e in leases}

    before, again = draws(played + issued(dispatcher, 5)), draws(leases)
    assert {task for task, _ in before.keys() & again.keys()} == {3, 4, 5}
    assert all(again[key] == before[key] for key in before.keys() & again.keys())


def test_groups_that_were_opened_after_the_checkpoint_keep_their_ids() -> None:
    ledger = Ledger()
    # Of those that were opened, the only one with an episode.
    ledger.entries[8] = Entry(StoredGroup(8, 6, MEMBERS))
    state = {"next_task": 4, "next_group": 5, "pending": [(2, 1)]}
    resumed = Dispatcher(small_config(), state, store=ledger)
    resumed.top_up(Schedule(small_config()).step(1), steps_left=100, in_training=0)
    opened = [(lease.group_id, lease.task_index) for lease in issued(resumed, 6 * MEMBERS)[::MEMBERS]]
    assert opened == [(8, 6), (2, 1), (5, 4), (6, 5), (9, 7), (10, 8)]


@pytest.mark.parametrize("max_filtered", [0, 4])
def test_groups_that_are_left_out_make_nothing_older(max_filtered: int) -> None:
    config = small_config()
    rollout = config.rollout.model_copy(update={"max_filtered": max_filtered})
    dispatcher = Dispatcher(config.model_copy(update={"rollout": rollout}))
    step, rng = Schedule(config).step(1), np.random.default_rng(3)
    opened: dict[int, int] = {}
    ages, version, in_training, busy = [], 0, 0, 0
    for _ in range(600):
        dispatcher.top_up(step, steps_left=100, in_training=in_training)
        assert dispatcher.groups.open + dispatcher.groups.ready + in_training <= step.capacity
        if (lease := dispatcher.issue(WORKER, 0.0)) is not None:
            opened.setdefault(lease.group_id, version)
            reward = float(lease.member * (rng.random() < 0.5))  # half of the groups teach something
            play = episode_of([reward], group=lease.group_id, member=lease.member)
            dispatcher.take_in(lease.lease_id, WORKER, play, 0.0)
        busy = max(0, busy - 1)
        if in_training and not busy:
            version, in_training = version + 1, 0
        if not in_training and (groups := dispatcher.take(step)) is not None:
            ages += [version - opened[group.group_id] for group in groups]
            in_training, busy = len(groups), 2
    assert max(ages) <= STALENESS
    assert len(ages) % TASKS == 0
    assert bool(dispatcher.groups.counts["filtered"]) == bool(max_filtered)


class Life(RuleBasedStateMachine):
    """Workers that come, answer, answer twice, fail, fall silent and die, in any order."""

    def __init__(self) -> None:
        super().__init__()
        config = small_config()
        self.dispatcher, self.step, self.now = Dispatcher(config), Schedule(config).step(1), 0.0
        self.held: dict[int, tuple[bytes, Lease]] = {}
        """Leases that are out, as the workers believe."""
        self.in_training, self.failures, self.accepted, self.env_failed = 0, 0, 0, 0
        self.used: list[tuple[int, int]] = []

    @rule()
    def top_up(self) -> None:
        self.dispatcher.top_up(self.step, steps_left=100, in_training=self.in_training)

    @rule(worker=st.sampled_from([b"a", b"b", b"c"]), count=st.integers(1, 6))
    def issue(self, worker: bytes, count: int) -> None:
        for _ in range(count):
            lease = self.dispatcher.issue(worker, self.now)
            if lease is not None:
                assert lease.lease_id not in self.held
                self.held[lease.lease_id] = (worker, lease)

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(), twice=st.booleans(), how=st.sampled_from(["ok", "ok", "ok", "env", "policy", "noise"])
    )
    def finish(self, data: st.DataObject, twice: bool, how: str) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.held)))
        worker, lease = self.held[lease_id]
        if not twice:
            del self.held[lease_id]
        how = "ok" if self.failures >= 15 else how
        before = self.dispatcher.leases.counts["finished"]
        if how == "noise":
            self.dispatcher.unreadable(lease_id, worker, "noise")
        else:
            ends = {"ok": EndReason.MAX_TURNS, "env": EndReason.ENV_FAILED, "policy": EndReason.POLICY_FAILED}
            self.dispatcher.take_in(lease_id, worker, answer(lease, ends[how]), self.now)
        if self.dispatcher.leases.counts["finished"] > before:
            self.failures = 0 if how == "ok" else self.failures + 1
            self.accepted += how == "ok"
            self.env_failed += how == "env"

    @rule(worker=st.sampled_from([b"a", b"b", b"c"]), silent=st.booleans())
    def die(self, worker: bytes, silent: bool) -> None:
        self.dispatcher.worker_lost(worker)
        if not silent:  # else its answers still arrive, too late
            self.held = {i: (w, lease) for i, (w, lease) in self.held.items() if w != worker}

    @rule(seconds=st.sampled_from([1.0, 11.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.dispatcher.watch(self.now)

    @rule()
    def train(self) -> None:
        groups = self.dispatcher.take(self.step)
        if groups is not None:
            self.in_training += len(groups)
            for group in groups:
                assert len(group.episodes) == MEMBERS
                self.used += [(group.group_id, member) for member in group.episodes]

    @rule()
    def publish(self) -> None:
        self.in_training = 0

    @invariant()
    def capacity_is_never_exceeded(self) -> None:
        groups, leases = self.dispatcher.groups, self.dispatcher.leases
        assert groups.open + groups.ready + self.in_training <= self.step.capacity
        assert leases.waiting + leases.playing <= groups.open * MEMBERS

    @invariant()
    def every_ticket_leaves_once(self) -> None:
        groups, leases = self.dispatcher.groups, self.dispatcher.leases
        gone = self.accepted + self.env_failed + leases.counts["given_up"] + leases.counts["withdrawn"]
        assert groups.counts["opened"] * MEMBERS == gone + leases.waiting + leases.playing
        opened = groups.counts["ready"] + groups.counts["dropped"] + groups.open
        assert groups.counts["opened"] == opened

    @invariant()
    def no_episode_is_counted_twice(self) -> None:
        assert len(self.used) == len(set(self.used))
        assert self.dispatcher.groups.counts["late"] == 0
        assert self.dispatcher.counts["truncated"] == self.accepted


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_every_ticket_leaves_once_whatever_happens = Life.TestCase
