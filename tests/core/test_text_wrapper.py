"""agentgym.TextWrapper, on a counter that speaks in numbers."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from plays import Says, play_single

from agentgym.errors import ConfigError
from agentgym.policy.scripted import RandomLegal
from agentgym.wrappers.single import TextWrapper

MOVES = ("up", "down")


class Counter(gymnasium.Env):
    """Counts up (action 1) or down (0, not below zero); ends at its goal, which it draws."""

    observation_space = gymnasium.spaces.Discrete(100)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal = int(self.np_random.integers(2, 5))
        self.count = 0
        return self.count, {"numbers": "of the wrapped environment"}

    def step(self, action):
        assert action or self.count > 0
        self.count += 1 if action else -1
        return self.count, 1.0 if self.count == self.goal else -0.1, self.count == self.goal, False, {}


def describe(env, observation):
    return f"{observation} of {env.unwrapped.goal}"


def parse(env, text):
    if text not in MOVES or (text == "down" and env.unwrapped.count == 0):
        return None
    return 1 - MOVES.index(text)


def counter(limit=50, **kwargs):
    env = gymnasium.wrappers.TimeLimit(Counter(), limit)
    return TextWrapper(env, describe, parse, **{"choices": MOVES, "prompt": "Count.", **kwargs})


def play(*texts, seed=0, **kwargs):
    return play_single(counter(**kwargs), Says(*texts), seed, max_turns=10)


def heard(seat):
    return [m["content"] for m in seat.messages if m["role"] == "user"]


@pytest.mark.filterwarnings("ignore:.*observation space is not:UserWarning")
@pytest.mark.parametrize("illegal", ["retry", "penalty", "forfeit"])
def test_gymnasium_accepts_the_view(illegal):
    check_env(counter(illegal=illegal), skip_render_check=True)


def test_an_agent_reads_the_state_and_plays_words():
    seat = play("up", success=lambda env, outcome: float(env.unwrapped.count == env.unwrapped.goal))
    assert seat.messages[0] == {"role": "system", "content": "Count."}
    goal = int(heard(seat)[0].split()[-1])
    assert heard(seat) == [f"{count} of {goal}" for count in range(goal)]
    assert seat.rewards == pytest.approx([-0.1] * (goal - 1) + [1.0])
    assert seat.parts == pytest.approx({"outcome": sum(seat.rewards)})
    assert seat.success == 1.0
    assert seat.metrics == {}


def test_the_time_limit_of_the_wrapped_environment_truncates():
    env = counter(limit=1)
    env.reset(seed=0)
    *_, terminated, truncated, info = env.step("up")
    assert (terminated, truncated) == (False, True)
    assert "legal" not in info


def test_infos_list_the_legal_answers_and_nothing_of_the_wrapped_environment():
    env = counter()
    assert env.reset(seed=0)[1] == {"legal": ["up"]}
    assert env.step("up")[4]["legal"] == ["up", "down"]
    assert "legal" not in counter(choices=()).reset(seed=0)[1]


def test_retry_tells_the_legal_answers_and_forfeits_after_the_last_retry():
    seat = play("left", "down", "up", "up", "no", "no", "no", success=lambda env, outcome: 1.0)
    view = heard(seat)
    assert view[1:3] == ["Illegal answer. Legal: up."] * 2
    assert view[3].startswith("1 of")
    assert seat.rewards[:2] == [0.0, 0.0]
    if len(seat.rewards) > 4:  # the goal was further than two
        assert seat.success == 0.0


def test_retries_are_counted_within_one_turn():
    env = counter(max_retries=1, illegal_reward=-2.0)
    env.reset(seed=0)
    assert env.step("left")[1:4] == (0.0, False, False)
    env.step("up")
    assert env.step("left")[1:4] == (0.0, False, False)
    _view, reward, terminated, truncated, info = env.step("left")
    assert (reward, terminated, truncated) == (-2.0, True, False)
    assert info == {"rewards": {"illegal": -2.0}, "metrics": {"illegal": 1.0}}
    assert env.env.unwrapped.count == 1


def test_penalty_pays_for_every_illegal_answer_and_never_ends():
    env = counter(illegal="penalty", illegal_reward=-0.5)
    env.reset(seed=0)
    for _ in range(20):
        view, reward, terminated, truncated, info = env.step("left")
        assert (view, reward, terminated, truncated) == ("Illegal answer. Legal: up.", -0.5, False, False)
        assert info["rewards"] == {"illegal": -0.5}
        assert info["legal"] == ["up"]
    assert env.step("up")[1] == pytest.approx(-0.1)


def test_forfeit_ends_the_episode_without_success():
    seat = play("up", "left", illegal="forfeit", success=lambda env, outcome: 1.0)
    assert seat.rewards == pytest.approx([-0.1, -1.0])
    assert seat.parts == pytest.approx({"outcome": -0.1, "illegal": -1.0})
    assert seat.success == 0.0
    assert seat.metrics == {"illegal": 1.0}


def test_a_play_that_is_cut_is_judged_by_where_it_stood():
    env = counter(success=lambda env, outcome: float(env.unwrapped.count == env.unwrapped.goal))
    env.reset(seed=0)
    assert env.step("up")[4]["success"] == 0.0
    assert env.step("left")[4]["success"] == 0.0


def test_without_choices_the_message_names_none():
    env = counter(choices=())
    env.reset(seed=0)
    assert env.step("left")[0] == "Illegal answer. Answer again."


def test_an_episode_after_a_forfeit_begins_anew():
    env = counter(illegal="forfeit")
    env.reset(seed=0)
    env.step("left")
    env.reset(seed=0)
    assert env.step("up")[2] is False


def test_a_rule_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="illegal = 'ignore'; use one of retry, penalty, forfeit"):
        counter(illegal="ignore")
    with pytest.raises(ConfigError, match="max_retries = -1"):
        counter(max_retries=-1)


def test_interleaved_instances_do_not_disturb_each_other():
    alone = [play_single(counter(), RandomLegal(seed=1), seed) for seed in range(5)]
    envs = [counter() for _ in range(5)]
    policies = [RandomLegal(seed=1) for _ in envs]
    heard_of = [[env.reset(seed=seed)] for seed, env in enumerate(envs)]
    for seed, policy in enumerate(policies):
        policy.reset("agent", seed)
    live = set(range(5))
    while live:
        for one in sorted(live):
            answer = policies[one].act([], [], heard_of[one][-1][-1])["content"]
            heard_of[one].append(envs[one].step(answer))
            if heard_of[one][-1][2]:
                live.discard(one)
    for seat, steps in zip(alone, heard_of, strict=True):
        assert heard(seat) == [step[0] for step in steps[:-1]]
        assert seat.rewards == [step[1] for step in steps[1:]]


@pytest.mark.parametrize("vector", [gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv])
def test_text_through_the_vector_api_is_what_each_environment_says(vector):
    options = {"shared_memory": False} if vector is gymnasium.vector.AsyncVectorEnv else {}
    envs = vector([counter, counter, counter], **options)
    try:
        views, _ = envs.reset(seed=[0, 1, 2])
        assert list(views) == [counter().reset(seed=seed)[0] for seed in range(3)]
        views, rewards, *_ = envs.step(("up", "left", "up"))
        assert views[1] == "Illegal answer. Legal: up."
        assert views[0].startswith("1 of")
        assert views[2].startswith("1 of")
        assert rewards == pytest.approx(np.array([-0.1, 0.0, -0.1]))
    finally:
        envs.close()
