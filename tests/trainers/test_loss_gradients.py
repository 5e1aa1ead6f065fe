"""Losses against finite differences, and against each other where the literature says that they are equal."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from trainer_builders import owners_of

from agentgym.algorithm_config import CORRECTED, AlgorithmConfig
from agentgym_trainers.losses.dppo import dppo_tv
from agentgym_trainers.losses.menu import LOSSES, token_loss
from agentgym_trainers.losses.ppo import decoupled_ppo, gspo, ppo_clip
from agentgym_trainers.losses.reinforce import cispo, topr
from agentgym_trainers.losses.terms import Owners, TokenTerms

LENGTHS = (4, 1, 5, 2)
N = sum(LENGTHS)


def random_logs(seed: int, count: int, near: Tensor | None = None) -> Tensor:
    """Log-probabilities in float64; with `near` within a factor of about 2 of those."""
    generator = torch.Generator().manual_seed(seed)
    if near is None:
        return (0.05 + 0.9 * torch.rand(count, generator=generator, dtype=torch.float64)).log()
    return near + 0.5 * torch.randn(count, generator=generator, dtype=torch.float64)


def terms_of(seed: int, lengths: tuple[int, ...] = LENGTHS) -> TokenTerms:
    count = sum(lengths)
    rollout = random_logs(seed, count)
    return TokenTerms(
        logprobs=random_logs(seed + 1, count, rollout).requires_grad_(),
        entropy=random_logs(seed + 2, count).exp().requires_grad_(),
        old=random_logs(seed + 3, count, rollout),
        rollout=rollout,
        advantages=torch.randn(count, generator=torch.Generator().manual_seed(seed + 4), dtype=torch.float64),
        owners=owners_of(*lengths),
    )


def gradient(loss: Tensor, logprobs: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss.sum(), logprobs, retain_graph=True)
    return found


def differences(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> Tensor:
    """The gradient of a sum by central differences."""
    at = at.detach()
    units = torch.eye(len(at), dtype=at.dtype) * step
    return torch.stack([(function(at + u).sum() - function(at - u).sum()) / (2 * step) for u in units])


def settings_of(loss: str) -> AlgorithmConfig:
    correction = "icepop" if loss in CORRECTED else "none"
    return AlgorithmConfig.model_validate(
        {"loss": loss, "entropy_coefficient": 0.1, "correction": correction}
        | ({"dual_clip": 1.5} if loss in ("ppo_clip", "decoupled_ppo") else {})
    )


@pytest.mark.parametrize("loss", ["ppo_clip", "dppo_tv", "decoupled_ppo", "reinforce", "sft"])
def test_gradients_are_those_of_finite_differences(loss: str):
    terms = terms_of(3)
    settings = settings_of("dppo_tv" if loss == "sft" else loss)

    def total(logprobs: Tensor, entropy: Tensor) -> Tensor:
        moved = TokenTerms(logprobs, entropy, terms.old, terms.rollout, terms.advantages, terms.owners)
        return token_loss(loss, moved, settings)[0]

    assert torch.autograd.gradcheck(total, (terms.logprobs, terms.entropy))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("correction", ["tis", "mis", "icepop"])
def test_corrections_at_any_level_are_weights_that_stand_still(correction: str, level: str):
    terms = terms_of(9)
    settings = AlgorithmConfig.model_validate(
        {"loss": "ppo_clip", "correction": correction, "correction_level": level}
    )

    def total(logprobs: Tensor) -> Tensor:
        return token_loss("ppo_clip", replace(terms, logprobs=logprobs), settings)[0]

    assert torch.autograd.gradcheck(total, (terms.logprobs,))


@pytest.mark.parametrize("loss", LOSSES)
def test_statistics_have_one_number_for_each_token_and_no_gradient(loss: str):
    terms = terms_of(4)
    value, stats = token_loss(loss, terms, settings_of("dppo_tv" if loss == "sft" else loss))
    assert value.shape == (N,)
    for name, per_token in stats.items():
        assert per_token.shape == (N,), name
        assert not per_token.requires_grad, name


def test_the_gradient_of_cispo_is_that_of_a_weight_that_stands_still():
    terms = terms_of(5)
    loss, _ = cispo(terms.logprobs, terms.old, terms.advantages, clip_low=0.2, clip_high=0.28)
    weight = (terms.logprobs - terms.old).exp().clamp(0.8, 1.28).detach()
    expected = differences(lambda new: -weight * terms.advantages * new, terms.logprobs)
    torch.testing.assert_close(gradient(loss, terms.logprobs), expected)


def test_the_gradient_of_topr_is_that_of_a_weight_that_stands_still():
    terms = terms_of(6)
    loss, _ = topr(terms.logprobs, terms.rollout, terms.advantages, terms.owners)
    parts = (terms.logprobs - terms.rollout).detach().split(LENGTHS)
    product = torch.cat([part.sum().exp().expand(len(part)) for part in parts])
    weight = torch.where(terms.advantages < 0, product.clamp(max=1.0), 1.0)
    expected = differences(lambda new: -weight * terms.advantages * new, terms.logprobs)
    torch.testing.assert_close(gradient(loss, terms.logprobs), expected)


def test_the_mean_of_gspo_over_a_sample_is_the_papers_loss_in_value_and_gradient():
    terms = terms_of(7)
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0], dtype=torch.float64)  # one for each sample

    def literal(new: Tensor) -> Tensor:
        out = []
        for part, old, advantage in zip(
            new.split(LENGTHS), terms.old.split(LENGTHS), advantages, strict=True
        ):
            s = (part - old).mean().exp()
            out.append(-torch.minimum(s * advantage, s.clamp(0.7, 1.4) * advantage))
        return torch.stack(out)

    per_token = torch.cat([a.expand(n) for a, n in zip(advantages, LENGTHS, strict=True)])
    loss, stats = gspo(terms.logprobs, terms.old, per_token, terms.owners, clip_low=0.3, clip_high=0.4)
    assert 0 < stats["clip_share"].mean() < 1
    mean = torch.stack([part.mean() for part in loss.split(LENGTHS)])
    torch.testing.assert_close(mean, literal(terms.logprobs))
    torch.testing.assert_close(gradient(mean, terms.logprobs), differences(literal, terms.logprobs))


def same(one: Tensor, other: Tensor, logprobs: Tensor) -> None:
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(gradient(one, logprobs), gradient(other, logprobs))


@pytest.mark.parametrize("seed", range(5))
def test_losses_are_each_other_where_the_literature_says_so(seed: int):
    terms = terms_of(10 * seed)
    new, old, rollout, A = terms.logprobs, terms.old, terms.rollout, terms.advantages
    bounds = {"clip_low": 0.2, "clip_high": 0.28}
    ppo = ppo_clip(new, old, A, **bounds)[0]

    # Samples of one token have no other tokens to share a ratio with.
    same(gspo(new, old, A, owners_of(*[1] * N), **bounds)[0], ppo, new)
    # With the sampling policy as the recent one there is nothing to weigh.
    same(decoupled_ppo(new, rollout, rollout, A, **bounds)[0], ppo_clip(new, rollout, A, **bounds)[0], new)
    # A second clip that nothing reaches.
    same(ppo_clip(new, old, A, **bounds, dual_clip=1e9)[0], ppo, new)
    # Bounds that nothing reaches leave the importance-weighted gradient of all three.
    wide = {"clip_low": 1.0, "clip_high": 1e6}
    weighted = -(new - old).exp() * A
    same(ppo_clip(new, old, A, **wide)[0], weighted, new)
    torch.testing.assert_close(gradient(cispo(new, old, A, **wide)[0], new), gradient(weighted, new))
    same(dppo_tv(new, rollout, A, tv_threshold=1.0, kl_coefficient=0.0)[0], -(new - rollout).exp() * A, new)


@pytest.mark.parametrize("seed", range(3))
def test_truncation_at_infinity_is_plain_importance_weighting(seed: int):
    terms = terms_of(seed)
    settings = AlgorithmConfig(loss="ppo_clip", correction="tis", correction_high=1e6)
    decoupled = AlgorithmConfig(loss="decoupled_ppo")
    corrected = token_loss("ppo_clip", terms, settings)[0]
    rho = (terms.old - terms.rollout).exp()
    plain = ppo_clip(terms.logprobs, terms.old, terms.advantages, clip_low=0.2, clip_high=0.28)[0]
    same(corrected, rho * plain, terms.logprobs)
    same(corrected, token_loss("decoupled_ppo", terms, decoupled)[0], terms.logprobs)


def test_bounds_that_hold_everything_make_icepop_importance_weighting_and_mis_nothing():
    terms = terms_of(8)
    plain = token_loss("reinforce", terms, AlgorithmConfig(loss="reinforce"))[0]
    rho = (terms.old - terms.rollout).exp()
    for name, weight in (("icepop", rho), ("mis", torch.ones(N, dtype=torch.float64))):
        settings = AlgorithmConfig.model_validate(
            {"loss": "reinforce", "correction": name, "correction_low": 0.0, "correction_high": 1e6}
        )
        same(token_loss("reinforce", terms, settings)[0], weight * plain, terms.logprobs)


def test_where_the_policy_is_still_the_sampling_one_all_losses_have_the_gradient_of_reinforce():
    rollout = random_logs(1, N).requires_grad_()
    fixed, A = rollout.detach(), terms_of(1).advantages
    terms = TokenTerms(rollout, torch.zeros(N), fixed, fixed, A, owners_of(*LENGTHS))
    expected = gradient(token_loss("reinforce", terms, AlgorithmConfig(loss="reinforce"))[0], rollout)
    for name in LOSSES:
        if name != "sft":
            settings = AlgorithmConfig.model_validate({"loss": name})
            torch.testing.assert_close(gradient(token_loss(name, terms, settings)[0], rollout), expected)


def softmax_policies() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits over 5 tokens with gradient, their policy's log-probabilities, those of a reference and of a third one."""
    generator = torch.Generator().manual_seed(5)
    logits, reference, rollout = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    return logits, logits.log_softmax(0), reference.log_softmax(0), rollout.log_softmax(0)


