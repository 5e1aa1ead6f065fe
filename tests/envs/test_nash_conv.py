"""NashConv of players who are known: it sees every information set, in the words of the game's view."""

import re
import subprocess
import sys
from pathlib import Path

import pyspiel
import pytest

from agentgym.config import Config
from agentgym.config_file import save_config
from agentgym.tiny_model import init_model
from agentgym_envs.sources.spiel.nash_conv import information_sets, nash_conv
from agentgym_envs.sources.spiel.policies import KuhnBeginner, equilibrium_bet

KUHN = pyspiel.load_game("kuhn_poker")


def uniform(conversation, answers):
    return [1 / len(answers)] * len(answers)


def equilibrium(conversation, answers):
    share = equilibrium_bet(conversation[-1]["content"])
    return [{"bet": share, "pass": 1 - share}[text] for text in answers]


def test_uniform_play_of_kuhn_poker_has_the_known_nash_conv():
    assert nash_conv(KUHN, uniform) == (pytest.approx(11 / 12), 0.0)


def test_an_equilibrium_of_kuhn_poker_has_none():
    assert nash_conv(KUHN, equilibrium) == (pytest.approx(0.0, abs=1e-12), pytest.approx(0.0))


def test_illegal_answers_are_left_out_and_their_share_is_said():
    def careless(conversation, answers):
        lost = 0.25 if conversation[-1]["content"] == "Q: bet" else 0.0
        return [(1 - lost) * share for share in equilibrium(conversation, answers)]

    assert nash_conv(KUHN, careless) == (pytest.approx(0.0, abs=1e-12), pytest.approx(0.25))


def test_a_conversation_holds_what_the_player_read_and_said_before():
    sets = {name: (conversation, answers) for name, conversation, answers in information_sets(KUHN)}
    assert len(sets) == 12
    conversation, answers = sets["2pb"]
    assert [(m["role"], m["content"]) for m in conversation[1:]] == [
        ("user", "K"),
        ("assistant", "pass"),
        ("user", "K: pass bet"),
    ]
    assert answers == {"pass": 0, "bet": 1}


def test_a_beginner_at_kuhn_poker_is_as_far_from_an_equilibrium_as_it_says():
    def beginner(conversation, answers):
        share = KuhnBeginner.bets(conversation[-1]["content"])
        return [{"bet": share, "pass": 1 - share}[text] for text in answers]

    assert nash_conv(KUHN, beginner)[0] == pytest.approx(0.458, abs=5e-4)


def test_a_game_whose_legal_answers_change_has_all_its_information_sets():
    leduc = pyspiel.load_game("leduc_poker")
    sets = list(information_sets(leduc))
    assert len(sets) == 936
    assert {tuple(answers) for _, _, answers in sets} == {
        ("fold", "call", "raise"), ("call", "raise"), ("fold", "call"),
    }  # fmt: skip


def test_the_script_prints_a_line_for_each_checkpoint_of_a_run(tmp_path):
    config = {
        "env": {"id": "openspiel:kuhn_poker"},
        "policies": {"learner": {"model": "model"}},
        "sampling": {"max_tokens": 5},
        "server": {"max_model_len": 128},
    }
    save_config(Config.model_validate(config), tmp_path / "config.json")
    for step in (1, 2):
        init_model(tmp_path / f"checkpoints/step-{step:06d}/model", seed=step)
    script = Path(__file__).parents[2] / "scripts/bench/nash_conv.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step-000001", "step-000002"]
    for line in lines:
        found, illegal = map(float, re.findall(r"\d\.\d+", line))
        assert 0.0 <= found < 4.0
        assert illegal > 0.99  # random weights say nothing that is legal
