"""What a step learns from: samples, packed into microbatches.

Shapes: B samples, K tokens of a sample, L MoE layers, k experts per token. The arrays of all samples are concatenated
along K (no padding): tokens int32, sampled bool, logprobs float32, versions int32, routes uint8|uint16 [sum K, L, k],
which the trainer reads where the episodes lie (`agentgym.origins`); loss_mask bool, advantages float32 and weights
float32, which the coordinator makes and sends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgym.episode import (
    PER_TOKEN,
    check_joined,
    checksum,
    joined,
    joined_routes,
    recorded_checksum,
)
from agentgym.errors import IntegrityError

SAMPLE_ARRAYS = PER_TOKEN | {"sampled": "bool", "advantages": "float32", "weights": "float32"}
"""The arrays [K] of every sample, and their dtypes."""
MADE_HERE = ("loss_mask", "advantages", "weights")
"""Those that the coordinator makes."""
RECORDED = {"tokens": "tokens", "sampled": "loss_mask", "logprobs": "logprobs", "versions": "versions"}
"""Those that the worker recorded, under its checksum, and what they are called in its trajectory."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory with what its tokens were worth. All arrays have K entries."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """True on the tokens that are trained: sampled, and not too old."""
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    routes: NDArray[np.unsignedinteger[Any]] | None
    """[K, L, k]; see `Trajectory.routes`."""
    advantages: NDArray[np.float32]
    weights: NDArray[np.float32]
    """The factor of a token's loss. The loss of a step is the plain sum over its tokens of weight * loss, so
    the weights hold the aggregation: 1/N each for a mean over the N trained tokens of the batch."""
    checksum: int
    """`Trajectory.checksum` from the worker, over the sampled mask before masking by age."""
    sampled: NDArray[np.bool_]
    """The worker's loss mask: true on every sampled token."""

    def verify(self) -> None:
        """Raise IntegrityError if the arrays are not what the worker recorded, or train what was not sampled."""
        found = recorded_checksum(self.tokens, self.sampled, self.logprobs, self.versions, self.routes)
        if found != self.checksum:
            raise IntegrityError(
                f"a trajectory of {len(self.tokens)} tokens has checksum {found:#010x}, its worker recorded "
                f"{self.checksum:#010x}: it was changed on the way"
            )
        if (self.loss_mask & ~self.sampled).any():
            raise IntegrityError(
                f"a trajectory of {len(self.tokens)} tokens trains tokens that were not sampled"
            )


def concatenate(samples: Sequence[Sample]) -> dict[str, NDArray[Any] | None]:
    """Return the arrays of a batch.

    Raises:
        IntegrityError: some samples have routes and others have none.
    """
    routed(samples)
    return {**joined(samples, SAMPLE_ARRAYS), "routes": joined_routes(samples)}


def routed(samples: Sequence[Sample]) -> bool:
    """Return whether samples have routes. Raises IntegrityError where some have and others have none."""
    count = sum(sample.routes is not None for sample in samples)
    if count not in (0, len(samples)):
        raise IntegrityError(
            f"{len(samples) - count} of {len(samples)} samples have no routes, the others have"
        )
    return count > 0


def sums(arrays: Mapping[str, NDArray[Any] | None]) -> dict[str, int]:
    """Return the checksums of the arrays of a batch message that the coordinator made."""
    return {name: checksum(arrays.get(name)) for name in MADE_HERE}


def check_sums(arrays: Mapping[str, NDArray[Any] | None], made: Mapping[str, int]) -> None:
    """Raise IntegrityError where such an array is not what the coordinator made."""
    found = sums(arrays)
    changed = [name for name in MADE_HERE if found[name] != made.get(name)]
    if changed:
        raise IntegrityError(
            f"{' and '.join(changed)} of a batch are not what the coordinator made: changed on the way"
        )


def split(arrays: dict[str, NDArray[Any]], lengths: Sequence[int], checksums: Sequence[int]) -> list[Sample]:
    """Return the samples in the arrays of a batch message.

    Raises:
        IntegrityError: an array is missing or the lengths do not add up.
    """
    if len(lengths) != len(checksums):
        raise IntegrityError(f"a batch of {len(lengths)} samples has {len(checksums)} checksums")
    total = sum(lengths)
    check_joined(arrays, SAMPLE_ARRAYS, total, routed=total if "routes" in arrays else 0)
    samples = []
    for length, end, crc in zip(lengths, np.cumsum(lengths), checksums, strict=True):
        part: dict[str, Any] = {name: array[end - length : end] for name, array in arrays.items()}
        samples.append(Sample(**{"routes": None, **part}, checksum=crc))
    return samples


def pack_microbatches(lengths: Sequence[int], max_tokens: int, ranks: int = 1) -> list[list[int]]:
    """Group sample indices so that no microbatch exceeds `max_tokens`, longest first (first fit, decreasing).

    A sample longer than `max_tokens` gets a microbatch of its own. With several data-parallel ranks each gets about as
    many tokens as the others, and as many microbatches, the last of which may be empty; `share_of` is their order.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for index in longest_first:
        rank = load.index(min(load))
        shares[rank].append(index)
        load[rank] += lengths[index]
    packed = [_first_fit(share, lengths, max_tokens) for share in shares]
    rounds = max(len(bins) for bins in packed)
    return [bins[turn] if turn < len(bins) else [] for turn in range(rounds) for bins in packed]


def share_of(rank: int, ranks: int, microbatches: Sequence[list[int]]) -> list[list[int]]:
    """Return the microbatches of a data-parallel rank: they are dealt out in turn, and all ranks get as many."""
    rounds = -(-len(microbatches) // ranks)
    mine = list(microbatches[rank::ranks])
    return mine + [[]] * (rounds - len(mine))


def _first_fit(indices: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in indices:
        for number, free in enumerate(room):
            if lengths[index] <= free:
                bins[number].append(index)
                room[number] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(max_tokens - lengths[index])
    return bins