@pytest.mark.parametrize(
    ("name", "weighted", "right"),
    [("k1", True, True), ("k3", True, True), ("k2", False, True), ("k1", False, False), ("k3", False, False)],
)
def test_which_estimates_have_the_gradient_of_the_divergence(name: str, weighted: bool, right: bool):
    """All tokens of a policy, each as often as it is sampled: by the policy itself, or weighted by another one."""
    logits, new, reference, rollout = softmax_policies()
    (expected,) = torch.autograd.grad((new.exp() * (new - reference)).sum(), logits, retain_graph=True)
    often, mu = (rollout.exp(), rollout) if weighted else (new.exp().detach(), new.detach())
    terms = TokenTerms(
        new, torch.zeros(5), mu, mu, torch.zeros(5, dtype=torch.float64), owners_of(5), reference
    )
    settings = AlgorithmConfig.model_validate(
        {"loss": "reinforce", "kl_reference_estimator": name, "kl_reference_weighted": weighted}
    ).model_copy(update={"kl_reference_coefficient": 1.0})  # the refused ones too
    (found,) = torch.autograd.grad((often * token_loss("reinforce", terms, settings)[0]).sum(), logits)
    assert torch.allclose(found, expected) == right
    if (name, weighted) == ("k1", False):
        torch.testing.assert_close(found, torch.zeros_like(found))


