"""agentgym/TicTacToe-v0."""

import numpy as np
import pytest
from farama import api_test, seed_test
from plays import Says, play_aec

from agentgym.errors import ConfigError
from agentgym.policy.scripted import load_scripted
from agentgym.registry import make, spec
from agentgym_envs import register_envs
from agentgym_envs.tictactoe import rules
from agentgym_envs.tictactoe.env import TicTacToe
from agentgym_envs.tictactoe.policies import Minimax, NoisyMove, RandomMove

register_envs()
ENV_ID = "agentgym/TicTacToe-v0"
FIRST, SECOND = "player_1", "player_2"

# What PettingZoo's checks say about every environment whose observations are not arrays.
quiet = [
    pytest.mark.filterwarnings("ignore:Observation is not a NumPy array:UserWarning"),
    pytest.mark.filterwarnings("ignore:Observation space for each agent probably should be:UserWarning"),
    pytest.mark.filterwarnings("ignore:Action space for each agent probably should be:UserWarning"),
    pytest.mark.filterwarnings("ignore:Action mask numpy array is all zeros:UserWarning"),
]


def with_marks(*marks):
    def apply(function):
        for mark in marks:
            function = mark(function)
        return function

    return apply


def play(first, second, seed=0):
    return play_aec(TicTacToe(), {FIRST: first, SECOND: second}, seed)


@with_marks(*quiet)
def test_pettingzoo_accepts_it():
    api_test(TicTacToe(), num_cycles=100)
    seed_test(TicTacToe, num_cycles=50)


def test_perfect_play_never_loses_from_either_seat():
    env, expert, wins = TicTacToe(), Minimax(seed=0), 0
    for seed in range(30):
        for seat in (FIRST, SECOND):
            other = SECOND if seat == FIRST else FIRST
            for opponent in (RandomMove(seed=1), NoisyMove(seed=1)):
                seats = play_aec(env, {seat: expert, other: opponent}, seed)
                assert seats[seat].reward >= 0.0
                wins += seats[seat].reward == 1.0
    assert wins > 90


def test_perfect_play_against_itself_is_a_draw():
    for seed in range(10):
        seats = play(Minimax(seed=1), Minimax(seed=2), seed)
        assert [seats[a].reward for a in (FIRST, SECOND)] == [0.0, 0.0]
        assert [seats[a].success for a in (FIRST, SECOND)] == [0.5, 0.5]
        assert seats[FIRST].parts == {}


def test_random_play_scores_as_the_card_says():
    plays = [play(RandomMove(seed=0), RandomMove(seed=1), seed) for seed in range(300)]
    wins = sum(p[FIRST].reward == 1.0 for p in plays) / len(plays)
    draws = sum(p[FIRST].reward == 0.0 for p in plays) / len(plays)
    assert wins == pytest.approx(0.585, abs=0.08)
    assert draws == pytest.approx(0.127, abs=0.06)


def test_the_noisy_player_stands_between_random_and_perfect_play():
    plays = [play(NoisyMove(seed=0), RandomMove(seed=1), seed) for seed in range(300)]
    score = sum(p[FIRST].success for p in plays) / len(plays)
    assert 0.64 < score < 0.87


def test_both_agents_last_answers_carry_the_final_reward():
    seats = play(Says("1", "2", "3"), Says("4", "5"))
    assert seats[FIRST].rewards == [0.0, 0.0, 1.0]
    assert seats[SECOND].rewards == [0.0, -1.0]
    assert seats[FIRST].parts == {"outcome": 1.0}
    assert seats[SECOND].parts == {"outcome": -1.0}
    assert (seats[FIRST].success, seats[SECOND].success) == (1.0, 0.0)


def test_each_player_sees_the_board_from_its_own_side():
    seats = play(Says("1", "2", "3"), Says("4", "5"))
    views = {a: [m["content"] for m in seats[a].messages if m["role"] == "user"] for a in seats}
    assert views[FIRST] == [".........", "x..o.....", "xx.oo...."]
    assert views[SECOND] == ["o........", "oo.x....."]


