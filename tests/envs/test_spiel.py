"""OpenSpiel's poker games in words: nothing hidden is said, nothing known is lost."""

import itertools
from collections import defaultdict

import numpy as np
import pyspiel
import pytest
from plays import Says, play_aec

from agentgym.policy.scripted import RandomLegal
from agentgym.registry import make
from agentgym_envs.sources.spiel.game import SpielGame
from agentgym_envs.sources.spiel.policies import KuhnEquilibrium, equilibrium_bet
from agentgym_envs.sources.spiel.views import describe_kuhn, describe_leduc

FIRST, SECOND = "player_0", "player_1"
DESCRIBE = {"kuhn_poker": describe_kuhn, "leduc_poker": describe_leduc}


def states(game, state=None):
    """Every state of a game in which a player must answer."""
    state = game.new_initial_state() if state is None else state
    if state.is_terminal():
        return
    if not state.is_chance_node():
        yield state
    for action in state.legal_actions():
        yield from states(game, state.child(action))


@pytest.mark.parametrize(("name", "count"), [("kuhn_poker", 12), ("leduc_poker", 288)])
def test_a_player_reads_what_it_knows_and_no_more(name, count):
    """Each information state has one text, and as many texts differ as information states, suits apart."""
    env = SpielGame(pyspiel.load_game(name))
    texts = defaultdict(set)
    for state in states(env.game):
        env.state = state
        agent = env.possible_agents[state.current_player()]
        texts[agent, env.observe(agent)].add(DESCRIBE[name](env, agent, env.observe(agent)))
    assert all(len(found) == 1 for found in texts.values())
    assert len({(agent, *found) for (agent, _), found in texts.items()}) == count


def test_a_hand_of_kuhn_poker_in_words():
    env = make("openspiel:kuhn_poker")
    env.reset(seed=3)
    env.env.state = env.env.game.new_initial_state()
    for action in (2, 0, 0):  # king, jack, pass
        env.env.state.apply_action(action)
    observation = env.env.observe(SECOND)
    assert describe_kuhn(env.env, SECOND, observation) == "J: pass"
    env.env.state.apply_action(1)
    assert describe_kuhn(env.env, FIRST, env.env.observe(FIRST)) == "K: pass bet"


def test_a_hand_of_leduc_poker_in_words():
    env = SpielGame(pyspiel.load_game("leduc_poker"))
    env.reset(seed=0)
    env.state = env.game.new_initial_state()
    for action in (0, 3, 1, 2, 1, 5):  # jack, queen, call, raise, call, public king
        env.state.apply_action(action)
    assert describe_leduc(env, FIRST, env.observe(FIRST)) == "card J pot 6 public K\nround 1: call raise call"
    assert (
        describe_leduc(env, SECOND, env.observe(SECOND)) == "card Q pot 6 public K\nround 1: call raise call"
    )


def test_cards_of_leduc_poker_rank_as_their_names_say():
    game = pyspiel.load_game("leduc_poker")
    for mine, theirs, public in itertools.permutations(range(6), 3):
        state = game.new_initial_state()
        for action in (mine, theirs, 1, 1, public, 1, 1):
            state.apply_action(action)
        strength = [3 if card // 2 == public // 2 else card // 2 for card in (mine, theirs)]
        assert np.sign(state.returns()[0]) == np.sign(strength[0] - strength[1])


def value(state, bets):
    """What the first player gets on average; `bets` says how often a hand bets."""
    if state.is_terminal():
        return state.returns()[0]
    if state.is_chance_node():
        return sum(share * value(state.child(action), bets) for action, share in state.chance_outcomes())
    share = bets(state)
    return (1 - share) * value(state.child(0), bets) + share * value(state.child(1), bets)


def best_reply(env, player, bets):
    """What the best reply of a player gets against `bets`, over all pure strategies of its six hands."""
    sign = 1 if player == 0 else -1
    hands = sorted({hand(env, s) for s in states(env.game) if s.current_player() == player})

    def reply(choice):
        table = dict(zip(hands, choice, strict=True))
        return lambda s: table[hand(env, s)] if s.current_player() == player else bets(s)

    start = env.game.new_initial_state()
    return max(
        sign * value(start, reply(choice)) for choice in itertools.product((0.0, 1.0), repeat=len(hands))
    )


def hand(env, state):
    agent = env.possible_agents[state.current_player()]
    return describe_kuhn(env, agent, state.information_state_string(state.current_player()))


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1 / 3])
def test_nothing_gains_against_the_equilibrium(alpha):
    env = SpielGame(pyspiel.load_game("kuhn_poker"))

    def bets(state):
        return equilibrium_bet(hand(env, state), alpha)

    assert value(env.game.new_initial_state(), bets) == pytest.approx(-1 / 18)
    assert sum(best_reply(env, player, bets) for player in (0, 1)) == pytest.approx(0.0, abs=1e-12)


def test_uniform_play_can_be_exploited_by_as_much_as_is_known():
    env = SpielGame(pyspiel.load_game("kuhn_poker"))
    assert sum(best_reply(env, player, lambda state: 0.5) for player in (0, 1)) == pytest.approx(11 / 12)


def test_the_equilibrium_wins_against_random_play():
    env = make("openspiel:kuhn_poker")
    gains = [
        play_aec(env, {FIRST: KuhnEquilibrium(0), SECOND: RandomLegal(1)}, seed)[FIRST].reward
        + play_aec(env, {FIRST: RandomLegal(1), SECOND: KuhnEquilibrium(0)}, seed)[SECOND].reward
        for seed in range(300)
    ]
    assert np.mean(gains) > 0.2


def test_chance_draws_from_the_seed():
    env = make("openspiel:kuhn_poker")
    hands = set()
    for seed in range(40):
        env.reset(seed=seed)
        first = env.observe(FIRST)["messages"][0]["content"]
        env.reset(seed=seed)
        assert env.observe(FIRST)["messages"][0]["content"] == first
        hands.add(first)
    assert hands == {"J", "Q", "K"}
    env.reset(seed=1)
    later = [env.reset() or env.observe(FIRST)["messages"][0]["content"] for _ in range(20)]
    assert set(later) == {"J", "Q", "K"}


def test_both_last_answers_carry_the_pot():
    seats = play_aec(make("openspiel:kuhn_poker"), {FIRST: Says("bet"), SECOND: Says("bet")}, 0)
    (first,), (second,) = (seat.rewards for seat in seats.values())
    assert {first, second} == {2.0, -2.0}
    assert {seat.success for seat in seats.values()} == {0.0, 1.0}


def test_parameters_make_another_game():
    env = make("openspiel:leduc_poker", players=3)
    assert len(env.possible_agents) == 3
    assert len(make("openspiel:leduc_poker(players=3)").possible_agents) == 3
    seats = play_aec(env, {agent: RandomLegal(n) for n, agent in enumerate(env.possible_agents)}, 0)
    assert sum(seat.reward for seat in seats.values()) == pytest.approx(0.0)
