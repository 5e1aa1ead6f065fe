"""One optimizer step, top to bottom.

    for each pass over the batch:
        for each microbatch of this rank, through the pipeline stages:
            forward with replayed routes -> log-probabilities -> loss -> backward
        sum the gradients over the ranks -> clip -> Adam

The loss of a pass is the plain sum over the trained tokens of weight * loss; the coordinator puts the
aggregation into the weights. Shapes: T packed tokens, N trained tokens of a microbatch.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from agentgym.algorithm_config import AlgorithmConfig
from agentgym_trainers.losses.kl import kl_estimate
from agentgym_trainers.losses.menu import token_loss
from agentgym_trainers.losses.terms import Stats, TokenTerms
from agentgym_trainers.megatron.gradients import sum_over_ranks
from agentgym_trainers.megatron.microbatch import Microbatch
from agentgym_trainers.megatron.optimizer import Optimizer
from agentgym_trainers.megatron.parallel import from_all
from agentgym_trainers.megatron.pipeline import forward_backward, run_stage
from agentgym_trainers.megatron.predictions import predict
from agentgym_trainers.megatron.reference import Reference
from agentgym_trainers.megatron.replay import ReplayController

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What the batch message says about its step."""

    loss: str
    learning_rate: float
    updates: int


def train_step(
    model: GPTModel,
    optimizer: Optimizer,
    replay: ReplayController,
    microbatches: Sequence[Microbatch],
    settings: StepSettings,
    algorithm: AlgorithmConfig,
    temperature: float,
    reference: Reference | None = None,
) -> Metrics:
    """Take the step and return its metrics; see `Tally` for what they mean.

    `temperature` divides the logits, as it did where the tokens were sampled. `reference` is there where the loss
    or the rewards are about the distance to it.
    """
    started = time.perf_counter()
    tally = Tally(compares_rollout=settings.loss != "sft")
    tally.count(microbatches)
    asked = (
        reference.logprobs(microbatches, temperature) if reference is not None else [None] * len(microbatches)
    )
    fixed: list[TokenTerms] = []  # per microbatch: what the updates have in common

    def loss_of(number: int, hidden: Tensor) -> Tensor:
        microbatch = microbatches[number]
        logprobs, entropy = predict(model, hidden, microbatch, temperature)
        if len(fixed) == number:
            fixed.append(_before(microbatch, logprobs.detach(), entropy.detach(), asked[number], algorithm))
            tally.add_first(microbatch, logprobs, entropy)
        terms = replace(fixed[number], logprobs=logprobs, entropy=entropy)
        per_token, stats = token_loss(settings.loss, terms, algorithm)
        loss = (microbatch.weights * per_token).sum()
        tally.add(loss, stats)
        return loss

    for _ in range(settings.updates):
        optimizer.zero_grad()
        if microbatches:
            forward_backward(model, replay, microbatches, loss_of)
            sum_over_ranks(model)
        tally.grad_norms.append(optimizer.step(settings.learning_rate))
    return tally.over_ranks().metrics(settings, time.perf_counter() - started)


def forward(
    model: GPTModel, replay: ReplayController, microbatch: Microbatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return what `predict` does, of a model without pipeline stages."""
    with replay.forward(microbatch.routes):
        hidden = run_stage(model, microbatch)
    return predict(model, hidden, microbatch, temperature)


def _before(
    microbatch: Microbatch, old: Tensor, entropy: Tensor, asked: Tensor | None, algorithm: AlgorithmConfig
) -> TokenTerms:
    """Return the terms before the first update; `asked`: the log-probabilities of the reference."""
    advantages = microbatch.advantages
    if asked is not None and algorithm.kl_reference_in == "reward":
        estimate = kl_estimate(algorithm.kl_reference_estimator, old - asked)
        advantages = advantages - algorithm.kl_reference_coefficient * microbatch.owners.to_go(estimate)
    return TokenTerms(old, entropy, old, microbatch.rollout, advantages, microbatch.owners, asked)


@dataclass(slots=True)
class Tally:
    """Sums over the microbatches of a step, on this rank or over all.

    `loss`, `grad_norm`, `kl_rollout` (k3), `kl_rollout_k1` and the shares are means over all updates;
    `entropy` and `mismatch` are of the first one, when the weights are still those that the batch is dated
    by. `mismatch` is the mean of |log pi_theta - log mu| over the tokens sampled by exactly these weights (it
    is the difference between the two engines alone), `mismatch_all` over all trained tokens (age included).
    """

    compares_rollout: bool
    """False for supervised steps, whose tokens no policy server sampled."""
    sums: dict[str, float] = field(default_factory=partial(defaultdict, float))
    counts: dict[str, int] = field(default_factory=partial(defaultdict, int))
    highest: dict[str, float] = field(default_factory=partial(defaultdict, float))
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)

    def count(self, microbatches: Sequence[Microbatch]) -> None:
        """Count the tokens of the microbatches, and which of them have routes."""
        for microbatch in microbatches:
            tokens = microbatch.tokens.numel() - microbatch.padding
            self.sums["tokens"] += tokens
            self.sums["tokens_trained"] += microbatch.targets.numel()
            self.sums["route_coverage"] += microbatch.route_coverage * tokens
            self.counts["route_coverage"] += tokens

    def add_first(self, microbatch: Microbatch, logprobs: Tensor, entropy: Tensor) -> None:
        """Count what is measured before the first update."""
        self._mean("entropy", entropy.detach())
        if self.compares_rollout:
            difference = (logprobs.detach() - microbatch.rollout).abs()
            self._mean("mismatch_all", difference)
            self._mean("mismatch", difference[microbatch.current])
            self._highest("mismatch_max", difference)

    def add(self, loss: Tensor, stats: Stats) -> None:
        """Count one microbatch of one update."""
        self.losses.append(loss.item())
        for name, per_token in stats.items():
            self._mean(name, per_token)
        if "ratio" in stats:
            self._highest("ratio_max", stats["ratio"])

    def over_ranks(self) -> "Tally":
        """Return the sums over all ranks; each microbatch counts once, where its loss was computed."""
        counts_here = (
            parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
        )
        mine = (self.sums, self.counts, self.highest, self.losses) if counts_here else None
        whole = Tally(self.compares_rollout, grad_norms=self.grad_norms)
        for sums, counts, highest, losses in filter(None, from_all(mine)):
            for name, value in sums.items():
                whole.sums[name] += value
            for name, number in counts.items():
                whole.counts[name] += number
            for name, value in highest.items():
                whole.highest[name] = max(whole.highest[name], value)
            whole.losses += losses
        return whole

    def metrics(self, settings: StepSettings, seconds: float) -> Metrics:
        """Return the numbers of the step."""
        means = {
            name: total / max(self.counts[name], 1) if name in self.counts else total
            for name, total in self.sums.items()
        }
        return {
            "tokens": 0.0,
            "tokens_trained": 0.0,
            "route_coverage": 0.0,
            **means,
            **self.highest,
            "loss": sum(self.losses) / settings.updates,
            "grad_norm": sum(self.grad_norms) / settings.updates,
            "learning_rate": settings.learning_rate,
            "seconds": seconds,
        }

    def _highest(self, name: str, per_token: Tensor) -> None:
        if len(per_token):
            self.highest[name] = max(self.highest[name], per_token.max().item())

    def _mean(self, name: str, per_token: Tensor) -> None:
        if len(per_token):
            self.sums[name] += per_token.sum().item()
            self.counts[name] += len(per_token)
