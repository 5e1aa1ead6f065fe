"""Samples, packed into the tensors of one forward and backward pass.

The sequences lie one after the other without padding, but for one sequence of padding at the end where tensor-parallel
ranks could not divide the tokens evenly, or where there is no sample. The logits of a position are about the next token
of the same sequence, so a trained token at position t is read from row t - 1.

Shapes: T packed tokens, N trained tokens among them, L MoE layers, k experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.batch import SAMPLE_ARRAYS, Sample
from agentgym.episode import no_route
from agentgym.errors import IntegrityError
from agentgym_trainers.losses.terms import Owners
from agentgym_trainers.megatron.replay import FirstRoutes, ReplayController, coverage
from agentgym_trainers.megatron.sequences import PackedSequences, pack_sequences


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The tensors of one pass, on the model's device."""

    tokens: Tensor
    """int64 [1, T], padding included."""
    positions: Tensor
    """int64 [1, T], counted inside each sequence."""
    sequences: PackedSequences
    padding: int
    """Tokens at the end that belong to no sample."""
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
    routes: Tensor | FirstRoutes | None
    """int64 [L, T, k] as `ReplayController.check` makes them; None: native routing."""
    route_coverage: float
    """Share of the routes that are there, of those that can matter to the loss."""


def build_microbatch(
    samples: Sequence[Sample],
    version: int,
    replay: ReplayController | None,
    device: torch.device,
    *,
    max_age: int | None = None,
    multiple: int = 1,
) -> Microbatch:
    """Pack samples in the given order, and pad them to a multiple of `multiple` tokens.

    `version` is that of the weights that are trained. Routes are ignored without `replay`, and for dense models; those
    that are more than `max_age` versions old are as if they were missing. Without samples there is only padding, which
    trains nothing.

    Raises:
        IntegrityError: a sample's first token is to be trained, which nothing predicts; or its routes are
        wrong.
    """
    lengths = [len(sample.tokens) for sample in samples]
    for sample in samples:
        if sample.loss_mask[:1].any():
            raise IntegrityError("the first token of a sample is to be trained, but nothing comes before it")
    padding = -sum(lengths) % multiple if samples else multiple
    tokens = torch.from_numpy(np.pad(_joined(samples, "tokens").astype(np.int64), (0, padding)))
    trained = _joined(samples, "loss_mask").nonzero()[0]  # (N,)
    routes, covered = _routes(samples, version, replay, max_age, padding)
    sequences = [*lengths, padding] if padding else lengths

    def take(name: str) -> Tensor:
        return torch.from_numpy(_joined(samples, name)[trained]).to(device)

    return Microbatch(
        tokens=tokens[None].to(device),
        positions=torch.cat([torch.arange(length) for length in sequences])[None].to(device),
        sequences=pack_sequences(sequences, device),
        padding=padding,
        rows=torch.from_numpy(trained - 1).to(device),
        targets=tokens[torch.from_numpy(trained)].to(device),
        rollout=take("logprobs"),
        advantages=take("advantages"),
        weights=take("weights"),
        owners=Owners(
            torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)[trained]).to(device), len(samples)
        ),
        current=take("versions") == version,
        routes=None if routes is None else routes.to(device),
        route_coverage=covered,
    )


def _joined(samples: Sequence[Sample], name: str) -> NDArray[Any]:
    """Return one array of all samples, in its dtype even if there are none."""
    empty = np.zeros(0, SAMPLE_ARRAYS[name])
    return np.concatenate([empty, *(getattr(sample, name) for sample in samples)])


def _routes(
    samples: Sequence[Sample],
    version: int,
    replay: ReplayController | None,
    max_age: int | None,
    padding: int,
) -> tuple[Tensor | None, float]:
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
    if max_age is not None:
        sampled_by = np.concatenate([fed_at(sample.versions) for sample in samples])
        routes[version - sampled_by > max_age] = no_route(routes.dtype)
    covered = coverage(routes, _fed(samples))
    routes = np.concatenate(
        [routes, np.full((padding, *routes.shape[1:]), no_route(routes.dtype), routes.dtype)]
    )
    return replay.check(routes, len(routes)), covered


def fed_at(versions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the version [K] whose experts each token met: that which sampled the next sampled token.

    `versions` [K] are those of a sample, -1 on tokens that were not sampled. After the last sampled token it is -1.
    """
    after = np.append(versions[1:], np.int32(-1))
    places = np.where(after >= 0, np.arange(len(after)), len(after) - 1)
    return np.asarray(after[np.minimum.accumulate(places[::-1])[::-1]])


def _fed(samples: Sequence[Sample]) -> NDArray[np.bool_]:
    """Mark the tokens [T] that something is predicted from: all but the last of each sequence."""
    fed = np.ones(sum(len(sample.tokens) for sample in samples), dtype=np.bool_)
    fed[np.cumsum([len(sample.tokens) for sample in samples]) - 1] = False
    return fed
