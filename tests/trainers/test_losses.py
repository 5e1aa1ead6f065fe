"""Losses by hand: each formula on numbers that can be checked on paper."""

from dataclasses import replace
from math import exp, log
from typing import Any, get_args

import pytest
import torch
from trainer_builders import owners_of

from agentgym.algorithm_config import CLIPS, CORRECTED, AlgorithmConfig
from agentgym.errors import ConfigError
from agentgym_trainers.losses.corrections import icepop, log_rho_at, mis, tis
from agentgym_trainers.losses.dppo import dppo_tv
from agentgym_trainers.losses.kl import kl_estimate, kl_to_rollout
from agentgym_trainers.losses.menu import LOSSES, token_loss
from agentgym_trainers.losses.ppo import decoupled_ppo, gspo, ppo_clip
from agentgym_trainers.losses.reinforce import cispo, reinforce, topr
from agentgym_trainers.losses.sft import sft
from agentgym_trainers.losses.terms import TokenTerms


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def terms_of(
    new: torch.Tensor, old: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor
) -> TokenTerms:
    return TokenTerms(new, torch.full_like(new, 0.5), old, rollout, advantages, owners_of(len(new)))


def settings_of(**fields: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(fields)


def test_every_name_of_the_configuration_is_a_loss() -> None:
    names = get_args(AlgorithmConfig.model_fields["loss"].annotation)
    assert {*names, "sft"} == set(LOSSES)
    assert set(CLIPS) | set(CORRECTED) <= set(names)


def test_ppo_clip_takes_the_smaller_of_the_plain_and_the_clipped_gain():
    # Ratios 2, 2, 0.5, 0.5, 1.1 with advantages +1, -1, +1, -1, +3.
    new, old = logs(0.4, 0.4, 0.1, 0.1, 0.22), logs(0.2, 0.2, 0.2, 0.2, 0.2)
    advantages = numbers(1, -1, 1, -1, 3)
    loss, stats = ppo_clip(new, old, advantages, clip_low=0.2, clip_high=0.28)
    assert loss.tolist() == pytest.approx([-1.28, 2.0, -0.5, 0.8, -3.3])
    assert stats["clip_share"].tolist() == [1, 0, 0, 1, 0]


def test_a_second_clip_bounds_the_loss_of_bad_tokens_that_became_likely():
    # Ratios 4, 2, 0.5, 4 with advantages -2, -2, -2, +1 and c = 3: -(-8) becomes 6, the others stay.
    new, old = logs(0.4, 0.2, 0.05, 0.4), logs(0.1, 0.1, 0.1, 0.1)
    loss, stats = ppo_clip(new, old, numbers(-2, -2, -2, 1), clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert loss.tolist() == pytest.approx([6.0, 4.0, 1.6, -1.28])
    assert stats["clip_share"].tolist() == [1, 0, 1, 1]


def test_decoupled_ppo_clips_around_the_recent_policy_and_weighs_by_what_it_is_to_the_sampling_one():
    # u = 0.4 / 0.2 = 2 clipped to 1.28, weight 0.2 / 0.1 = 2.
    loss, stats = decoupled_ppo(
        logs(0.4), logs(0.2).requires_grad_(), logs(0.1), numbers(1), clip_low=0.2, clip_high=0.28
    )
    assert loss.item() == pytest.approx(-2.56)
    assert stats["behaviour_weight"].item() == pytest.approx(2)
    assert not stats["behaviour_weight"].requires_grad


def test_gspo_has_the_geometric_mean_of_a_samples_ratios():
    # Samples of two and one tokens: ratios 4 and 1 (mean 2), and 0.5; clipped to [0.5, 1.5].
    new, old = logs(0.4, 0.1, 0.1), logs(0.1, 0.1, 0.2)
    loss, stats = gspo(new, old, numbers(1, 1, 1), owners_of(2, 1), clip_low=0.5, clip_high=0.5)
    assert stats["ratio"].tolist() == pytest.approx([2, 2, 0.5])
    assert loss.tolist() == pytest.approx([-1.5, -1.5, -0.5])
    assert stats["clip_share"].tolist() == [1, 1, 0]


def test_cispo_bounds_the_weight_and_goes_on_learning():
    # Ratios 2, 0.5, 1.1 with bounds [0.8, 1.28].
    new = logs(0.4, 0.1, 0.22).requires_grad_()
    loss, stats = cispo(new, logs(0.2, 0.2, 0.2), numbers(1, -1, 2), clip_low=0.2, clip_high=0.28)
    assert loss.tolist() == pytest.approx([-1.28 * log(0.4), 0.8 * log(0.1), -2.2 * log(0.22)])
    assert stats["clip_share"].tolist() == [1, 1, 0]
    loss.sum().backward()
    assert new.grad.tolist() == pytest.approx([-1.28, 0.8, -2.2])


def test_reinforce_is_the_advantage_times_the_log_probability():
    assert reinforce(logs(0.5, 0.25), numbers(2, -1))[0].tolist() == pytest.approx([2 * log(2), -log(4)])


def test_topr_tapers_only_bad_plays_that_the_policy_has_left():
    # Products of ratios: 0.5 * 0.5 for the first sample, 2 for the second, and 0.5 for a good third one.
    new, rollout = logs(0.1, 0.1, 0.4, 0.1), logs(0.2, 0.2, 0.2, 0.2)
    loss, stats = topr(new, rollout, numbers(-1, -1, -1, 1), owners_of(2, 1, 1))
    expected = [0.25 * log(0.1), 0.25 * log(0.1), log(0.4), -log(0.1)]
    assert loss.tolist() == pytest.approx(expected)
    assert stats["clip_share"].tolist() == [1, 1, 0, 0]


def test_dppo_masks_only_tokens_that_moved_too_far_in_their_advantages_direction():
    # Probability differences: +0.3, +0.3, -0.3, -0.3, +0.1, +0.3 with advantages +, -, +, -, +, 0.
    new, rollout = logs(0.5, 0.5, 0.2, 0.2, 0.3, 0.5), logs(0.2, 0.2, 0.5, 0.5, 0.2, 0.2)
    loss, stats = dppo_tv(new, rollout, numbers(1, -1, 1, -1, 1, 0), tv_threshold=0.2, kl_coefficient=0.0)
    assert loss.tolist() == pytest.approx([0, 2.5, -0.4, 0, -1.5, 0])
    assert stats["mask_share"].tolist() == [1, 0, 0, 1, 0, 0]


def test_dppo_holds_every_token_to_the_rollout_policy():
    loss, _ = dppo_tv(logs(0.5), logs(0.2), numbers(1), tv_threshold=0.2, kl_coefficient=0.1)
    assert loss.item() == pytest.approx(0.1 * log(2.5) ** 2)


def test_sft_is_the_negative_log_probability():
    assert sft(logs(0.25))[0].item() == pytest.approx(log(4))


def test_corrections_truncate_mask_or_keep_inside():
    log_rho = logs(0.25, 0.8, 4.0).requires_grad_()
    for (weight, stats), expected, outside in (
        (tis(log_rho, 2.0), [0.25, 0.8, 2.0], [0, 0, 1]),
        (mis(log_rho, 0.5, 2.0), [0, 1, 0], [1, 0, 1]),
        (icepop(log_rho, 0.5, 5.0), [0, 0.8, 4.0], [1, 0, 0]),
    ):
        assert weight.tolist() == pytest.approx(expected)
        assert stats["rho_outside_share"].tolist() == outside
        assert not weight.requires_grad


def test_rho_of_a_sample_is_the_product_or_the_geometric_mean_over_its_tokens():
    log_rho, owners = logs(4.0, 1.0, 0.5), owners_of(2, 1)
    for level, expected in (
        ("token", [4, 1, 0.5]),
        ("sequence", [4, 4, 0.5]),
        ("geometric", [2, 2, 0.5]),
    ):
        assert log_rho_at(level, log_rho, owners).exp().tolist() == pytest.approx(expected)


def test_kl_estimators_average_to_the_divergence():
    rollout, model = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.25, 0.25])
    expected = (rollout * (rollout / model).log()).sum().item()
    stats = kl_to_rollout(model.log(), rollout.log())
    for name in ("kl_rollout", "kl_rollout_k1"):
        assert (rollout * stats[name]).sum().item() == pytest.approx(expected, rel=1e-4)
    assert (stats["kl_rollout"] >= 0).all()


