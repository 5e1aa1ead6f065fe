"""One optimizer step, top to bottom.

    for each pass over the batch:
        for each microbatch:  forward with replayed routes -> log-probabilities -> loss -> backward
        clip -> Adam

The loss of a pass is the plain sum over the trained tokens of weight * loss; the coordinator puts the
aggregation into the weights. Shapes: T packed tokens, N trained tokens of a microbatch, V vocabulary.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from agentgym.algorithm_config import AlgorithmConfig
from agentgym_trainers.losses.kl import kl_estimate
from agentgym_trainers.losses.menu import token_loss
from agentgym_trainers.losses.terms import Stats, TokenTerms
from agentgym_trainers.megatron.forward import log_distributions, of_targets
from agentgym_trainers.megatron.microbatch import Microbatch
from agentgym_trainers.megatron.optimizer import Optimizer
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
    fixed: list[TokenTerms] = []  # per microbatch: what the updates have in common
    for update in range(settings.updates):
        optimizer.zero_grad()
        for number, microbatch in enumerate(microbatches):
            logprobs, entropy = forward(model, replay, microbatch, temperature)
            if update == 0:
                asked = None if reference is None else reference.logprobs(microbatch, temperature)
                fixed.append(_before(microbatch, logprobs.detach(), entropy.detach(), asked, algorithm))
                tally.add_first(microbatch, logprobs, entropy)
            terms = replace(fixed[number], logprobs=logprobs, entropy=entropy)
            per_token, stats = token_loss(settings.loss, terms, algorithm)
            loss = (microbatch.weights * per_token).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            replay.clear()
            tally.add(loss, stats)
        tally.grad_norms.append(optimizer.step(settings.learning_rate))
    return tally.metrics(microbatches, settings, time.perf_counter() - started)


def forward(
    model: GPTModel, replay: ReplayController, microbatch: Microbatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the log-probability [N] of each trained token and the entropy [N] of its distribution."""
    with replay.forward(microbatch.routes):
        log_softmax = log_distributions(model, microbatch, temperature)  # (N, V)
    entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
    return of_targets(log_softmax, microbatch), entropy


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
    """Sums over the microbatches of a step.

    `loss`, `grad_norm`, `kl_rollout` (k3), `kl_rollout_k1` and the shares are means over all updates;
    `entropy` and `mismatch` are of the first one, when the weights are still those that the batch is dated
    by. `mismatch` is the mean of |log pi_theta - log mu| over the tokens sampled by exactly these weights (it
    is the difference between the two engines alone), `mismatch_all` over all trained tokens (age included).
    """

    compares_rollout: bool
    """False for supervised steps, whose tokens no policy server sampled."""
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    ratio_max: float = 0.0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)

    def add_first(self, microbatch: Microbatch, logprobs: Tensor, entropy: Tensor) -> None:
        """Count what is measured before the first update."""
        self._mean("entropy", entropy.detach())
        if self.compares_rollout:
            difference = (logprobs.detach() - microbatch.rollout).abs()
            self._mean("mismatch_all", difference)
            self._mean("mismatch", difference[microbatch.current])
            if len(difference):
                self.sums["mismatch_max"] = max(self.sums["mismatch_max"], difference.max().item())

    def add(self, loss: Tensor, stats: Stats) -> None:
        """Count one microbatch of one update."""
        self.losses.append(loss.item())
        for name, per_token in stats.items():
            self._mean(name, per_token)
        if "ratio" in stats and len(stats["ratio"]):
            self.ratio_max = max(self.ratio_max, stats["ratio"].max().item())

    def metrics(self, microbatches: Sequence[Microbatch], settings: StepSettings, seconds: float) -> Metrics:
        """Return the numbers of the step."""
        tokens = sum(microbatch.tokens.numel() for microbatch in microbatches)
        metrics = {
            name: total / self.counts[name] if name in self.counts else total
            for name, total in self.sums.items()
        }
        if "ratio" in metrics:
            metrics["ratio_max"] = self.ratio_max
        covered = sum(microbatch.route_coverage * microbatch.tokens.numel() for microbatch in microbatches)
        return metrics | {
            "loss": sum(self.losses) / settings.updates,
            "grad_norm": sum(self.grad_norms) / settings.updates,
            "learning_rate": settings.learning_rate,
            "route_coverage": covered / max(tokens, 1),
            "tokens": float(tokens),
            "tokens_trained": float(sum(microbatch.targets.numel() for microbatch in microbatches)),
            "seconds": seconds,
        }

    def _mean(self, name: str, per_token: Tensor) -> None:
        if len(per_token):
            self.sums[name] += per_token.sum().item()
            self.counts[name] += len(per_token)
