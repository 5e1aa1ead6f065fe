from collections import Counter
from typing import Any

import pytest
from builders import config_of, episode_of

from agentgym.coordinator.dispatcher import Dispatcher
from agentgym.coordinator.lineup import Lineups
from agentgym.coordinator.schedule import Schedule
from agentgym.coordinator.store import StoredGroup
from agentgym.episode_codec import encode_episode
from agentgym.errors import ConfigError, RunError
from agentgym.simulation.ledger import Entry, Ledger

AGENTS = ["player_1", "player_2"]
POLICIES = {"foe": {"scripted": "random"}, "expert": {"scripted": "expert"}}


def lineups_of(agents: list[str] = AGENTS, **settings: Any) -> Lineups:
    return Lineups(config_of("agentgym/TicTacToe-v0", policies=POLICIES, **settings), agents)


def drawn(lineups: Lineups, group: int = 0) -> dict[str, str]:
    return lineups.draw(group_id=group, task_index=group + 100, seed=group + 200)


def test_everybody_plays_the_trained_policy_unless_the_mapping_says_otherwise() -> None:
    assert drawn(lineups_of()) == {"player_1": "learner", "player_2": "learner", "*": "learner"}
    lineups = lineups_of(policy_mapping={"player_2": "foe"})
    assert drawn(lineups) == {"player_1": "learner", "player_2": "foe", "*": "learner"}
    lineups = lineups_of(policy_mapping={"player_2": "learner", "*": "foe"})
    assert drawn(lineups) == {"player_1": "foe", "player_2": "learner", "*": "foe"}


def test_an_environment_that_names_no_agents_gets_the_mapping_as_it_is() -> None:
    lineups = lineups_of([], policy_mapping={"guest": "foe"})
    assert drawn(lineups) == {"guest": "foe", "*": "learner"}


def test_probabilities_hold_over_the_groups_and_each_group_is_drawn_for_itself() -> None:
    lineups = lineups_of(policy_mapping={"player_2": {"learner": 0.5, "foe": 0.3, "expert": 0.2}})
    draws = [drawn(lineups, group)["player_2"] for group in range(2000)]
    counts = Counter(draws)
    assert counts["learner"] == pytest.approx(1000, abs=100)
    assert counts["foe"] == pytest.approx(600, abs=100)
    assert counts["expert"] == pytest.approx(400, abs=100)
    again = lineups_of(policy_mapping={"player_2": {"learner": 0.5, "foe": 0.3, "expert": 0.2}})
    assert [drawn(again, group)["player_2"] for group in reversed(range(50))] == draws[:50][::-1]


def test_another_seed_is_another_draw() -> None:
    mapping = {"player_2": {"learner": 0.5, "foe": 0.5}}
    draws = {
        seed: tuple(
            drawn(lineups_of(policy_mapping=mapping, run={"seed": seed}), group)["player_2"]
            for group in range(40)
        )
        for seed in (1, 2)
    }
    assert draws[1] != draws[2]


def test_seats_rotate_from_group_to_group() -> None:
    lineups = lineups_of(policy_mapping={"player_2": "expert"}, seat_rotation=True)
    seats = [[drawn(lineups, group)[agent] for agent in AGENTS] for group in range(4)]
    assert seats == [["learner", "expert"], ["expert", "learner"]] * 2


def test_three_policies_play_every_seat_in_turn() -> None:
    agents = ["a", "b", "c"]
    lineups = lineups_of(agents, policy_mapping={"b": "foe", "c": "expert"}, seat_rotation=True)
    played = [tuple(drawn(lineups, group)[agent] for agent in agents) for group in range(3)]
    assert played[0] == ("learner", "foe", "expert")
    for seat in zip(*played, strict=True):
        assert sorted(seat) == ["expert", "foe", "learner"]


def test_a_group_always_has_somebody_to_train() -> None:
    choice = {"learner": 0.1, "foe": 0.9}
    lineups = lineups_of(policy_mapping={"player_1": choice, "player_2": choice})
    assert all("learner" in drawn(lineups, group).values() for group in range(100))


