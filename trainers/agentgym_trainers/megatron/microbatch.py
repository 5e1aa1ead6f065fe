"""Samples, packed into the tensors of one forward and backward pass.

The sequences lie one after the other without padding. The logits of a position are about the next token of
the same sequence, so a trained token at position t is read from row t - 1.

Shapes: T packed tokens, N trained tokens among them, L MoE layers, k experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.batch import Sample
from agentgym.errors import IntegrityError
from agentgym_trainers.losses.terms import Owners
from agentgym_trainers.megatron.replay import ReplayController, coverage
from agentgym_trainers.megatron.sequences import PackedSequences, pack_sequences


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The tensors of one pass, on the model's device."""

    tokens: Tensor
    """int64 [1, T]."""
    positions: Tensor
    """int64 [1, T], counted inside each sequence."""
    sequences: PackedSequences
    rows: Tensor
    """int64 [N]: where the logits about each trained token are."""
    targets: Tensor
    """int64 [N]: the trained tokens."""
    rollout: Tensor
    """float32 [N]: their log-probabilities from the policy server."""
    advantages: Tensor
    """float32 [N]."""
    weights: Tensor
    """float32 [N]."""
    owners: Owners
    """Which sample each trained token is of."""
    current: Tensor
    """bool [N]: sampled by the version that is trained now."""
    routes: Tensor | None
    """int64 [L, T, k] as `ReplayController.check` makes them; None: native routing."""
    route_coverage: float
    """Share of the routes that are there, of those that can matter to the loss."""


def build_microbatch(
    samples: Sequence[Sample], version: int, replay: ReplayController | None, device: torch.device
) -> Microbatch:
    """Pack samples in the given order.

    `version` is that of the weights that are trained. Routes are ignored without `replay`, and for dense
    models.

    Raises:
        IntegrityError: a sample's first token is to be trained, which nothing predicts; or its routes are
        wrong.
    """
    lengths = [len(sample.tokens) for sample in samples]
    for sample in samples:
        if sample.loss_mask[:1].any():
            raise IntegrityError("the first token of a sample is to be trained, but nothing comes before it")
    tokens = torch.from_numpy(np.concatenate([sample.tokens for sample in samples]).astype(np.int64))
    trained = np.concatenate([sample.loss_mask for sample in samples]).nonzero()[0]  # (N,)
    routes, covered = _routes(samples, replay)

    def take(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(sample, name) for sample in samples])[trained]).to(
            device
        )

    return Microbatch(
        tokens=tokens[None].to(device),
        positions=torch.cat([torch.arange(length) for length in lengths])[None].to(device),
        sequences=pack_sequences(lengths, device),
        rows=torch.from_numpy(trained - 1).to(device),
        targets=tokens[torch.from_numpy(trained)].to(device),
        rollout=take("logprobs"),
        advantages=take("advantages"),
        weights=take("weights"),
        owners=Owners(
            torch.from_numpy(np.repeat(range(len(samples)), lengths)[trained]).to(device), len(samples)
        ),
        current=take("versions") == version,
        routes=None if routes is None else routes.to(device),
        route_coverage=covered,
    )


def _routes(samples: Sequence[Sample], replay: ReplayController | None) -> tuple[Tensor | None, float]:
    if replay is None or replay.layers == 0:
        return None, 0.0
    present = [sample.routes for sample in samples if sample.routes is not None]
    if not present:
        return None, 0.0
    if len(present) != len(samples):
        raise IntegrityError(
            f"{len(samples) - len(present)} of {len(samples)} samples have no routes, the others have"
        )
    routes = np.concatenate(present)
    return replay.check(routes, sum(len(sample.tokens) for sample in samples)), coverage(
        routes, _fed(samples)
    )


def _fed(samples: Sequence[Sample]) -> NDArray[np.bool_]:
    """Mark the tokens [T] that something is predicted from: all but the last of each sequence."""
    fed = np.ones(sum(len(sample.tokens) for sample in samples), dtype=np.bool_)
    fed[np.cumsum([len(sample.tokens) for sample in samples]) - 1] = False
    return fed
