"""The loss of a step, chosen by name."""

from torch import Tensor

from agentgym.algorithm_config import AlgorithmConfig
from agentgym.errors import ConfigError
from agentgym_trainers.losses.corrections import icepop, log_rho_at, mis, tis
from agentgym_trainers.losses.dppo import dppo_tv
from agentgym_trainers.losses.kl import kl_estimate, kl_to_rollout
from agentgym_trainers.losses.ppo import decoupled_ppo, gspo, ppo_clip
from agentgym_trainers.losses.reinforce import cispo, reinforce, topr
from agentgym_trainers.losses.sft import sft
from agentgym_trainers.losses.terms import Stats, TokenTerms, ratio_of

LOSSES = ("cispo", "decoupled_ppo", "dppo_tv", "gspo", "ppo_clip", "reinforce", "sft", "topr")
"""The names that `token_loss` knows."""


def token_loss(name: str, terms: TokenTerms, settings: AlgorithmConfig) -> tuple[Tensor, Stats]:
    """Return the loss per token and its statistics, for the loss of that name.

    The loss is multiplied by the correction; the entropy bonus subtracts `entropy_coefficient` times the entropy, and
    the divergence from the reference is added where the settings want it in the loss. Supervised steps have none of
    these.

    Raises:
        ConfigError: no loss has that name.
    """
    if name == "sft":
        return sft(terms.logprobs)
    loss, stats = _policy_loss(name, terms, settings)
    if settings.correction != "none":
        weight, more = correction(terms, settings)
        loss, stats = loss * weight, {**stats, **more}
    stats |= kl_to_rollout(terms.logprobs, terms.rollout)
    if settings.entropy_coefficient > 0:
        loss = loss - settings.entropy_coefficient * terms.entropy
    if terms.reference is not None:
        divergence = kl_estimate(settings.kl_reference_estimator, terms.logprobs - terms.reference)
        stats |= {"kl_reference": divergence.detach()}
        if settings.kl_reference_in == "loss":
            if settings.kl_reference_weighted:
                divergence = ratio_of(terms.logprobs - terms.rollout) * divergence
            loss = loss + settings.kl_reference_coefficient * divergence
    return loss, stats


def correction(terms: TokenTerms, settings: AlgorithmConfig) -> tuple[Tensor, Stats]:
    """Return the weight [N] of each token for the difference of the two engines, by the name in the settings."""
    log_rho = log_rho_at(settings.correction_level, terms.old - terms.rollout, terms.owners)
    low, high = settings.correction_low, settings.correction_high
    match settings.correction:
        case "tis":
            return tis(log_rho, high)
        case "mis":
            return mis(log_rho, low, high)
        case _:
            return icepop(log_rho, low, high)


def _policy_loss(name: str, terms: TokenTerms, settings: AlgorithmConfig) -> tuple[Tensor, Stats]:
    new, rollout, advantages = terms.logprobs, terms.rollout, terms.advantages
    # Without a correction the rollout policy stands for the old one: one ratio bounds both how far the weights
    # moved and how far the two engines differ, and no second forward pass is needed ("bypass").
    old = rollout if settings.correction == "none" else terms.old
    low, high = settings.clip_of(name)
    dual = settings.dual_clip
    match name:
        case "dppo_tv":
            threshold, coefficient = settings.tv_threshold, settings.kl_coefficient
            return dppo_tv(new, rollout, advantages, tv_threshold=threshold, kl_coefficient=coefficient)
        case "ppo_clip":
            return ppo_clip(new, old, advantages, clip_low=low, clip_high=high, dual_clip=dual)
        case "decoupled_ppo":
            prox = terms.old
            return decoupled_ppo(new, prox, rollout, advantages, clip_low=low, clip_high=high, dual_clip=dual)
        case "gspo":
            return gspo(new, old, advantages, terms.owners, clip_low=low, clip_high=high)
        case "cispo":
            return cispo(new, old, advantages, clip_low=low, clip_high=high)
        case "reinforce":
            return reinforce(new, advantages)
        case "topr":
            return topr(new, rollout, advantages, terms.owners)
        case _:
            raise ConfigError(f"there is no loss {name!r}; known: {', '.join(LOSSES)}")