def test_the_estimates_of_the_divergence_from_the_reference():
    x = numbers(0.5, -1.0, 0.0)
    for name, expected in (
        ("k1", [0.5, -1, 0]),
        ("k2", [0.125, 0.5, 0]),
        ("k3", [exp(-0.5) - 0.5, exp(1) - 2, 0]),
    ):
        assert kl_estimate(name, x).tolist() == pytest.approx(expected)


def test_the_divergence_from_the_reference_is_added_to_the_loss():
    terms = replace(terms_of(logs(0.4), logs(0.4), logs(0.2), numbers(0)), reference=logs(0.1))
    for weighted, factor in ((False, 1), (True, 2)):  # pi_theta / mu = 2
        settings = settings_of(
            loss="ppo_clip",
            kl_reference_coefficient=0.1,
            kl_reference_estimator="k2",
            kl_reference_weighted=weighted,
        )
        loss, stats = token_loss("ppo_clip", terms, settings)
        assert loss.item() == pytest.approx(factor * 0.1 * log(4) ** 2 / 2)
        assert stats["kl_reference"].item() == pytest.approx(log(4) ** 2 / 2)
    in_reward = settings_of(loss="ppo_clip", kl_reference_coefficient=0.1, kl_reference_in="reward")
    assert token_loss("ppo_clip", terms, in_reward)[0].item() == 0


