"""The ready views of other libraries' environments: what holds for all of them."""

import itertools
import random
from importlib.metadata import metadata

import numpy as np
import pytest
from farama import api_test, parallel_api_test, parallel_seed_test, seed_test
from gymnasium.utils.env_checker import check_env
from plays import play_aec, play_parallel, play_single

from agentgym.errors import ConfigError
from agentgym.messages import SINGLE_AGENT, assistant
from agentgym.policy.scripted import RandomLegal, load_scripted
from agentgym.registry import list_envs, make, spec
from agentgym.worker.driver import DRIVERS
from agentgym_envs.sources import gymnasium as gymnasium_source
from agentgym_envs.sources import minigrid as minigrid_source
from agentgym_envs.sources import openspiel as openspiel_source
from agentgym_envs.sources import pettingzoo as pettingzoo_source

READY = [
    *(f"gymnasium:{name}" for name in gymnasium_source.SOURCE.names()),
    *(f"pettingzoo:{name}" for name in pettingzoo_source.SOURCE.names()),
    "openspiel:kuhn_poker",
    "openspiel:leduc_poker",
    "openspiel:tic_tac_toe",
    "minigrid:BabyAI-GoToRedBall-v0",
    "minigrid:MiniGrid-Empty-5x5-v0",
]
OF_KIND = {kind: [one for one in READY if spec(one).kind == kind] for kind in ("single", "aec", "parallel")}

quiet = pytest.mark.filterwarnings(
    "ignore:Observation is not a NumPy array:UserWarning",
    "ignore:Observation space for each agent probably should be:UserWarning",
    "ignore:Action space for each agent probably should be:UserWarning",
    "ignore:Action mask numpy array is all zeros:UserWarning",
)


def play(env_id, name="random", seed=0, env=None):
    """Play an episode, every seat by the scripted policy of this name."""
    found, env = spec(env_id), env or make(env_id)
    if found.kind == "single":
        return {SINGLE_AGENT: play_single(env, load_scripted(name, 1, env_spec=found), seed, found.max_turns)}
    policies = {
        agent: load_scripted(name, number, env_spec=found) for number, agent in enumerate(env.possible_agents)
    }
    return (play_aec if found.kind == "aec" else play_parallel)(env, policies, seed)


@pytest.mark.parametrize("env_id", OF_KIND["single"])
def test_gymnasium_accepts_every_view(env_id):
    check_env(make(env_id), skip_render_check=True)


@quiet
@pytest.mark.parametrize("env_id", OF_KIND["aec"])
def test_pettingzoo_accepts_every_view_by_turns(env_id):
    api_test(make(env_id), num_cycles=50)
    seed_test(lambda: make(env_id), num_cycles=20)


@pytest.mark.parametrize("env_id", OF_KIND["parallel"])
def test_pettingzoo_accepts_every_view_at_once(env_id):
    parallel_api_test(make(env_id), num_cycles=50)
    parallel_seed_test(lambda: make(env_id), num_cycles=20)


@pytest.mark.parametrize("env_id", READY)
def test_scripted_policies_are_never_illegal_and_every_finished_play_is_judged(env_id):
    for name in spec(env_id).scripted:
        for agent, seat in play(env_id, name, seed=2).items():
            assert "illegal" not in seat.metrics, agent
            assert len(seat.rewards) == spec(env_id).max_turns or 0.0 <= seat.success <= 1.0


@pytest.mark.parametrize("env_id", READY)
def test_every_text_is_printable_ascii(env_id):
    for seat in play(env_id).values():
        assert all(" " <= c <= "~" or c == "\n" for m in seat.messages for c in m["content"])


def transcripts(env_id, seeds):
    """Play one instance for each seed, all of them turn by turn, and return what each said and paid.

    Who draws from the global generators, or keeps anything outside of an instance, says something else among others.
    """
    random.seed(len(seeds))
    np.random.seed(len(seeds))
    drivers = [DRIVERS[spec(env_id).kind](make(env_id)) for _ in seeds]
    policies = [RandomLegal(seed=1) for _ in seeds]
    states = [driver.reset(seed) for driver, seed in zip(drivers, seeds, strict=True)]
    for policy, seed in zip(policies, seeds, strict=True):
        policy.reset("all", seed)
    said = [[state] for state in states]
    for _ in range(60):
        for one, state in enumerate(states):
            if not state.over:
                answers = {r.agent: policies[one].act([], [], dict(r.info)) for r in state.requests}
                states[one] = drivers[one].act(answers)
                said[one].append(states[one])
    return [repr(states) for states in said]


