"""PettingZoo's classic games in words."""

import pytest
from plays import Says, play_aec, play_parallel

from agentgym.policy.scripted import load_scripted
from agentgym.registry import make, spec
from agentgym_envs.sources.classic.connect_four import winning_columns
from agentgym_envs.sources.classic.rps import SHAPES

CONNECT_FOUR = "pettingzoo:classic/connect_four-v3"
FIRST, SECOND = "player_0", "player_1"


def play(first, second, **kwargs):
    return play_aec(make(CONNECT_FOUR, **kwargs), {FIRST: first, SECOND: second}, 0)


def test_both_agents_last_answers_carry_the_end_of_connect_four():
    seats = play(Says("1"), Says("2"))
    assert seats[FIRST].rewards == [0.0, 0.0, 0.0, 1.0]
    assert seats[SECOND].rewards == [0.0, 0.0, -1.0]
    assert [seat.success for seat in seats.values()] == [1.0, 0.0]


def test_both_agents_last_answers_carry_the_end_of_tictactoe():
    env = make("pettingzoo:classic/tictactoe-v3")
    seats = play_aec(env, {"player_1": Says("1", "2", "3"), "player_2": Says("4", "5")}, 0)
    assert [seat.rewards for seat in seats.values()] == [[0.0, 0.0, 1.0], [0.0, -1.0]]
    assert [seat.success for seat in seats.values()] == [1.0, 0.0]


def test_each_player_sees_its_own_stones_as_x():
    seats = play(Says("1"), Says("2"))
    views = {a: [m["content"] for m in s.messages if m["role"] == "user"] for a, s in seats.items()}
    assert views[FIRST][1].split("\n") == [*["......."] * 5, "xo....."]
    assert views[SECOND][1].split("\n") == [*["......."] * 4, "o......", "ox....."]


def test_a_full_column_is_illegal():
    seats = play(Says("1", "1", "1", "1", "3"), Says("1", "1", "1", "2"), illegal="forfeit")
    assert seats[FIRST].parts == {"illegal": -1.0}
    assert seats[FIRST].success == 0.0


def test_winning_columns_are_seen_in_every_direction():
    empty = ["......."] * 3
    assert winning_columns("\n".join([*empty, ".......", ".......", "xxx...."]), "x") == [3]
    assert winning_columns("\n".join([*empty, "x......", "x......", "x......"]), "x") == [0]
    assert winning_columns("\n".join([*empty, "..xo...", ".xoo...", "xoox..."]), "x") == [3]
    assert winning_columns("\n".join([*empty[:2], "...o...", "..xo...", ".xoo...", "xoox..."]), "x") == []
    assert winning_columns("\n".join([*empty, "..xo...", ".xoo...", "xoox..."]), "o") == []
    assert winning_columns("\n".join(["oooxooo", *["xxxoxxx"] * 5]), "x") == []


def test_who_sees_lines_beats_who_does_not():
    found, env = spec(CONNECT_FOUR), make(CONNECT_FOUR)
    wins = 0.0
    for seed in range(20):
        for seat, other in ((FIRST, SECOND), (SECOND, FIRST)):
            policies = {
                seat: load_scripted("expert", 0, env_spec=found),
                other: load_scripted("random", 1, env_spec=found),
            }
            wins += play_aec(env, policies, seed)[seat].success
    assert wins / 40 > 0.8


@pytest.mark.parametrize("count", [3, 5])
def test_shapes_beat_those_before_them_in_the_circle(count):
    for mine in range(count):
        for theirs in range(count):
            env = make("pettingzoo:classic/rps-v2", max_cycles=1, num_actions=count)
            seats = play_parallel(env, {FIRST: Says(SHAPES[mine]), SECOND: Says(SHAPES[theirs])}, 0)
            expected = 0.0 if mine == theirs else 1.0 if (mine - theirs) % count in (1, 3) else -1.0
            if count == 3 and mine != theirs:
                expected = 1.0 if (mine - theirs) % 3 == 1 else -1.0
            assert [seat.rewards for seat in seats.values()] == [[expected], [-expected]]
            assert seats[FIRST].success == (expected + 1) / 2


def test_players_read_what_the_other_showed():
    env = make("pettingzoo:classic/rps-v2", max_cycles=2)
    seats = play_parallel(env, {FIRST: Says("rock"), SECOND: Says("paper")}, 0)
    views = [[m["content"] for m in seat.messages if m["role"] == "user"] for seat in seats.values()]
    assert views == [["First round.", "They showed paper."], ["First round.", "They showed rock."]]


def test_a_number_of_shapes_without_names_is_refused():
    with pytest.raises(Exception, match="num_actions = 7"):
        make("pettingzoo:classic/rps-v2", num_actions=7)
