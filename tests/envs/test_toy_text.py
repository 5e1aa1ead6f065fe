"""Gymnasium's toy-text environments in words."""

import gymnasium
import numpy as np
import pytest
from plays import Says, play_single

from agentgym.policy.scripted import load_scripted
from agentgym.registry import make, spec
from agentgym_envs.sources.toy_text import blackjack, cliff_walking, frozen_lake, taxi


def mean(env_id, name, plays=50, of="success", **kwargs):
    env, policy = make(env_id, **kwargs), load_scripted(name, 0, env_spec=spec(env_id))
    return np.mean([getattr(play_single(env, policy, seed, 200), of) or 0.0 for seed in range(plays)])


def test_the_lake_shows_the_agent_where_it_is():
    env = make("gymnasium:FrozenLake-v1", is_slippery=False)
    assert env.reset(seed=0)[0] == "A...\n.H.H\n...H\nH..G"
    assert env.step("down")[0] == "....\nAH.H\n...H\nH..G"
    assert env.step("Right.")[:3] == ("....\n.A.H\n...H\nH..G", 0.0, True)


def test_the_prompt_says_whether_the_ice_is_slippery():
    assert make("gymnasium:FrozenLake-v1", is_slippery=False).system_prompt == frozen_lake.PROMPT
    assert make("gymnasium:FrozenLake-v1").system_prompt == frozen_lake.SLIPPERY
    assert make("gymnasium:CliffWalkingSlippery-v1").system_prompt == cliff_walking.SLIPPERY


@pytest.mark.parametrize("env_id", ["gymnasium:FrozenLake-v1", "gymnasium:FrozenLake8x8-v1"])
def test_the_shortest_way_crosses_the_lake(env_id):
    assert mean(env_id, "expert", 5, is_slippery=False) == 1.0
    noisy = mean(env_id, "noisy", is_slippery=False)
    assert mean(env_id, "random", is_slippery=False) < noisy < 1.0


def test_the_shortest_way_along_the_cliff_takes_thirteen_steps():
    seat = play_single(
        make("gymnasium:CliffWalking-v1"),
        load_scripted("expert", 0, env_spec=spec("gymnasium:CliffWalking-v1")),
        0,
    )
    assert seat.rewards == [-1.0] * 13
    assert seat.success == 1.0
    fallen = make("gymnasium:CliffWalking-v1")
    fallen.reset(seed=0)
    view, reward, terminated, _, _ = fallen.step("right")
    assert (reward, terminated) == (-100.0, False)
    assert view.endswith("ACCCCCCCCCCG")


def test_the_taxi_knows_every_wall_of_gymnasiums_city():
    city = gymnasium.make("Taxi-v4").unwrapped
    for row in range(5):
        for column in range(5):
            state = city.encode(row, column, 0, 1)
            moves = [
                word for action, word in enumerate(taxi.CHOICES[:4]) if city.P[state][action][0][1] != state
            ]
            assert sorted(taxi.open_ways((row, column))) == sorted(moves), (row, column)
    assert [tuple(stand) for stand in city.locs] == list(taxi.STANDS)


def test_the_taxi_reads_where_everything_is():
    env = make("gymnasium:Taxi-v4")
    env.reset(seed=0)
    base = env.env.unwrapped
    base.s = base.encode(0, 1, 4, 3)
    assert env.step("pickup")[0] == "taxi 0,1 passenger in taxi destination 4,3 open south west"
    base.s = base.encode(4, 3, 4, 3)
    _, reward, terminated, _, info = env.step("dropoff")
    assert (reward, terminated, info["success"]) == (20.0, True, 1.0)


def test_the_driver_takes_no_detour():
    assert mean("gymnasium:Taxi-v4", "expert") == 1.0
    assert mean("gymnasium:Taxi-v4", "expert", 200, of="reward") == pytest.approx(8.0, abs=0.6)
    assert mean("gymnasium:Taxi-v4", "noisy", 20) == 1.0
    assert mean("gymnasium:Taxi-v4", "random", 20) < 0.3


def test_a_taxi_that_never_arrives_has_no_success():
    seat = play_single(make("gymnasium:Taxi-v4"), Says("south"), 0, 200)
    assert len(seat.rewards) == 200
    assert seat.success == 0.0


def test_blackjack_shows_all_cards_of_the_player():
    env = make("gymnasium:Blackjack-v1")
    env.reset(seed=0)
    env.env.unwrapped.player = [1, 5]
    assert blackjack.describe(env.env, (16, 1, 1)) == "You: A 5 = 16 soft. Dealer: A"
    assert blackjack.describe(env.env, (16, 10, 0)) == "You: A 5 = 16. Dealer: 10"


def test_basic_strategy_beats_chance_at_blackjack():
    scores = {name: mean("gymnasium:Blackjack-v1", name, 400, of="reward") for name in ("random", "expert")}
    assert scores["random"] < -0.25
    assert -0.2 < scores["expert"] < 0.1
