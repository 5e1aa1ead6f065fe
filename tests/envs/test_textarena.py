"""textarena: games as AEC environments, their turns, rewards and seeds."""

import functools
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from farama import api_test, seed_test
from plays import Says, play_aec

from agentgym.errors import ConfigError
from agentgym.registry import list_envs, make, spec
from agentgym_envs.textarena.env import TextArena
from agentgym_envs.textarena.games import PLAYERS
from agentgym_envs.textarena.policies import FromMenu

KUHN = "textarena:KuhnPoker-v0"
FAMILIES = sorted({name.split("-v0")[0]: name for name in reversed(list(PLAYERS))}.values())
"""One id of each game."""


def play(env, seed=0, **others):
    return play_aec(env, {agent: others.get(agent, FromMenu(seed=1)) for agent in env.possible_agents}, seed)


def texts(env, seed):
    return {agent: [m["content"] for m in seat.messages] for agent, seat in play(env, seed).items()}


def test_the_games_that_run_offline_are_listed():
    assert [found.id for found in list_envs("textarena")] == sorted(f"textarena:{name}" for name in PLAYERS)
    assert {spec(f"textarena:{name}").kind for name in FAMILIES} == {"aec"}
    with pytest.raises(ConfigError, match="the nearest are textarena:KuhnPoker-v0"):
        spec("textarena:KuhnPoker")


@pytest.mark.parametrize("name", FAMILIES[::3])
def test_a_game_begins_and_goes_on_with_whatever_is_said(name):
    env = TextArena(name)
    env.reset(seed=0)
    for agent in env.agent_iter(max_iter=12):
        observation, _, terminated, _, _ = env.last()
        assert terminated or observation["messages"], f"{agent} is asked and has heard nothing"
        env.step(None if terminated else "[1]")


def test_both_players_last_answers_carry_the_outcome():
    for seed in range(6):
        seats = play(make(KUHN), seed)
        (first, second) = (seats[agent] for agent in ("player_0", "player_1"))
        assert first.reward + second.reward == 0.0
        assert abs(first.reward) == 1.0
        assert first.rewards[:-1] == [0.0] * (len(first.rewards) - 1)
        assert (first.rewards[-1], first.parts) == (first.reward, {"outcome": first.reward})
        assert (first.success, second.success) == ((first.reward + 1) / 2, (second.reward + 1) / 2)


def test_observing_does_not_consume():
    env = make(KUHN)
    env.reset(seed=0)
    mover = env.agent_selection
    other = next(agent for agent in env.agents if agent != mover)
    first = env.observe(mover)
    assert "Kuhn Poker" in first["messages"][0]["content"]
    assert env.observe(mover) == first
    assert env.observe(other) == {"messages": []}, "who only waits hears it when its turn comes"
    env.step("[check]")
    assert env.observe(mover) == {"messages": []}
    assert "Kuhn Poker" in env.observe(other)["messages"][0]["content"]


def test_an_agent_hears_the_others_and_not_itself():
    env = make(KUHN)
    env.reset(seed=0)
    env.step("I wait. [check]")
    heard = env.observe(env.agent_selection)["messages"][0]["content"]
    assert "[Player" in heard
    assert "I wait." in heard
    env.step("Me not. [bet]")
    heard = env.observe(env.agent_selection)["messages"][0]["content"]
    assert "I wait." not in heard
    assert "Me not." in heard


def test_brackets_that_are_missing_are_added_where_textarena_adds_them():
    env = make(KUHN)
    env.reset(seed=0)
    env.step("check")
    assert "submitted move: '[check]'" in env.observe(env.agent_selection)["messages"][0]["content"]


def test_the_second_illegal_move_loses():
    env = make(KUHN)
    env.reset(seed=0)
    mover = env.agent_selection
    env.step("nonsense")
    assert env.agent_selection == mover, "it is told, and may try again"
    assert "invalid move" in env.observe(mover)["messages"][0]["content"]
    env.step("nonsense")
    assert all(env.terminations.values())
    assert (env.rewards[mover], sum(env.rewards.values())) == (-1.0, 0.0)
    assert {agent: info["metrics"]["illegal"] for agent, info in env.infos.items()} == {
        agent: float(agent == mover) for agent in env.agents
    }


