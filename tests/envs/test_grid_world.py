"""Minigrid and BabyAI in words."""

import numpy as np
from minigrid.core.world_object import Ball, Door, Key, Wall
from plays import play_single

from agentgym.policy.scripted import load_scripted
from agentgym.registry import make, spec

GO_TO = "minigrid:BabyAI-GoToRedBall-v0"


def empty_room():
    """A room of 14 by 14 free cells with the agent in its middle, looking right, and a function that shows the view."""
    env = make("minigrid:MiniGrid-Empty-16x16-v0")
    env.reset(seed=0)
    base = env.env.unwrapped
    base.agent_pos, base.agent_dir = (7, 7), 0

    def view():
        return env._describe(env.env, base.gen_obs())

    return env, base, view


def test_the_mission_is_said_once():
    env = make(GO_TO)
    assert env.reset(seed=1)[0].startswith("go to the red ball\nfree: ")
    assert env.step("left")[0].startswith("free: ")


def test_things_are_named_by_color_state_and_place_the_nearest_first():
    env, base, view = empty_room()
    base.put_obj(Ball("red"), 9, 7)
    base.put_obj(Key("blue"), 8, 6)
    base.put_obj(Door("grey", is_locked=True), 7, 9)
    assert view().split("\n")[1:] == [
        "free: 1",
        "blue key: 1 ahead 1 left",
        "red ball: 2 ahead",
        "locked grey door: 2 right",
    ]
    base.agent_dir = 1
    env.step("right")
    env.step("left")
    assert "locked grey door: 2 ahead" in view()


def test_walls_end_the_free_way():
    _, base, view = empty_room()
    assert "free: 6" in view()
    base.grid.set(10, 7, Wall())
    assert "free: 2" in view()


def test_what_is_carried_is_said():
    env, base, view = empty_room()
    base.put_obj(Key("blue"), 8, 7)
    assert env.step("pickup")[0].endswith("you carry: blue key")
    assert "blue key:" not in view()


def test_the_seeker_finds_what_its_mission_names():
    env, found = make(GO_TO), spec(GO_TO)
    rates = {
        name: np.mean(
            [
                play_single(env, load_scripted(name, 0, env_spec=found), seed, 128).success
                for seed in range(40)
            ]
        )
        for name in found.scripted
    }
    assert rates["random"] < 0.5 < 0.65 < rates["seeker"]
