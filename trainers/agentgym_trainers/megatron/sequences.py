"""How sequences lie in a packed row of tokens, for megatron-core and for our attention.

Shapes: T tokens of all sequences, one after the other; n sequences of a bucket, padded to S tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar lengths (within a factor of 2), as a rectangle of tokens."""

    index: Tensor
    """int64 [n * S]: which packed token is in which place. Padding repeats the sequence's last token."""
    valid: Tensor
    """int64 [tokens of the bucket]: the places that are not padding, row by row."""
    rows: int
    """n."""

    def gather(self, packed: Tensor) -> Tensor:
        """Return [n, S, ...] for [T, ...]."""
        return packed.index_select(0, self.index).view(self.rows, -1, *packed.shape[1:])


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]
    """megatron-core's record of packed sequences, with the buckets for `SDPAttention`."""

    buckets: list[Bucket] = field(default_factory=list)
    order: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [T]: where each packed token is among the valid places of all buckets, bucket after bucket."""


def pack_sequences(lengths: Sequence[int], device: torch.device) -> PackedSequences:
    """Return the record for sequences of these lengths, packed in this order."""
    ends = torch.tensor(lengths).cumsum(0)
    starts = (ends - torch.tensor(lengths)).tolist()
    boundaries = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(device, torch.int32)
    grouped: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        grouped.setdefault(max(length - 1, 1).bit_length(), []).append(number)
    buckets = [
        _bucket([starts[i] for i in members], [lengths[i] for i in members], device)
        for members in grouped.values()
    ]
    placed = torch.cat([bucket.index[bucket.valid] for bucket in buckets])
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        buckets=buckets,
        order=placed.argsort(),
    )


def _bucket(starts: list[int], lengths: list[int], device: torch.device) -> Bucket:
    start, length = torch.tensor(starts)[:, None], torch.tensor(lengths)[:, None]
    place = torch.arange(max(lengths))[None]  # (1, S)
    index = start + torch.minimum(place, length - 1)  # (n, S)
    valid = (place < length).flatten().nonzero().flatten()
    return Bucket(index.flatten().to(device), valid.to(device), len(starts))
