"""The views of PettingZoo environments, on rock-paper-scissors: rewards in every round, an end by truncation."""

import pettingzoo
import pytest
from farama import api_test, parallel_api_test, parallel_seed_test, seed_test
from plays import Says, play_aec, play_parallel

from agentgym.policy.scripted import RandomLegal
from agentgym.wrappers.aec import TextAECWrapper
from agentgym.wrappers.parallel import TextParallelWrapper

SHAPES = ("rock", "paper", "scissors")


def describe(env, agent, observation):
    return f"other: {SHAPES[int(observation)]}" if observation < 3 else "?"


def parse(env, agent, text):
    return SHAPES.index(text) if text in SHAPES else None


def rock_paper_scissors(rounds=3, **kwargs):
    return TextAECWrapper(
        pettingzoo.make("aec", "classic/rps-v2", max_cycles=rounds), describe, parse, choices=SHAPES, **kwargs
    )


def at_once(rounds=3, **kwargs):
    env = pettingzoo.make("parallel", "classic/rps-v2", max_cycles=rounds)
    return TextParallelWrapper(env, describe, parse, **{"choices": SHAPES, **kwargs})


def play(first, second, **kwargs):
    return play_aec(rock_paper_scissors(**kwargs), {"player_0": first, "player_1": second}, 0)


@pytest.mark.filterwarnings("ignore:Observation is not a NumPy array:UserWarning")
@pytest.mark.filterwarnings("ignore:Observation space for each agent probably should be:UserWarning")
@pytest.mark.filterwarnings("ignore:Action space for each agent probably should be:UserWarning")
@pytest.mark.filterwarnings("ignore:Action mask numpy array is all zeros:UserWarning")
@pytest.mark.parametrize("illegal", ["retry", "penalty", "forfeit"])
def test_pettingzoo_accepts_the_views(illegal):
    api_test(rock_paper_scissors(illegal=illegal), num_cycles=20)
    seed_test(rock_paper_scissors, num_cycles=20)
    for choices in (SHAPES, ()):  # without choices nearly every sampled text is illegal
        parallel_api_test(at_once(illegal=illegal, choices=choices), num_cycles=20)
        parallel_seed_test(lambda: at_once(illegal=illegal, choices=choices), num_cycles=20)  # noqa: B023


def test_each_answer_gets_the_reward_of_its_round():
    seats = play(
        Says("rock", "paper", "rock"),
        Says("scissors", "scissors", "rock"),
        success=lambda env, agent, r: (r + 3) / 6,
    )
    assert seats["player_0"].rewards == [1.0, -1.0, 0.0]
    assert seats["player_1"].rewards == [-1.0, 1.0, 0.0]
    assert [seat.success for seat in seats.values()] == [0.5, 0.5]


def test_agents_read_what_the_other_did():
    seats = play(Says("rock"), Says("paper", "scissors"))
    assert [m["content"] for m in seats["player_0"].messages if m["role"] == "user"] == [
        "?",
        "other: paper",
        "other: scissors",
    ]


def test_an_end_by_truncation_stays_a_truncation():
    env = rock_paper_scissors(rounds=1)
    env.reset(seed=0)
    env.step("rock")
    env.step("rock")
    assert env.truncations == {"player_0": True, "player_1": True}
    assert env.terminations == {"player_0": False, "player_1": False}


def test_a_forfeit_keeps_what_was_earned_before():
    seats = play(Says("rock", "stone"), Says("scissors"), illegal="forfeit", illegal_reward=-2.0)
    assert seats["player_0"].rewards == [1.0, -2.0]
    assert seats["player_0"].parts == {"outcome": 1.0, "illegal": -2.0}
    assert seats["player_1"].rewards == [-1.0]
    assert seats["player_1"].success is None


def test_a_living_agent_must_answer():
    env = rock_paper_scissors()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="player_0 has not ended"):
        env.step(None)


def test_by_turns_an_agent_answers_again_and_the_other_does_not_notice():
    seats = play(Says("stone", "lizard", "rock", "paper"), Says("scissors", "rock"))
    first, second = seats["player_0"], seats["player_1"]
    assert first.rewards[:4] == [0.0, 0.0, 1.0, 1.0]
    assert first.metrics == {"illegal": 2.0}
    assert [m["content"] for m in first.messages if m["role"] == "user"][:4] == [
        "?",
        "Illegal answer. Legal: rock, paper, scissors.",
        "Illegal answer. Legal: rock, paper, scissors.",
        "other: scissors",
    ]
    assert second.rewards == [-1.0, -1.0, -1.0]
    assert second.metrics == {}