def test_a_player_may_be_shown_the_moves_instead_of_the_board():
    seats = play_aec(TicTacToe(shown="moves"), {FIRST: Says("1", "2", "3"), SECOND: Says("4", "5")}, 0)
    views = {a: [m["content"] for m in seats[a].messages if m["role"] == "user"] for a in seats}
    assert views == {FIRST: ["-", "4", "5"], SECOND: ["1", "2"]}
    assert seats[FIRST].rewards == [0.0, 0.0, 1.0]


def test_scripted_players_play_the_same_whether_they_see_the_board_or_the_moves():
    for seed in range(20):
        played = []
        for shown in ("board", "moves"):
            players = {FIRST: Minimax(seed=1), SECOND: NoisyMove(seed=2, p=0.9)}
            seats = play_aec(TicTacToe(shown=shown), players, seed)
            played.append(
                [[m["content"] for m in seats[a].messages if m["role"] == "assistant"] for a in seats]
            )
        assert played[0] == played[1]


def test_a_move_is_shown_again_after_an_illegal_answer_in_the_next_game_only():
    env = TicTacToe(shown="moves", illegal="retry")
    env.reset(seed=0)
    env.step("5")
    env.step("5")
    assert "Illegal" in env.observe(SECOND)["messages"][0]["content"]
    env.step("1")
    assert env.observe(FIRST)["messages"][0]["content"] == "1"
    env.reset(seed=1)
    assert env.observe(FIRST)["messages"][0]["content"] == "-"


def test_what_is_shown_must_be_known():
    with pytest.raises(ConfigError, match="shown = 'picture'; use one of board, moves"):
        TicTacToe(shown="picture")


@pytest.mark.parametrize("text", ["", "0", "10", "x", "1 2", "5"])
def test_an_illegal_text_is_a_forfeit_of_the_mover(text):
    seats = play(Says("5", "1"), Says(text))
    assert seats[SECOND].rewards == [-1.0]
    assert seats[SECOND].parts == {"illegal": -1.0}
    assert seats[SECOND].metrics == {"illegal": 1.0}
    assert seats[SECOND].success == 0.0
    assert seats[FIRST].rewards == [0.0]
    assert seats[FIRST].parts == {}
    assert seats[FIRST].success == 0.5


def test_an_illegal_first_text_ends_the_game_before_the_other_has_moved():
    env = TicTacToe()
    env.reset(seed=0)
    env.step("nonsense")
    assert env.rewards == {FIRST: -1.0, SECOND: 0.0}
    left = []
    for agent in env.agent_iter():
        left.append(agent)
        env.step(None)
    assert sorted(left) == [FIRST, SECOND]


def test_the_game_can_be_played_again_after_a_forfeit():
    env = TicTacToe()
    play_aec(env, {FIRST: Says("no"), SECOND: Says("1")}, 0)
    assert play_aec(env, {FIRST: Says("1", "2", "3"), SECOND: Says("4", "5")}, 0)[FIRST].reward == 1.0


def test_the_mask_names_the_free_cells_of_the_one_to_move():
    env = TicTacToe()
    env.reset()
    env.step("2")
    assert env.observe(SECOND)["action_mask"].tolist() == [1, 0, 1, 1, 1, 1, 1, 1, 1]
    assert not env.observe(FIRST)["action_mask"].any()
    assert env.observe(SECOND)["messages"] == env.observe(SECOND)["messages"]
    assert env.observe(SECOND)["action_mask"].dtype == np.int8


def test_the_board_is_shown_row_by_row():
    env = TicTacToe(render_mode="ansi")
    env.reset()
    env.step("2")
    env.step("4")
    assert env.render() == ".x.\no..\n..."


def test_rules_see_lines_and_replies():
    assert rules.completing_cells("xx.......", "x") == (2,)
    assert rules.other_side("xo.") == "ox."
    assert rules.value(".........") == 0
    assert rules.best_cells("xx.oo....") == [2]


def test_scripted_policies_are_registered():
    policies = {name: load_scripted(name, 0, env_spec=spec(ENV_ID)) for name in spec(ENV_ID).scripted}
    assert set(policies) == {"random", "noisy", "expert"}
    seats = play_aec(make(ENV_ID), {FIRST: policies["random"], SECOND: policies["expert"]}, 3)
    assert seats[SECOND].reward >= 0
