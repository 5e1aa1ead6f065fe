import numpy as np
import pytest
from assembling import assembled, total_weight, turn_values
from builders import ANSWER, PROMPT, episode_of, group_of, trajectory_of
from hypothesis import given
from hypothesis import strategies as st

from agentgym.algorithm_config import AlgorithmConfig
from agentgym.coordinator.assemble import teaches

WIN_AND_LOSS = group_of(episode_of([0.0, 1.0]), episode_of([0.0]))


def test_every_play_becomes_a_sample_with_its_advantage_on_the_sampled_tokens() -> None:
    found = assembled(WIN_AND_LOSS)
    assert [turn_values(sample) for sample in found.samples] == [[0.5, 0.5], [-0.5]]
    for sample, episode in zip(found.samples, WIN_AND_LOSS.episodes.values(), strict=True):
        (trajectory,) = episode.trajectories
        assert sample.tokens is trajectory.tokens
        np.testing.assert_array_equal(sample.loss_mask, trajectory.loss_mask)
        assert not sample.advantages[~sample.loss_mask].any()
        assert not sample.weights[~sample.loss_mask].any()
        assert (sample.advantages.dtype, sample.weights.dtype) == (np.float32, np.float32)
    assert found.episodes == list(WIN_AND_LOSS.episodes.values())


def test_turn_advantages_land_on_the_tokens_of_their_turns() -> None:
    # Rewards-to-go [3, 2, 0] and [1, 1]: means 2, 1.5, and 0 for the turn that one play reached alone.
    found = assembled(
        group_of(episode_of([1.0, 2.0, 0.0]), episode_of([0.0, 1.0])), advantage="turn_group_mean"
    )
    assert [turn_values(sample) for sample in found.samples] == [[1.0, 0.5, 0.0], [-1.0, -0.5]]
    first = found.samples[0].advantages
    assert np.flatnonzero(first).tolist() == [PROMPT, PROMPT + 1, 2 * PROMPT + 2, 2 * PROMPT + 3]


def test_turn_advantages_run_on_over_the_branches_of_an_agent() -> None:
    branched = episode_of(trajectories=[trajectory_of([1.0]), trajectory_of([2.0, 0.0], branch=1)])
    found = assembled(group_of(branched, episode_of([0.0, 1.0])), advantage="turn_group_mean")
    assert [turn_values(sample) for sample in found.samples] == [[1.0], [0.5, 0.0], [-1.0, -0.5]]


def test_an_agent_is_compared_with_itself_only() -> None:
    found = assembled(group_of(episode_of({"a": [1.0], "b": [10.0]}), episode_of({"a": [0.0], "b": [0.0]})))
    assert [turn_values(sample) for sample in found.samples] == [[0.5], [-0.5], [5.0], [-5.0]]


def test_agents_of_frozen_policies_are_not_trained() -> None:
    plays = [
        episode_of(
            trajectories=[trajectory_of([r], agent="a"), trajectory_of([-r], agent="b", trainable=False)]
        )
        for r in (1.0, 0.0)
    ]
    found = assembled(group_of(*plays))
    assert [turn_values(sample) for sample in found.samples] == [[0.5], [-0.5]]
    assert len(found.ages) == 2 * ANSWER


def test_tokens_that_are_too_old_are_masked_and_counted_and_the_ages_are_of_the_others() -> None:
    found = assembled(
        group_of(episode_of([0.0, 1.0], versions=[4, 5]), episode_of([0.0], versions=3)),
        version=6,
        max_staleness=1,
    )
    (sample,) = found.samples
    assert np.flatnonzero(sample.loss_mask).tolist() == [2 * PROMPT + 2, 2 * PROMPT + 3]
    assert sample.sampled.sum() == 2 * ANSWER
    assert found.ages.tolist() == [1, 1]
    assert found.metrics["stale_share"] == pytest.approx(4 / 6)
    assert total_weight(found) == pytest.approx(1.0)


def test_a_step_whose_tokens_are_all_too_old_has_no_sample() -> None:
    found = assembled(WIN_AND_LOSS, version=2, max_staleness=1)
    assert (found.samples, len(found.episodes)) == ([], 2)
    assert found.metrics["stale_share"] == 1.0


def test_plays_without_a_preference_are_left_out_of_the_batch_but_not_out_of_the_mean() -> None:
    even = group_of(episode_of([1.0]), episode_of([1.0]), group=1)
    found = assembled(WIN_AND_LOSS, even)
    assert len(found.samples) == 2
    assert found.metrics["zero_advantage_share"] == 0.5
    assert total_weight(found) == pytest.approx(3 / 5)


