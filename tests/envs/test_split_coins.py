"""agentgym/SplitCoins-v0."""

import pytest
from plays import Says, play_parallel

from agentgym.errors import ConfigError
from agentgym.policy.scripted import load_scripted
from agentgym.registry import make, spec
from agentgym_envs import register_envs
from agentgym_envs.split_coins.env import SplitCoins
from agentgym_envs.split_coins.policies import FairClaim, RandomClaim
from agentgym_envs.split_coins.rules import parse_claim

register_envs()
ENV_ID = "agentgym/SplitCoins-v0"


def play(first, second, seed=0, **kwargs):
    return play_parallel(SplitCoins(**kwargs), {"player_0": first, "player_1": second}, seed)


def test_fair_claims_pay_half_each():
    seats = play(FairClaim(seed=0), FairClaim(seed=0))
    for seat in seats.values():
        assert seat.rewards == [0.0, 0.5]
        assert seat.parts == {"coins": 0.5}
        assert seat.success == 1.0
        assert seat.metrics == {"claim": 5.0}


def test_claims_that_do_not_fit_pay_nothing():
    seats = play(Says("claim 6"), Says("claim 5"))
    assert [seat.reward for seat in seats.values()] == [0.0, 0.0]
    assert [seat.success for seat in seats.values()] == [0.0, 0.0]


def test_unequal_claims_that_fit_pay_what_was_claimed():
    seats = play(Says("I claim 3"), Says("claim 7"))
    assert [seat.reward for seat in seats.values()] == pytest.approx([0.3, 0.7])


def test_only_the_last_round_counts():
    assert play(Says("claim 9", "claim 5"), Says("claim 9", "claim 5"))["player_0"].reward == 0.5
    assert play(Says("claim 5", "claim 9"), Says("claim 5", "claim 9"))["player_0"].reward == 0.0


def test_each_reads_the_words_of_the_other():
    seats = play(Says("I take 6", "claim 6"), Says("no!\tcafé \n" + "x" * 90, "claim 4"))
    heard = [m["content"] for m in seats["player_1"].messages if m["role"] == "user"]
    assert heard == ["?", "I take 6"]
    reply = seats["player_0"].messages[-2]["content"]
    assert len(reply) <= 40
    assert all(" " <= character <= "~" for character in reply)


def test_a_last_text_without_a_claim_costs_its_author_only():
    seats = play(Says("hello"), Says("claim 8"))
    assert seats["player_0"].parts == {"coins": 0.0, "format": -0.1}
    assert seats["player_1"].parts == {"coins": 0.8}
    assert seats["player_1"].success == 0.0


def test_the_number_of_rounds_can_be_set():
    assert len(play(FairClaim(seed=0), FairClaim(seed=0), rounds=3)["player_0"].rewards) == 3
    with pytest.raises(ConfigError, match="rounds = 0"):
        SplitCoins(rounds=0)


def test_random_claims_earn_less_than_fair_ones():
    plays = [play(RandomClaim(seed=0), RandomClaim(seed=1), seed) for seed in range(500)]
    assert 0.12 < sum(p["player_0"].reward for p in plays) / len(plays) < 0.25


def test_scripted_policies_are_registered():
    policies = {name: load_scripted(name, 0, env_spec=spec(ENV_ID)) for name in ("random", "fair", "expert")}
    seats = play_parallel(make(ENV_ID), {"player_0": policies["fair"], "player_1": policies["expert"]}, 0)
    assert seats["player_1"].reward == 0.5


def test_rules_read_claims():
    assert [parse_claim(text, 10) for text in ("claim 4", "-1", "11", "", "9" * 5000)] == [4] + [None] * 4