def test_rewards_to_go_are_summed_inside_each_sample():
    owners = Owners(torch.tensor([0, 0, 2, 2, 2]), 3)  # the second sample has no trained token
    values = torch.tensor([1.0, -3.0, 5.0, 0.0, -2.0])
    assert owners.to_go(values).tolist() == [-2, -3, 3, -2, -2]


@pytest.mark.parametrize("distance", [200.0, -200.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_policies_that_are_far_apart_give_finite_numbers(loss: str, distance: float):
    new = torch.full((2,), -210.0).requires_grad_()
    other = torch.full((2,), -210.0 + distance)
    terms = TokenTerms(new, torch.zeros(2), other, other, torch.tensor([1.0, -1.0]), owners_of(1, 1))
    value, _ = token_loss(
        loss, terms, AlgorithmConfig.model_validate({"loss": loss} if loss != "sft" else {})
    )
    value.sum().backward()
    assert value.isfinite().all()
    assert new.grad.isfinite().all()


def test_a_token_whose_ratio_overflows_is_masked_without_a_nan():
    new = torch.tensor([0.0], requires_grad=True)
    loss, _ = dppo_tv(new, torch.tensor([-200.0]), torch.ones(1), tv_threshold=0.2, kl_coefficient=0.0)
    loss.sum().backward()
    assert loss.item() == 0
    assert new.grad.item() == 0


def test_a_clipped_token_has_no_gradient():
    new = random_logs(2, 2).requires_grad_()
    old = new.detach() + torch.tensor([-1.0, 1.0])
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    loss, _ = ppo_clip(new, old, advantages, clip_low=0.2, clip_high=0.28)
    assert gradient(loss, new).tolist() == [0, 0]


def test_sums_and_means_are_over_the_tokens_of_a_sample_and_give_their_gradient_back():
    owners = Owners(torch.tensor([0, 0, 2]), 3)  # the second sample has no trained token
    values = torch.tensor([1.0, 3.0, 5.0], dtype=torch.float64, requires_grad=True)
    assert owners.sum(values).tolist() == [4, 4, 5]
    assert owners.mean(values).tolist() == [2, 2, 5]
    assert torch.autograd.gradcheck(owners.mean, (values,))