def test_a_function_decides_for_each_agent_of_each_group() -> None:
    lineups = lineups_of(policy_mapping_fn="toy_mappings:by_first_seat")
    assert drawn(lineups, 0) == {"player_1": "learner", "player_2": "expert", "*": "learner"}
    assert drawn(lineups, 1) == {"player_1": "expert", "player_2": "learner", "*": "learner"}


def test_a_function_hears_what_all_members_of_a_group_share() -> None:
    assert drawn(lineups_of(policy_mapping_fn="toy_mappings:tells_what_it_hears"), 3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "in_doubt",
            r"in_doubt\('player_1', .*\) returned 'nobody'; known policies: \['expert', 'foe', 'learner'\]",
        ),
        ("at_a_loss", r"at_a_loss\('player_1', .*\) raised KeyError: 'who'"),
        ("passive", r"no agent of agentgym/TicTacToe-v0 plays a policy of policies_to_train = \['learner'\]"),
    ],
)
def test_a_function_that_goes_wrong_is_named(function: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        drawn(lineups_of(policy_mapping_fn=f"toy_mappings:{function}"))


def test_a_mapping_without_anybody_to_train_is_refused_before_it_is_played() -> None:
    lineups = lineups_of(policy_mapping={"player_1": "foe", "player_2": "expert"})
    with pytest.raises(RunError, match="in group 0 no agent of agentgym/TicTacToe-v0 plays a policy of"):
        drawn(lineups)


@pytest.mark.parametrize(
    ("agents", "settings", "message"),
    [
        (
            AGENTS,
            {"policy_mapping": {"player_3": "foe"}},
            "'player_3'; the agents of .* are player_1, player_2",
        ),
        ([], {"seat_rotation": True}, "seat_rotation needs to know the agents"),
        ([], {"policy_mapping_fn": "toy_mappings:passive"}, "policy_mapping_fn needs to know the agents"),
        (AGENTS, {"policy_mapping_fn": "toy_mappings:nothing"}, "nothing"),
        (
            AGENTS,
            {"policy_mapping_fn": "toy_mappings:NO_FUNCTION"},
            "'toy_mappings:NO_FUNCTION' is not a function",
        ),
    ],
)
def test_a_mapping_that_does_not_fit_the_environment_is_refused(
    agents: list[str], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        lineups_of(agents, **settings)


def test_a_group_knows_who_plays_whom_in_it_after_a_crash_too() -> None:
    config = config_of(
        run={"seed": 3},  # with which the foe is drawn for some of the groups
        policies=POLICIES,
        policy_mapping={"player_2": {"foe": 0.5, "learner": 0.5}},
        seat_rotation=True,
        rollout={"tasks_per_step": 4, "group_size": 1},
        algorithm={"advantage": "turn_batch_mean"},
    )
    dispatcher, step, ledger = Dispatcher(config, agents=AGENTS), Schedule(config).step(1), Ledger()
    dispatcher.top_up(step, steps_left=100, in_training=0)
    lineups = []
    for _ in range(4):
        lease = dispatcher.issue(b"worker", 0.0)
        assert lease is not None
        lineups.append(lease.policies)
        played = episode_of(group=lease.group_id, task_index=lease.task_index)
        dispatcher.take_in(lease.lease_id, b"worker", played, 0.0)
        stored = StoredGroup(lease.group_id, lease.task_index, 1, complete=True)
        ledger.entries[lease.group_id] = Entry(stored, episodes={0: encode_episode(played)})
    resumed = Dispatcher(config, {"next_group": 4, "next_task": 4}, agents=AGENTS, store=ledger)
    resumed.top_up(step, steps_left=100, in_training=0)
    for taken in (dispatcher.take(step), resumed.take(step)):
        assert taken is not None
        assert [group.lineup for group in taken] == lineups
    assert len({tuple(lineup.items()) for lineup in lineups}) > 1