def test_an_entropy_bonus_wants_plays_without_a_preference_too() -> None:
    even = group_of(episode_of([1.0]), episode_of([1.0]), group=1)
    found = assembled(WIN_AND_LOSS, even, entropy_coefficient=0.1)
    assert len(found.samples) == 4
    assert total_weight(found) == pytest.approx(1.0)


def test_a_step_where_all_plays_agree_still_has_a_sample() -> None:
    found = assembled(group_of(episode_of([1.0]), episode_of([1.0])))
    assert [turn_values(sample) for sample in found.samples] == [[0.0]]


def test_rounding_is_no_preference() -> None:
    third = group_of(*(episode_of([0.1, 0.2]) if n else episode_of([0.2, 0.1]) for n in range(3)))
    assert assembled(third).metrics["zero_advantage_share"] == 1.0


def test_a_token_mean_gives_every_token_the_same_weight() -> None:
    found = assembled(
        group_of(episode_of({"a": [1.0] * 3, "b": [1.0]}), episode_of({"a": [0.0], "b": [0.0]}))
    )
    weights = np.concatenate([sample.weights[sample.loss_mask] for sample in found.samples])
    np.testing.assert_allclose(weights, 1 / len(weights), rtol=1e-6)
    assert total_weight(found) == pytest.approx(1.0)


def test_an_agent_mean_gives_every_agent_the_same_weight() -> None:
    talkative = group_of(episode_of({"a": [1.0] * 9, "b": [1.0]}), episode_of({"a": [0.0] * 3, "b": [0.0]}))
    found = assembled(talkative, loss_mean="agent")
    by_agent = [float(sample.weights.sum()) for sample in found.samples]
    assert sum(by_agent[:2]) == pytest.approx(0.5)
    assert sum(by_agent[2:]) == pytest.approx(0.5)
    assert by_agent[0] == pytest.approx(3 * by_agent[1])


def test_a_sequence_mean_gives_every_sample_the_same_weight() -> None:
    found = assembled(group_of(episode_of([1.0] * 3), episode_of([0.0])), loss_mean="sequence")
    assert [float(sample.weights.sum()) for sample in found.samples] == pytest.approx([0.5, 0.5])


def test_a_constant_length_lets_long_samples_weigh_more() -> None:
    group = group_of(episode_of([1.0] * 3), episode_of([0.0]))
    found = assembled(group, loss_mean="constant", loss_length=4)
    # Two samples, each token 1 / (2 * 4): six tokens and two.
    assert [float(sample.weights.sum()) for sample in found.samples] == pytest.approx([0.75, 0.25])


@pytest.mark.parametrize("mean", ["token", "sequence", "agent"])
def test_plays_that_are_left_out_count_in_every_mean(mean: str) -> None:
    even = group_of(episode_of([1.0]), episode_of([1.0]), group=1)
    found = assembled(group_of(episode_of([1.0]), episode_of([0.0])), even, loss_mean=mean)
    assert (len(found.samples), total_weight(found)) == (2, pytest.approx(0.5))


def test_answers_that_use_up_their_tokens_are_worth_less() -> None:
    # The limit is 4 tokens: answers of 2 lose nothing, of 3 half of 0.4, of 4 all of it.
    group = group_of(*(episode_of([1.0], answer=tokens) for tokens in (2, 3, 4)))
    found = assembled(group, overlong_buffer=2, overlong_penalty=0.4)
    values = [float(sample.advantages.max() + sample.advantages.min()) for sample in found.samples]
    assert values == pytest.approx([0.2, -0.2], abs=1e-6)  # the middle one is exactly the mean
    assert [episode.reward("agent") for episode in found.episodes] == [1.0] * 3


def test_running_means_go_from_step_to_step_and_a_warm_up_leaves_them_alone() -> None:
    settings = {"advantage": "rae", "baseline_decay": 0.5}
    found = assembled(group_of(episode_of([4.0])), **settings)
    assert found.baselines == {"agent": 2.0}
    again = assembled(group_of(episode_of([4.0])), baselines=found.baselines, **settings)
    assert [turn_values(sample) for sample in again.samples] == [[2.0]]
    taught = assembled(group_of(episode_of([4.0])), baselines=found.baselines, warmup=True, **settings)
    assert taught.baselines == {"agent": 2.0}


