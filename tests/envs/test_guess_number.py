"""agentgym/GuessNumber-v0."""

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from plays import Says, play_single

from agentgym.errors import ConfigError, EnvError
from agentgym.policy.scripted import load_scripted
from agentgym.registry import make, spec
from agentgym_envs import register_envs
from agentgym_envs.guess_number.env import GuessNumber
from agentgym_envs.guess_number.policies import Bisection, NoisyGuess, RandomGuess
from agentgym_envs.guess_number.rules import parse_guess, possible

register_envs()
ENV_ID = "agentgym/GuessNumber-v0"


def success_rate(policy, episodes: int) -> float:
    env = GuessNumber()
    return sum(play_single(env, policy, seed).success for seed in range(episodes)) / episodes


def target_of(env: GuessNumber) -> int:
    """Find the hidden number of the current seed by asking."""
    for number in range(env.low, env.high + 1):
        env.reset(seed=7)
        if env.step(str(number))[2]:
            return number
    raise AssertionError("no number was right")


def test_gymnasium_accepts_it():
    check_env(gymnasium.make(ENV_ID).unwrapped)


def test_gymnasium_makes_it_with_its_own_wrappers():
    env = gymnasium.make(ENV_ID, high=8)
    assert play_single(env, Bisection(seed=0), 0).success == 1.0


def test_the_expert_finds_all_twenty_numbers():
    env, seen = GuessNumber(), set()
    for seed in range(300):
        seat = play_single(env, Bisection(seed=0), seed)
        assert seat.success == 1.0
        assert seat.reward == 1.0
        assert seat.parts == {"success": 1.0}
        seen.add(int(seat.answers[-1]))
    assert seen == set(range(1, 21))


def test_the_expert_finds_every_number_of_other_ranges():
    for low, high, turns in ((-5, 9, 4), (0, 30, 5), (3, 3, 1)):
        env = GuessNumber(low=low, high=high, turns=turns)
        assert all(play_single(env, Bisection(seed=0), seed).success == 1.0 for seed in range(50))


def test_the_noisy_teacher_is_better_than_chance_and_worse_than_the_expert():
    assert 0.38 < success_rate(NoisyGuess(seed=1), 1000) < 0.52
    assert 0.2 < success_rate(RandomGuess(seed=1), 1000) < 0.3


def test_a_noisy_teacher_without_noise_only_guesses_what_is_possible():
    for seed in range(100):
        seat = play_single(GuessNumber(consistency_reward=0.1), NoisyGuess(seed=0, p=0.0), seed)
        assert seat.parts["consistent"] == pytest.approx(0.1 * len(seat.answers))


def test_scripted_players_repeat_themselves_for_a_seed_and_differ_between_seeds():
    env = GuessNumber()
    plays = [play_single(env, NoisyGuess(seed=s), 5).answers for s in (1, 1, 2, 3)]
    assert plays[0] == plays[1]
    assert len({tuple(play) for play in plays}) > 1


def test_the_feedback_says_where_the_number_is():
    env = GuessNumber()
    target = target_of(env)
    env.reset(seed=7)
    if target > 1:
        assert env.step("1")[0] == "higher"
    if target < 20:
        assert env.step(f"I say {20}!")[0] == "lower"
    observation, reward, terminated, truncated, info = env.step(str(target))
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info == {"rewards": {"success": 1.0}, "metrics": {}, "success": 1.0}
    assert isinstance(observation, str)


def test_an_unreadable_answer_uses_up_the_turn():
    seat = play_single(GuessNumber(turns=3), Says("what?"), seed=0)
    assert [m["content"] for m in seat.messages if m["role"] == "user"] == ["?", "number?", "number?"]
    assert seat.success == 0.0
    assert seat.reward == 0.0
    assert seat.metrics == {"unreadable": 3.0}


def test_the_last_wrong_guess_ends_the_episode_with_success_zero():
    env = GuessNumber()
    wrong = "1" if target_of(env) != 1 else "2"
    env.reset(seed=7)
    ends = [env.step(wrong)[2] for _ in range(5)]
    assert ends == [False, False, False, False, True]


def test_a_guess_that_contradicts_the_feedback_earns_nothing_for_consistency():
    env = GuessNumber(consistency_reward=0.5)
    target = target_of(env)
    first, second = ("20", "20") if target < 20 else ("1", "1")
    env.reset(seed=7)
    assert env.step(first)[4]["rewards"] == {"consistent": 0.5}
    assert env.step(second)[4]["rewards"] == {}


def test_prompts_follow_the_range():
    assert GuessNumber(low=3, high=9).system_prompt == "Guess 3-9."


def test_settings_that_make_no_game_are_refused():
    with pytest.raises(ConfigError, match="low = 5, high = 4"):
        GuessNumber(low=5, high=4)
    with pytest.raises(EnvError, match="turns = 0"):
        make(ENV_ID, turns=0)


def test_every_scripted_policy_can_be_loaded_by_name():
    assert set(spec(ENV_ID).scripted) == {"random", "noisy", "expert"}
    for name in spec(ENV_ID).scripted:
        assert play_single(make(ENV_ID), load_scripted(name, 0, env_spec=spec(ENV_ID)), 0).success is not None


def test_rules_read_guesses_and_narrow_the_range():
    assert [parse_guess(text) for text in ("7", "is it 12?", "-3", "no", "9" * 5000)] == [
        7,
        12,
        -3,
        None,
        None,
    ]
    assert possible(1, 20, [(10, "higher"), (15, "lower")]) == range(11, 15)
