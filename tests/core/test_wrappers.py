"""agentgym.wrappers, on PettingZoo's rock-paper-scissors: rewards in every round, an end by truncation."""

import pettingzoo
import pytest
from farama import api_test, seed_test
from plays import Says, play_aec

from agentgym.wrappers import TextAECWrapper

SHAPES = ("rock", "paper", "scissors")


def describe(env, agent):
    seen = int(env.observe(agent))
    return f"other: {SHAPES[seen]}" if seen < 3 else "?"


def parse(env, agent, text):
    return SHAPES.index(text) if text in SHAPES else None


def rock_paper_scissors(rounds=3, **kwargs):
    return TextAECWrapper(
        pettingzoo.make("aec", "classic/rps-v2", max_cycles=rounds), describe, parse, choices=SHAPES, **kwargs
    )


def play(first, second, **kwargs):
    return play_aec(rock_paper_scissors(**kwargs), {"player_0": first, "player_1": second}, 0)


@pytest.mark.filterwarnings("ignore:Observation is not a NumPy array:UserWarning")
@pytest.mark.filterwarnings("ignore:Observation space for each agent probably should be:UserWarning")
@pytest.mark.filterwarnings("ignore:Action space for each agent probably should be:UserWarning")
@pytest.mark.filterwarnings("ignore:Action mask numpy array is all zeros:UserWarning")
def test_pettingzoo_accepts_the_view():
    api_test(rock_paper_scissors(), num_cycles=20)
    seed_test(rock_paper_scissors, num_cycles=20)


def test_each_answer_gets_the_reward_of_its_round():
    seats = play(
        Says("rock", "paper", "rock"), Says("scissors", "scissors", "rock"), success=lambda r: (r + 3) / 6
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
    seats = play(Says("rock", "stone"), Says("scissors"), illegal_reward=-2.0)
    assert seats["player_0"].rewards == [1.0, -2.0]
    assert seats["player_0"].parts == {"outcome": 1.0, "illegal": -2.0}
    assert seats["player_1"].rewards == [-1.0]
    assert seats["player_1"].success is None


def test_a_living_agent_must_answer():
    env = rock_paper_scissors()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="player_0 has not ended"):
        env.step(None)