@pytest.mark.parametrize("env_id", READY)
def test_the_same_seed_gives_the_same_episode_also_among_others(env_id):
    (alone,) = transcripts(env_id, [5])
    among = transcripts(env_id, [5, 6, 5])
    assert spec(env_id).isolation == "shared"
    assert among[0] == among[2] == alone


@pytest.mark.parametrize("env_id", READY)
def test_every_view_takes_the_rule_for_illegal_answers(env_id):
    driver = DRIVERS[spec(env_id).kind](make(env_id, illegal="penalty", illegal_reward=-0.5))
    state = driver.reset(0)
    asked = [request.agent for request in state.requests]
    state = driver.act(dict.fromkeys(asked, assistant("no such answer")))
    assert [request.agent for request in state.requests] == asked
    assert [outcome.reward for outcome in state.outcomes] == [-0.5] * len(asked)
    assert all(r.messages[0]["content"].startswith("Illegal answer.") for r in state.requests)


@pytest.mark.parametrize("env_id", READY)
def test_environments_close_twice(env_id):
    env = make(env_id)
    env.reset(seed=0)
    env.close()
    env.close()


def test_what_a_library_has_without_a_view_says_what_to_write():
    with pytest.raises(ConfigError, match=r"agentgym\.TextAECWrapper\(env, describe, parse\)"):
        make("pettingzoo:classic/go-v5")
    with pytest.raises(ConfigError, match=r"agentgym\.TextWrapper\(env, describe, parse\)"):
        make("gymnasium:MountainCar-v0")


def test_names_that_a_library_does_not_have_are_answered_with_the_nearest():
    for env_id, nearest in {
        "pettingzoo:classic/connectfour-v3": "pettingzoo:classic/connect_four-v3",
        "openspiel:kuhn_pocker": "openspiel:kuhn_poker",
        "minigrid:BabyAI-GoToRedBal-v0": "minigrid:BabyAI-GoToRedBall-v0",
    }.items():
        with pytest.raises(ConfigError, match=f"nearest are {nearest}"):
            spec(env_id)


def test_a_game_that_is_not_by_turns_is_refused():
    with pytest.raises(ConfigError, match="goofspiel is not played by turns"):
        spec("openspiel:goofspiel")


def test_each_source_lists_what_it_can_make():
    counts = {
        source: len(list_envs(source)) for source in ("gymnasium:", "pettingzoo:", "openspiel:", "minigrid:")
    }
    assert counts["gymnasium:"] == 6
    assert counts["pettingzoo:"] == 3
    assert counts["openspiel:"] > 80
    assert counts["minigrid:"] > 150


def test_each_source_names_an_extra_that_there_is():
    extras = metadata("agentgym-rl").get_all("Provides-Extra")
    sources = (gymnasium_source, pettingzoo_source, openspiel_source, minigrid_source)
    assert all(one.SOURCE.extra in ("", *extras) for one in sources)
    assert [one.SOURCE.extra for one in sources] == ["", "", "openspiel", "minigrid"]


@pytest.mark.parametrize(
    "name", ["nim", "pig", "hex(board_size=3)", "liars_dice", "hanabi", "breakthrough", "blackjack"]
)
def test_other_openspiel_games_are_played_by_their_own_texts(name):
    env_id = f"openspiel:{name}"
    seats = play(env_id)
    assert seats == play(env_id)
    for player, seat in enumerate(seats.values()):
        assert seat.messages[0]["content"].endswith(
            f"You are player {player}. Answer with one of the legal moves."
        )
        for view, answer in itertools.pairwise(m["content"] for m in seat.messages[1:]):
            if "\nLegal: " in view:
                assert answer in view.split("\nLegal: ")[1]