@pytest.mark.parametrize("loss", ["ppo_clip", "cispo"])
def test_without_a_correction_the_rollout_policy_stands_for_the_old_one(loss: str):
    terms = terms_of(logs(0.4), logs(0.3), logs(0.1), numbers(-1))
    assert token_loss(loss, terms, settings_of(loss=loss))[1]["ratio"].item() == pytest.approx(4.0)


def test_with_a_correction_the_ratio_is_to_the_old_policy_and_the_loss_is_weighted():
    terms = terms_of(logs(0.4), logs(0.3), logs(0.1), numbers(-1))
    loss, stats = token_loss("ppo_clip", terms, settings_of(loss="ppo_clip", correction="tis"))
    assert loss.item() == pytest.approx(2.0 * 4 / 3)
    assert stats["rho"].item() == pytest.approx(3)
    assert stats["rho_outside_share"].item() == 1


def test_the_corrections_and_levels_of_the_configuration_are_these_functions():
    new, old, rollout = logs(0.2, 0.3, 0.4), logs(0.4, 0.1, 0.2), logs(0.1, 0.1, 0.4)
    owners, advantages = owners_of(2, 1), numbers(1, 1, 1)
    terms = TokenTerms(new, torch.zeros(3), old, rollout, advantages, owners)
    for level, rho in (("token", [4, 1, 0.5]), ("sequence", [4, 4, 0.5]), ("geometric", [2, 2, 0.5])):
        for name, weights in (
            ("tis", [min(r, 3) for r in rho]),
            ("mis", [float(0.6 <= r <= 3) for r in rho]),
            ("icepop", [r if 0.6 <= r <= 3 else 0 for r in rho]),
        ):
            settings = settings_of(
                loss="reinforce",
                correction=name,
                correction_level=level,
                correction_low=0.6,
                correction_high=3,
            )
            loss, _ = token_loss("reinforce", terms, settings)
            assert loss.tolist() == pytest.approx((-new * numbers(*weights)).tolist()), (name, level)


def test_the_entropy_bonus_lowers_the_loss():
    terms = terms_of(logs(0.2), logs(0.2), logs(0.2), numbers(0))
    settings = settings_of(entropy_coefficient=0.01, kl_coefficient=0.0)
    assert token_loss("dppo_tv", terms, settings)[0].item() == pytest.approx(-0.005)


def test_an_unknown_loss_is_refused():
    terms = terms_of(logs(0.2), logs(0.2), logs(0.2), numbers(0))
    with pytest.raises(ConfigError, match="no loss 'grpo'; known: cispo, decoupled_ppo, dppo_tv"):
        token_loss("grpo", terms, settings_of())


def test_equal_policies_have_a_ratio_of_one():
    terms = terms_of(logs(0.2), logs(0.2), logs(0.2), numbers(1))
    loss, stats = token_loss("dppo_tv", terms, settings_of())
    assert loss.item() == -1
    assert stats["ratio"].item() == exp(0)
    assert stats["kl_rollout"].item() == 0
