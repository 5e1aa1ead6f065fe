import json

import pytest
from builders import episode_of, trajectory_of

from agentgym.episode import EndReason, Episode
from agentgym.ratings import START, K, Ratings


def met(scores: dict[str, tuple[str, float]], end: EndReason = EndReason.TERMINATED) -> Episode:
    """An episode of agents with (policy, reward)."""
    return episode_of(
        trajectories=[
            trajectory_of([reward], agent=agent, policy=policy) for agent, (policy, reward) in scores.items()
        ],
        end=end,
    )


def duel(policy: str, reward: float, other: str, others: float) -> Episode:
    return met({"x": (policy, reward), "o": (other, others)})


def test_the_higher_reward_wins_from_either_seat() -> None:
    ratings = Ratings()
    ratings.add(duel("a", 1.0, "b", -1.0))
    ratings.add(duel("b", -1.0, "a", 1.0))
    assert ratings.matrix() == {"a": {"b": 1.0}, "b": {"a": 0.0}}
    assert ratings.games("a", "b") == 2


def test_equal_rewards_are_half_a_win_each() -> None:
    ratings = Ratings()
    ratings.add(duel("a", 0.0, "b", 0.0))
    assert (ratings.win_rate("a", "b"), ratings.win_rate("b", "a")) == (0.5, 0.5)
    assert ratings.elo == {"a": START, "b": START}


def test_a_win_among_equals_moves_half_of_k_from_one_to_the_other() -> None:
    ratings = Ratings()
    ratings.add(duel("a", 1.0, "b", 0.0))
    assert ratings.elo == {"a": START + K / 2, "b": START - K / 2}


def test_400_points_are_ten_to_one() -> None:
    ratings = Ratings()
    ratings.restore({"elo": {"a": 1400.0, "b": 1000.0}, "pairs": []})
    assert ratings.expected("a", "b") == pytest.approx(10 / 11)
    ratings.add(duel("a", 0.0, "b", 1.0))
    assert ratings.elo["a"] == pytest.approx(1400.0 - K * 10 / 11)


def test_ratings_find_the_true_difference() -> None:
    ratings = Ratings()
    for game in range(4000):
        ratings.add(duel("a", float(game % 4 != 0), "b", float(game % 4 == 0)))
    # Three wins in four games are 190.8 points: 400 * log10(3).
    assert ratings.elo["a"] - ratings.elo["b"] == pytest.approx(190.8, abs=25.0)


def test_agents_of_the_same_policy_do_not_meet() -> None:
    ratings = Ratings()
    ratings.add(met({"x": ("a", 1.0), "y": ("a", 0.0), "z": ("b", 0.5)}))
    assert ratings.games("a", "b") == 2
    assert ratings.games("a", "a") == 0
    assert ratings.win_rate("a", "b") == 0.5


def test_a_failed_episode_counts_for_nothing() -> None:
    ratings = Ratings()
    ratings.add(met({"x": ("a", 1.0), "o": ("b", 0.0)}, end=EndReason.POLICY_FAILED))
    assert ratings.matrix() == {}
    assert ratings.win_rate("a", "b") is None


def test_a_decay_lets_win_rates_follow_a_policy_that_learns() -> None:
    for decay, expected in ((1.0, 0.5), (0.9, 1.0)):
        ratings = Ratings(decay=decay)
        for game in range(200):
            ratings.add(duel("a", float(game >= 100), "b", float(game < 100)))
        assert ratings.win_rate("a", "b") == pytest.approx(expected, abs=1e-3)


def test_a_snapshot_enters_with_the_rating_of_what_it_was_taken_of() -> None:
    ratings = Ratings()
    ratings.add(duel("a", 1.0, "b", 0.0))
    ratings.enter("a@3", like="a")
    ratings.enter("b", like="a")
    assert ratings.elo == {"a": START + K / 2, "b": START - K / 2, "a@3": START + K / 2}


def test_tags_are_of_the_policies_that_met_lately() -> None:
    ratings = Ratings()
    old, new = duel("a", 1.0, "b", 0.0), duel("a", 1.0, "c", 0.0)
    ratings.add(old)
    ratings.add(new)
    assert ratings.tags([new]) == {
        "rating/elo/a": ratings.elo["a"],
        "rating/elo/c": ratings.elo["c"],
        "rating/win_rate/a/c": 1.0,
        "rating/win_rate/c/a": 0.0,
    }


def test_a_checkpoint_brings_everything_back() -> None:
    ratings, again = Ratings(decay=0.9), Ratings(decay=0.9)
    for reward in (1.0, 0.0, 0.5):
        ratings.add(duel("a", reward, "b", 0.5))
    again.restore(json.loads(json.dumps(ratings.state())))
    assert (again.elo, again.matrix(), again.state()) == (ratings.elo, ratings.matrix(), ratings.state())
