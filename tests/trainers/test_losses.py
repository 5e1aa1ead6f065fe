from math import exp, log

import pytest
import torch

from agentgym.config import AlgorithmConfig
from agentgym.errors import ConfigError
from agentgym_trainers.losses import TokenTerms, dppo_tv, kl_to_rollout, ppo_clip, sft, tis_weight, token_loss


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def terms_of(
    new: torch.Tensor, old: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor
) -> TokenTerms:
    return TokenTerms(new, torch.full_like(new, 0.5), old, rollout, advantages)


def test_ppo_clip_takes_the_smaller_of_the_plain_and_the_clipped_gain():
    # Ratios 2, 2, 0.5, 0.5, 1.1 with advantages +1, -1, +1, -1, +3.
    new, old = logs(0.4, 0.4, 0.1, 0.1, 0.22), logs(0.2, 0.2, 0.2, 0.2, 0.2)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 3.0], dtype=torch.float64)
    loss, stats = ppo_clip(new, old, advantages, clip_low=0.2, clip_high=0.28)
    assert loss.tolist() == pytest.approx([-1.28, 2.0, -0.5, 0.8, -3.3])
    assert stats["clip_share"].tolist() == [1, 0, 0, 1, 0]


def test_a_clipped_token_has_no_gradient():
    new = logs(0.4, 0.1).requires_grad_()
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    loss, _ = ppo_clip(new, logs(0.2, 0.2), advantages, clip_low=0.2, clip_high=0.28)
    loss.sum().backward()
    assert new.grad.tolist() == [0, 0]


def test_dppo_masks_only_tokens_that_moved_too_far_in_their_advantages_direction():
    # Probability differences: +0.3, +0.3, -0.3, -0.3, +0.1, +0.3 with advantages +, -, +, -, +, 0.
    new, rollout = logs(0.5, 0.5, 0.2, 0.2, 0.3, 0.5), logs(0.2, 0.2, 0.5, 0.5, 0.2, 0.2)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 0.0], dtype=torch.float64)
    loss, stats = dppo_tv(new, rollout, advantages, tv_threshold=0.2, kl_coefficient=0.0)
    assert loss.tolist() == pytest.approx([0, 2.5, -0.4, 0, -1.5, 0])
    assert stats["mask_share"].tolist() == [1, 0, 0, 1, 0, 0]


def test_dppo_holds_every_token_to_the_rollout_policy():
    loss, _ = dppo_tv(
        logs(0.5), logs(0.2), torch.ones(1, dtype=torch.float64), tv_threshold=0.2, kl_coefficient=0.1
    )
    assert loss.item() == pytest.approx(0.1 * log(2.5) ** 2)


def test_a_token_whose_ratio_overflows_is_masked_without_a_nan():
    new = torch.tensor([0.0], requires_grad=True)
    loss, _ = dppo_tv(new, torch.tensor([-200.0]), torch.ones(1), tv_threshold=0.2, kl_coefficient=0.0)
    loss.sum().backward()
    assert loss.item() == 0
    assert new.grad.item() == 0


def test_sft_is_the_negative_log_probability():
    assert sft(logs(0.25))[0].item() == pytest.approx(log(4))


def test_tis_weights_are_capped_and_stop_the_gradient():
    weight, stats = tis_weight(logs(0.4, 0.2).requires_grad_(), logs(0.1, 0.2), 2.0)
    assert weight.tolist() == pytest.approx([2.0, 1.0])
    assert stats["tis_share"].tolist() == [1, 0]
    assert not weight.requires_grad


def test_kl_estimators_average_to_the_divergence():
    rollout, model = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.25, 0.25])
    expected = (rollout * (rollout / model).log()).sum().item()
    stats = kl_to_rollout(model.log(), rollout.log())
    for name in ("kl_rollout", "kl_rollout_k1"):
        assert (rollout * stats[name]).sum().item() == pytest.approx(expected, rel=1e-4)
    assert (stats["kl_rollout"] >= 0).all()


@pytest.mark.parametrize("loss", ["ppo_clip", "dppo_tv", "sft"])
def test_gradients_are_those_of_finite_differences(loss: str):
    generator = torch.Generator().manual_seed(3)
    new, old, rollout = (torch.rand(12, generator=generator, dtype=torch.float64).log() for _ in range(3))
    advantages = torch.randn(12, generator=generator, dtype=torch.float64)
    settings = AlgorithmConfig(entropy_coefficient=0.1, tis_cap=1.5 if loss == "ppo_clip" else None)

    def total(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return token_loss(loss, TokenTerms(logprobs, entropy, old, rollout, advantages), settings)[0]

    entropy = torch.rand(12, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(total, (new.requires_grad_(), entropy.requires_grad_()))


def test_without_a_cap_the_rollout_policy_stands_for_the_old_one():
    terms = terms_of(logs(0.4), logs(0.3), logs(0.1), torch.full((1,), -1.0, dtype=torch.float64))
    assert token_loss("ppo_clip", terms, AlgorithmConfig())[0].item() == pytest.approx(4.0)


def test_with_a_cap_the_ratio_is_to_the_old_policy_and_the_loss_is_weighted():
    terms = terms_of(logs(0.4), logs(0.3), logs(0.1), torch.full((1,), -1.0, dtype=torch.float64))
    loss, stats = token_loss("ppo_clip", terms, AlgorithmConfig(tis_cap=2.0))
    assert loss.item() == pytest.approx(2.0 * 4 / 3)
    assert stats["tis_share"].item() == 1


def test_the_entropy_bonus_lowers_the_loss():
    terms = terms_of(logs(0.2), logs(0.2), logs(0.2), torch.zeros(1, dtype=torch.float64))
    settings = AlgorithmConfig(entropy_coefficient=0.01, kl_coefficient=0.0)
    assert token_loss("dppo_tv", terms, settings)[0].item() == pytest.approx(-0.005)


def test_a_cap_that_has_no_effect_is_refused():
    terms = terms_of(logs(0.2), logs(0.2), logs(0.2), torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ConfigError, match="tis_cap"):
        token_loss("dppo_tv", terms, AlgorithmConfig(tis_cap=2.0))


def test_an_unknown_loss_is_refused():
    terms = terms_of(logs(0.2), logs(0.2), logs(0.2), torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ConfigError, match="known: dppo_tv, ppo_clip, sft"):
        token_loss("reinforce", terms, AlgorithmConfig())


def test_equal_policies_have_a_ratio_of_one():
    terms = terms_of(logs(0.2), logs(0.2), logs(0.2), torch.ones(1, dtype=torch.float64))
    loss, stats = token_loss("dppo_tv", terms, AlgorithmConfig())
    assert loss.item() == -1
    assert stats["ratio"].item() == exp(0)
    assert stats["kl_rollout"].item() == 0