@pytest.mark.parametrize(
    ("rewards", "advantage", "expected"),
    [
        (([1.0], [0.0]), "group_mean", True),
        (([1.0], [1.0]), "group_mean", False),
        (([0.1, 0.2], [0.2, 0.1]), "group_mean", False),
        (([0.1, 0.2], [0.2, 0.1]), "turn_group_mean", True),
        (([1.0], [1.0]), "dr_mas", False),
        (([1.0, 1.0], [2.0, 1.0]), "at_grpo", True),
    ],
)
def test_a_group_teaches_where_its_advantages_are_not_all_zero(
    rewards: tuple[list[float], list[float]], advantage: str, expected: bool
) -> None:
    settings = AlgorithmConfig.model_validate({"advantage": advantage})
    assert teaches(group_of(*map(episode_of, rewards)), settings, max_tokens=4) is expected


def test_only_trained_agents_teach() -> None:
    plays = [episode_of(trajectories=[trajectory_of([r], trainable=False)]) for r in (0.0, 1.0)]
    assert not teaches(group_of(*plays), AlgorithmConfig(), max_tokens=4)


def test_an_agent_whose_tokens_are_all_too_old_does_not_count_in_the_agent_mean() -> None:
    plays = [
        episode_of(trajectories=[trajectory_of([r], agent="a", versions=5), trajectory_of([r], agent="b")])
        for r in (1.0, 0.0)
    ]
    found = assembled(group_of(*plays), loss_mean="agent", version=5)
    assert len(found.samples) == 2
    assert total_weight(found) == pytest.approx(1.0)


def test_normalized_advantages_have_the_deviation_one_over_the_trained_tokens() -> None:
    second = group_of(episode_of([4.0, 0.0]), episode_of([1.0]), episode_of([0.0, 0.0]), group=1)
    found = assembled(WIN_AND_LOSS, second, normalize_batch=True)
    values = np.concatenate([sample.advantages[sample.loss_mask] for sample in found.samples])
    assert values.std() == pytest.approx(1.0, abs=1e-5)


def test_a_single_advantage_has_no_deviation_to_be_divided_by() -> None:
    group = group_of(episode_of([1.0], versions=5), episode_of([0.0]))
    (sample,) = assembled(group, normalize_batch=True, version=5).samples
    assert turn_values(sample) == [0.5]


def test_a_warm_up_learns_every_token_of_the_teacher() -> None:
    taught = [group_of(episode_of([r, 0.0], versions=-1, routes=False), group=int(r)) for r in (0.0, 1.0)]
    found = assembled(*taught, warmup=True, version=7, normalize_batch=True)
    assert [sample.loss_mask.sum() for sample in found.samples] == [2 * ANSWER] * 2
    assert all(sample.routes is None for sample in found.samples)
    assert len(found.ages) == 0
    assert total_weight(found) == pytest.approx(1.0)


def test_members_that_are_missing_are_not_compared_with() -> None:
    group = group_of(episode_of([1.0]), episode_of([0.0]), episode_of([5.0]))
    del group.episodes[2]
    assert [turn_values(sample) for sample in assembled(group).samples] == [[0.5], [-0.5]]


@given(
    plays=st.lists(
        st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 6)), min_size=1, max_size=4),
        min_size=2,
        max_size=6,
    ),
    staleness=st.integers(0, 3),
    mean=st.sampled_from(["token", "sequence", "agent"]),
    advantage=st.sampled_from(
        ["group_mean", "dr_mas", "turn_group_mean", "turn_batch_mean", "at_grpo", "magrpo", "rae"]
    ),
)
def test_checksums_survive_weights_sum_to_one_and_nothing_old_is_trained(
    plays: list[list[tuple[int, int]]], staleness: int, mean: str, advantage: str
) -> None:
    episodes = [
        episode_of({"ab"[n % 2]: [float(r) for r, _ in play]}, versions=[v for _, v in play])
        for n, play in enumerate(plays)
    ]
    found = assembled(
        group_of(*episodes),
        version=6,
        max_staleness=staleness,
        loss_mean=mean,
        advantage=advantage,
        entropy_coefficient=0.1,
    )
    for sample in found.samples:
        sample.verify()
        assert (sample.versions[sample.loss_mask] >= 6 - staleness).all()
        assert sample.loss_mask.any()
    if found.samples:
        assert total_weight(found) == pytest.approx(1.0, abs=1e-5)
    fresh = sum(v >= 6 - staleness for play in plays for _, v in play)
    assert sum(int(sample.loss_mask.sum()) for sample in found.samples) == fresh * ANSWER
