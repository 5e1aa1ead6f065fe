"""agentgym/PrisonersDilemma-v0."""

import pytest
from plays import Says, play_parallel

from agentgym.errors import ConfigError
from agentgym.policy.scripted import load_scripted
from agentgym.registry import make, spec
from agentgym_envs import register_envs
from agentgym_envs.prisoners_dilemma.env import PrisonersDilemma
from agentgym_envs.prisoners_dilemma.policies import Defector, TitForTat
from agentgym_envs.prisoners_dilemma.rules import MOVES, POINTS, parse_move

register_envs()
ENV_ID = "agentgym/PrisonersDilemma-v0"


def play(first, second, **kwargs):
    seats = play_parallel(PrisonersDilemma(**kwargs), {"player_0": first, "player_1": second}, 0)
    return seats["player_0"], seats["player_1"]


def test_it_is_a_dilemma():
    for other in MOVES:
        assert POINTS["defect", other] > POINTS["cooperate", other]
    joint = {(a, b): POINTS[a, b] + POINTS[b, a] for a in MOVES for b in MOVES}
    assert max(joint, key=joint.__getitem__) == ("cooperate", "cooperate")
    assert min(joint, key=joint.__getitem__) == ("defect", "defect")


def test_both_are_paid_in_every_round():
    first, second = play(Says("cooperate", "defect"), Says("cooperate", "cooperate", "defect"))
    assert first.rewards == [3.0, 5.0, 1.0]
    assert second.rewards == [3.0, 0.0, 1.0]
    assert first.metrics["cooperated"] == pytest.approx(1 / 3)
    assert second.metrics["cooperated"] == pytest.approx(2 / 3)


def test_each_reads_what_the_other_did_and_nothing_else_of_it():
    first, second = play(Says("You fool! I defect."), Says("cooperate"), rounds=2)
    assert [m["content"] for m in second.messages if m["role"] == "user"] == ["?", "defect"]
    assert [m["content"] for m in first.messages if m["role"] == "user"] == ["?", "cooperate"]


def test_tit_for_tat_answers_a_defection_with_one():
    first, second = play(TitForTat(seed=0), Defector(seed=0))
    assert first.answers == ["cooperate", "defect", "defect"]
    assert (first.reward, second.reward) == (2.0, 7.0)
    assert [seat.reward for seat in play(TitForTat(seed=0), TitForTat(seed=0))] == [9.0, 9.0]


def test_who_says_neither_has_cooperated_at_a_price():
    silent, other = play(Says("..."), Says("defect"), rounds=1)
    assert silent.parts == {"points": 0.0, "format": -0.5}
    assert silent.metrics == {"cooperated": 1.0}
    assert other.parts == {"points": 5.0}


def test_the_number_of_rounds_can_be_set():
    assert len(play(Says("defect"), Says("defect"), rounds=5)[0].rewards) == 5
    with pytest.raises(ConfigError, match="rounds = 0"):
        PrisonersDilemma(rounds=0)


def test_random_moves_are_both_moves():
    policies = [load_scripted("random", seed, env_spec=spec(ENV_ID)) for seed in (0, 1)]
    assert {answer for seat in play(*policies, rounds=50) for answer in seat.answers} == set(MOVES)


def test_scripted_policies_are_registered():
    players = {name: load_scripted(name, 0, env_spec=spec(ENV_ID)) for name in ("tit_for_tat", "defector")}
    seats = play_parallel(
        make(ENV_ID), {"player_0": players["tit_for_tat"], "player_1": players["defector"]}, 0
    )
    assert seats["player_1"].reward == 7.0


def test_rules_read_the_move_that_is_named_first():
    assert [parse_move(text) for text in ("Defect, or cooperate?", "I cooperate", "", "no")] == [
        "defect",
        "cooperate",
        None,
        None,
    ]