def test_by_turns_the_last_retry_is_followed_by_a_forfeit():
    seats = play(Says("stone"), Says("scissors"), success=lambda env, agent, outcome: 0.5, max_retries=1)
    assert seats["player_0"].rewards == [0.0, -1.0]
    assert seats["player_0"].success == 0.0
    assert seats["player_1"].rewards == []
    env = rock_paper_scissors(max_retries=0, success=lambda env, agent, outcome: 0.5)
    env.reset(seed=0)
    env.step("rock")
    env.step("stone")
    assert env.infos["player_0"] == {"success": 0.5}
    assert env.infos["player_1"]["success"] == 0.0


def test_by_turns_a_penalty_belongs_to_the_illegal_answer():
    seats = play(Says("stone", "rock"), Says("scissors"), illegal="penalty", illegal_reward=-0.25)
    assert seats["player_0"].rewards == [-0.25, 1.0, 1.0, 1.0]
    assert seats["player_0"].parts == {"illegal": -0.25, "outcome": 3.0}


def test_the_legal_answers_are_in_the_info_of_the_agent_to_move():
    env = rock_paper_scissors()
    env.reset(seed=0)
    assert env.infos == {"player_0": {"legal": list(SHAPES)}, "player_1": {}}
    env.step("stone")
    assert env.infos["player_0"]["legal"] == list(SHAPES)
    env.step("rock")
    assert env.infos["player_0"] == {}
    assert env.infos["player_1"]["legal"] == list(SHAPES)


def play_at_once(first, second, **kwargs):
    return play_parallel(at_once(**kwargs), {"player_0": first, "player_1": second}, 0)


def test_at_once_each_round_pays_both():
    seats = play_at_once(
        Says("rock", "paper", "rock"),
        Says("scissors", "scissors", "rock"),
        success=lambda env, agent, outcome: (outcome + 3) / 6,
    )
    assert seats["player_0"].rewards == [1.0, -1.0, 0.0]
    assert seats["player_1"].rewards == [-1.0, 1.0, 0.0]
    assert [seat.success for seat in seats.values()] == [0.5, 0.5]


def test_at_once_everyone_answers_again_when_one_answer_is_illegal():
    seats = play_at_once(Says("stone", "rock"), Says("paper", "scissors"), illegal="penalty")
    views = {a: [m["content"] for m in s.messages if m["role"] == "user"] for a, s in seats.items()}
    assert views["player_0"][:3] == ["?", "Illegal answer. Legal: rock, paper, scissors.", "other: scissors"]
    assert views["player_1"][:3] == ["?", "Another answer was illegal. Answer again.", "other: rock"]
    assert seats["player_0"].rewards == [-1.0, 1.0, 1.0, 1.0]
    assert seats["player_1"].rewards == [0.0, -1.0, -1.0, -1.0]
    assert (seats["player_0"].metrics, seats["player_1"].metrics) == ({"illegal": 1.0}, {})


def test_at_once_only_those_who_forfeit_pay_for_it():
    env = at_once(max_retries=1, success=lambda env, agent, outcome: 0.5)
    env.reset(seed=0)
    env.step({"player_0": "stone", "player_1": "rock"})
    observations, rewards, terminations, truncations, infos = env.step(
        {"player_0": "stone", "player_1": "lizard"}
    )
    assert rewards == {"player_0": -1.0, "player_1": 0.0}
    assert terminations == {"player_0": True, "player_1": True}
    assert not any(truncations.values())
    assert env.agents == []
    assert {agent: info["success"] for agent, info in infos.items()} == {"player_0": 0.0, "player_1": 0.5}
    assert all(view["messages"] == [] and not view["action_mask"].any() for view in observations.values())


def test_at_once_everyone_must_answer():
    env = at_once()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="player_1 must answer with a text"):
        env.step({"player_0": "rock"})


def test_random_legal_answers_are_never_illegal():
    for play_of, env in ((play_aec, rock_paper_scissors()), (play_parallel, at_once())):
        policies = {agent: RandomLegal(seed=index) for index, agent in enumerate(env.possible_agents)}
        seats = play_of(env, policies, 3)
        assert all(seat.metrics == {} and len(seat.rewards) == 3 for seat in seats.values())
        assert seats == play_of(env, policies, 3)