def test_a_legal_move_after_an_illegal_one_goes_on():
    env = make(KUHN)
    env.reset(seed=0)
    mover = env.agent_selection
    env.step("nonsense")
    env.step("[check]")
    assert env.agent_selection != mover
    assert not any(env.terminations.values())


def test_a_game_that_ends_without_a_number_ends_with_zero():
    """Countdown hands the reason of an illegal move over as its reward."""
    seats = play(make("textarena:Countdown-v0"), player_0=Says("nonsense"))
    assert (seats["player_0"].reward, seats["player_0"].success) == (0.0, 0.0)


@pytest.mark.parametrize(
    "name", ["KuhnPoker-v0-long", "PigDice-v0", "Blackjack-v0", "LiarsDice-v0", "Snake-v0"]
)
def test_the_same_seed_gives_the_same_game_whatever_was_played_before(name):
    env = TextArena(name)
    wanted = texts(env, 5)
    texts(env, 6)
    random.seed(0)
    assert texts(env, 5) == wanted
    assert texts(TextArena(name), 5) == wanted
    assert any(texts(env, seed) != wanted for seed in range(6, 12))


def test_games_that_are_played_by_turns_do_not_disturb_each_other_nor_anybody_else():
    wanted = texts(TextArena("PigDice-v0"), 5)
    one, other = TextArena("PigDice-v0"), TextArena("PigDice-v0")
    random.seed(7)
    one.reset(seed=5)
    other.reset(seed=6)
    policies = {agent: FromMenu(seed=1) for agent in one.agents}
    heard = {agent: [] for agent in one.agents}
    for agent, policy in policies.items():
        policy.reset(agent, 5)
    for agent in one.agent_iter():
        observation, _, terminated, _, _ = one.last()
        if terminated:
            one.step(None)
            continue
        heard[agent] += observation["messages"]
        answer = policies[agent].act(heard[agent], [], {})
        heard[agent].append(answer)
        one.step(answer["content"])
        if not any(other.terminations.values()):
            other.step("[roll]")
    assert {agent: [m["content"] for m in said] for agent, said in heard.items()} == wanted
    assert random.random() == random.Random(7).random()


def test_the_same_seed_gives_the_same_game_in_every_process():
    """Whatever the others draw from `random` and however Python hashes texts."""
    names = ["KuhnPoker-v0", "PigDice-v0", "Taboo-v0", "SecretMafia-v0", "Sokoban-v0", "Nim-v0"]
    code = (
        "import json, sys; sys.path.insert(0, 'tests')\n"
        "from envs.test_textarena import TextArena, texts\n"
        f"print(json.dumps([texts(TextArena(name), 3) for name in {names}]))"
    )

    def child(hash_seed):
        variables = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=variables
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(child, ["1", "2"])
    assert first == second


def test_more_may_play_where_the_game_allows_it():
    env = make("textarena:Snake-v0", num_players=3)
    assert env.possible_agents == ["player_0", "player_1", "player_2"]
    assert {agent for agent, seat in play(env).items() if seat.answers} == set(env.possible_agents)


def test_the_player_from_the_menu_makes_legal_moves():
    env = make(KUHN)
    for seed in range(20):
        assert all(seat.metrics["illegal"] == 0.0 for seat in play(env, seed).values())


@pytest.mark.filterwarnings("ignore:Observation is not a NumPy array:UserWarning")
@pytest.mark.filterwarnings("ignore:Observation space for each agent probably should be:UserWarning")
@pytest.mark.filterwarnings("ignore:Action space for each agent probably should be:UserWarning")
@pytest.mark.parametrize("name", ["KuhnPoker-v0", "PigDice-v0", "GuessTheNumber-v0", "ThreePlayerIPD-v0"])
def test_pettingzoo_accepts_it(name):
    api_test(TextArena(name), num_cycles=60)
    seed_test(functools.partial(TextArena, name), num_cycles=20)
