"""Rewards in a play: weights, functions of the finished episode, and what is not lost where a play is cut."""

import threading

import pytest
from plays import Says
from stage import FakePolicy, Stage, of, rewards
from toy_envs import Relay, Scripted, raising, says
from toy_rewards import Debate, Polite, released

from agentgym.config import EnvConfig
from agentgym.episode import EndReason
from agentgym.policy.template import ChatTokenizer
from agentgym.registry import EnvSpec
from agentgym.rewards import Rewards, reward


def rewards_of(*functions: str, **weights: float) -> Rewards:
    paths = [f"toy_rewards:{name}" for name in functions]
    config = EnvConfig(id="toy", rewards=paths, reward_weights=weights)
    return Rewards.of(config, EnvSpec("toy", "toy_envs:Scripted", "single"))


def test_a_part_counts_times_its_weight_and_is_recorded_as_it_was_given(tokenizer: ChatTokenizer) -> None:
    stage = Stage(tokenizer, FakePolicy(tokenizer, "x"), rewards=rewards_of(format=0.5))
    env = Scripted(
        says("more", 0.7, rewards={"format": 0.4, "right": 0.3}),
        says("more", 2.0),
        says("bye", 1.0, over=True, rewards={"format": 1.0}),
    )
    (trajectory,) = stage.play(env).episode.trajectories
    assert rewards(trajectory) == pytest.approx([0.5, 2.0, 0.5])
    assert [turn.rewards for turn in trajectory.turns] == [
        {"format": 0.4, "right": 0.3},
        {},
        {"format": 1.0},
    ]


def test_what_functions_give_is_earned_by_the_last_answer(tokenizer: ChatTokenizer) -> None:
    policy = FakePolicy(tokenizer, "one", "two words thanks")
    stage = Stage(tokenizer, policy, rewards=rewards_of("words", "earned", words=0.1))
    play = stage.play(Polite(says("more", 1.0), says("bye", 2.0, over=True)))
    (trajectory,) = play.episode.trajectories
    assert (play.episode.end_reason, play.reusable) == (EndReason.TERMINATED, True)
    # "thanks" 1 and "heard_turns" 2 (weight 0.5) of the class; "words" 4 (weight 0.1) and "earned" 3 of the settings.
    assert rewards(trajectory) == pytest.approx([1.0, 2.0 + 1.0 + 0.5 * 2 + 0.1 * 4 + 3.0])
    assert [turn.rewards for turn in trajectory.turns] == [
        {},
        {"thanks": 1.0, "heard_turns": 2.0, "words": 4.0, "earned": 3.0},
    ]


def test_every_agent_is_scored_for_itself(tokenizer: ChatTokenizer) -> None:
    stage = Stage(tokenizer, FakePolicy(tokenizer, "a b c", "d e"), {"b": Says("hello")})
    episode = stage.play(Debate(rounds=2), "aec").episode
    assert of(episode, "a").turns[-1].rewards == {"heard": 1.0, "own_words": 5.0}
    assert of(episode, "b").turns[-1].rewards == {"own_words": 2.0}
    assert rewards(of(episode, "b")) == [1.0, 2.0]


def test_functions_run_in_the_thread_of_the_environment(tokenizer: ChatTokenizer) -> None:
    threads = set()

    class Bound(Polite):
        def reset(self, **kwargs: object) -> object:
            threads.add(threading.get_ident())
            return super().reset()

        @reward
        def thanks(self, episode: object, agent: str) -> float:
            threads.add(threading.get_ident())
            return 0.0

    stage = Stage(tokenizer, FakePolicy(tokenizer, "x"))
    stage.play(Bound())
    assert len(threads) == 1
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "toy: scoring: reward 'broken' raised KeyError: 'agent'"),
        ("nothing", "toy: scoring: reward 'nothing' returned None; expected a finite number"),
    ],
)
def test_a_function_that_fails_fails_the_episode(tokenizer: ChatTokenizer, name: str, message: str) -> None:
    stage = Stage(tokenizer, FakePolicy(tokenizer, "x"), rewards=rewards_of(name))
    play = stage.play(Scripted(says("bye", over=True)))
    assert (play.episode.end_reason, play.episode.error) == (EndReason.ENV_FAILED, message)
    assert not play.reusable


def test_a_function_that_never_returns_fails_the_episode_after_its_time(tokenizer: ChatTokenizer) -> None:
    released.clear()
    stage = Stage(tokenizer, FakePolicy(tokenizer, "x"), rewards=rewards_of("never"))
    play = stage.play(Scripted(says("bye", over=True)), reward_timeout=0.05)
    released.set()
    assert play.episode.end_reason is EndReason.ENV_FAILED
    assert play.episode.error.startswith("toy: scoring did not return within 0.05 s")


def test_failed_episodes_are_not_scored(tokenizer: ChatTokenizer) -> None:
    stage = Stage(tokenizer, FakePolicy(tokenizer, "x"), rewards=rewards_of("broken"))
    episode = stage.play(Scripted(raising(KeyError("map")))).episode
    assert episode.error.startswith("toy: step raised KeyError: 'map'")


def test_an_episode_cut_by_a_limit_is_scored(tokenizer: ChatTokenizer) -> None:
    stage = Stage(tokenizer, FakePolicy(tokenizer, "x"), max_turns=2, rewards=rewards_of("words"))
    episode = stage.play(Scripted(says("more", 1.0))).episode
    assert (episode.end_reason, rewards(episode.trajectories[0])) == (EndReason.MAX_TURNS, [1.0, 3.0])


def test_an_environment_that_is_stuck_cannot_score_its_episode(tokenizer: ChatTokenizer) -> None:
    let_go = threading.Event()
    env = Polite(lambda: let_go.wait(20) and says())
    stage = Stage(tokenizer, FakePolicy(tokenizer, "x"))
    play = stage.play(env, episode_timeout=2.0)
    let_go.set()
    assert (play.episode.end_reason, play.reusable) == (EndReason.ENV_FAILED, False)
    assert play.episode.error == (
        "toy: the episode cannot be scored: the environment never returned from its last call"
    )


def test_where_a_play_is_cut_nobody_loses_what_it_earned_with_its_last_answer(
    tokenizer: ChatTokenizer,
) -> None:
    stage = Stage(tokenizer, FakePolicy(tokenizer, "x"), max_turns=2)
    episode = stage.play(Relay(rounds=9, pays="self"), "aec").episode
    assert episode.end_reason is EndReason.MAX_TURNS
    # The turns of a are used up when it is its turn again; b was not told yet what its second answer earned.
    assert rewards(of(episode, "a")) == [1.0, 1.0]
    assert rewards(of(episode, "b")) == [1.0, 1.0]
    assert of(episode, "b").turns[1].rewards == {"heard": 1.0}
