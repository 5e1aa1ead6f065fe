"""agentgym.rewards: weights, functions of an episode and of a group, and what is said when one is wrong."""

import math
from typing import Any

import pytest
from builders import episode_of, trajectory_of
from toy_rewards import Polite

from agentgym.config import EnvConfig
from agentgym.env import Env
from agentgym.errors import ConfigError, EnvError
from agentgym.registry import EnvSpec, register, spec
from agentgym.rewards import Rewards, Score, load_functions, reward_methods, score, score_group

SPEC = EnvSpec("toy", "toy_envs:Counted", "single", reward_weights={"format": 0.5, "speed": 2.0})


def test_a_weight_multiplies_its_part_and_leaves_the_rest_alone() -> None:
    rewards = Rewards({"format": 0.5, "cost": 0.0})
    assert rewards.weigh(1.0, {"format": 0.4, "right": 0.6}) == pytest.approx(0.8)
    assert rewards.weigh(1.0, {"cost": 1.0}) == 0.0
    assert rewards.weigh(1.0, {}) == 1.0
    assert Rewards().weigh(1.0, {"format": 0.4, "right": 0.6}) == 1.0


def test_an_environment_may_be_registered_with_weights() -> None:
    register("tests/Polite-v0", Polite, kind="single", reward_weights={"done": 0.5})
    assert spec("tests/Polite-v0").reward_weights == {"done": 0.5}
    assert spec("toy_rewards:Debate").reward_weights == {"heard": 0.0}


def test_weights_of_the_configuration_win_over_those_of_the_environment() -> None:
    config = EnvConfig(id="toy", reward_weights={"format": 0.1}, rewards=["toy_rewards:words"])
    rewards = Rewards.of(config, SPEC)
    assert rewards.weights == {"format": 0.1, "speed": 2.0}
    assert list(rewards.functions) == ["words"]


def test_a_score_is_a_part_of_the_agents_last_turn() -> None:
    episode = episode_of({"a": [1.0, 2.0], "b": [3.0]})
    rewards = Rewards({"style": 0.5})
    credited = rewards.credit(episode, [Score("a", "style", 4.0, 9.0), Score("b", "brevity", 1.0, 0.1)])
    a, b = credited.trajectories
    assert [turn.reward for turn in a.turns] == [1.0, 4.0]
    assert a.turns[1].rewards == {"all": 2.0, "style": 4.0}
    assert b.turns[0].reward == pytest.approx(3.1)
    assert b.turns[0].rewards == {"all": 3.0, "brevity": 1.0}
    # The tokens are what they were, and so are their checksums.
    assert credited.checksums == tuple(t.checksum() for t in credited.trajectories)
    assert [turn.reward for turn in episode.trajectories[0].turns] == [1.0, 2.0]


def test_the_last_turn_of_a_conversation_with_branches_is_in_its_last_branch() -> None:
    branches = [trajectory_of([1.0]), trajectory_of([2.0], branch=1), trajectory_of([5.0], agent="b")]
    credited = Rewards().credit(episode_of(trajectories=branches), [Score("agent", "style", 4.0)])
    assert [t.reward for t in credited.trajectories] == [1.0, 6.0, 5.0]


def test_methods_of_an_environment_are_found_with_their_weights_through_wrappers() -> None:
    class Wrapper:
        unwrapped = Polite()

    for env in (Polite(), Wrapper()):
        assert {name: weight for name, (_, weight) in reward_methods(env).items()} == {
            "thanks": 1.0,
            "heard_turns": 0.5,
        }
    assert reward_methods(Env()) == {}
    assert reward_methods(object()) == {}


def test_every_function_is_asked_about_every_agent_that_answered() -> None:
    functions = {name: (f, 1.0) for name, f in load_functions(["toy_rewards:earned"]).items()}
    scores = score(functions, episode_of({"a": [1.0, 2.0], "b": [3.0]}))
    assert scores == [Score("a", "earned", 3.0), Score("b", "earned", 3.0)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "reward 'broken' raised KeyError: 'agent'"),
        ("nothing", "reward 'nothing' returned None; expected a finite number"),
    ],
)
def test_a_function_that_fails_is_named(name: str, message: str) -> None:
    functions = {name: (load_functions([f"toy_rewards:{name}"])[name], 1.0)}
    with pytest.raises(EnvError, match=message):
        score(functions, episode_of())


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", [1.0], 10**400])
def test_a_reward_is_a_finite_number(value: Any) -> None:
    with pytest.raises(EnvError, match="expected a finite number"):
        score({"odd": (lambda episode, agent: value, 1.0)}, episode_of())


def test_a_group_is_scored_episode_by_episode() -> None:
    functions = load_functions(["toy_rewards:best"])
    group = [episode_of([0.0]), episode_of([1.0])]
    assert score_group(functions, group) == [[Score("agent", "best", 0.0)], [Score("agent", "best", 1.0)]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "group reward 'odd' returned None; expected a list of 2 dictionaries"),
        ([{}], r"group reward 'odd' returned \[{}\]; expected a list of 2 dictionaries"),
        ([{}, 1.0], "group reward 'odd' gives 1.0 to an episode of the agents"),
        ([{}, {"b": 1.0}], r"group reward 'odd' gives {'b': 1.0} to an episode of the agents \['agent'\]"),
        ([{}, {"agent": None}], "reward 'odd' returned None; expected a finite number"),
    ],
)
def test_a_group_reward_of_another_form_is_refused(given: Any, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        score_group({"odd": lambda episodes: given}, [episode_of(), episode_of()])


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["toy_rewards:wrods"], "did you mean words"),
        (["nowhere:words"], "there is no module 'nowhere'"),
        (["words"], "is not of the form 'module:attribute'"),
        (["toy_rewards:released"], "expected a plain function"),
        (["toy_rewards:later"], "expected a plain function"),
        (["toy_rewards:words", "toy_rewards:words"], "two reward functions are called 'words'"),
    ],
)
def test_wrong_names_of_functions_are_refused_before_anything_runs(paths: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_functions(paths)
