"""The weights of all ranks, one whole tensor after the other on rank 0, and safetensors files written as they come.

No rank ever holds more than its own part of the model and the tensor that is on its way.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from agentgym_trainers.megatron.convert import Entry, entries
from agentgym_trainers.megatron.lora import Merged, trained_entries
from agentgym_trainers.megatron.parallel import device, from_all

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
"""As safetensors call them."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Named tensors of one dtype that come one by one: on rank 0 all of them, elsewhere none.

    All ranks must run through `tensors` at the same time.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    tensors: Iterator[tuple[str, Tensor]]
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What a file says of them."""


def iter_hf(model: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) on rank 0, contiguous and without gradient; all ranks must iterate."""
    return stream_hf(model).tensors


def stream_hf(model: GPTModel) -> Stream:
    """Return what `iter_hf` yields with the shapes of all of it: the weights, with adapters in them.

    All ranks must call it.
    """
    return _stream(model, list(entries(model)), Merged(model), model.config.params_dtype)


def stream_trained(model: GPTModel, values: Mapping[str, Tensor] | None = None) -> Stream:
    """Return a tensor for each trained parameter, of the parameters' shapes; all ranks must call it.

    `values` are this rank's, by parameter; by default the parameters. Names are Hugging Face's, or those of
    `agentgym.adapters`.
    """
    if values is None:
        values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return _stream(model, list(trained_entries(model)), values, next(iter(values.values())).dtype)


def _stream(
    model: GPTModel, table: Sequence[Entry], values: Mapping[str, Tensor], dtype: torch.dtype
) -> Stream:
    parameters = dict(model.named_parameters())
    mine: dict[str, tuple[int, ...]] = {}
    for entry in table:
        if entry.here and not entry.copy:
            mine |= _whole_shapes(entry, parameters[entry.parameter].shape)
    everyone = from_all(mine)
    shapes: dict[str, tuple[int, ...]] = {}
    owners: dict[str, int] = {}
    for entry in table:
        for name in () if entry.copy else entry.sources:
            owners[name] = next(rank for rank, names in enumerate(everyone) if name in names)
            shapes[name] = tuple(everyone[owners[name]][name])
    return Stream(shapes, dtype, _tensors(table, values, shapes, owners, dtype))


def prefixed(streams: Mapping[str, Stream]) -> Stream:
    """Return streams of one dtype as one, in which names begin with the stream's own and a dot."""
    return Stream(
        {f"{key}.{name}": shape for key, stream in streams.items() for name, shape in stream.shapes.items()},
        next(iter(streams.values())).dtype,
        ((f"{key}.{name}", tensor) for key, stream in streams.items() for name, tensor in stream.tensors),
    )


def write_safetensors(path: Path, stream: Stream) -> None:
    """Write the file on rank 0, readable by this user only; the other ranks give their parts."""
    if dist.get_rank() != 0:
        for _ in stream.tensors:
            pass
        return
    size = torch.empty(0, dtype=stream.dtype).element_size()
    header: dict[str, object] = {"__metadata__": {"format": "pt", **stream.metadata}}
    end = 0
    for name, shape in stream.shapes.items():
        start, end = end, end + size * torch.Size(shape).numel()
        header[name] = {"dtype": DTYPES[stream.dtype], "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        path.chmod(0o600)
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for (name, tensor), expected in zip(stream.tensors, stream.shapes, strict=True):
            assert name == expected, f"{name} came in place of {expected}"
            file.write(tensor.cpu().view(torch.uint8).numpy().data)


def _whole_shapes(entry: Entry, mine: Sequence[int]) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for name, piece in zip(entry.sources, entry.split(torch.empty(mine, device="meta")), strict=True):
        shape = list(piece.shape)
        if entry.axis is not None:
            shape[entry.axis] = shape[entry.axis] * entry.group.size() - entry.padding
        shapes[name] = tuple(shape)
    return shapes


def _tensors(
    table: Sequence[Entry],
    values: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    owners: Mapping[str, int],
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    rank = dist.get_rank()
    for entry in table:
        if entry.copy:
            continue
        owner = owners[entry.sources[0]]  # the first of the ranks among which the tensor is divided
        gathers = entry.here and owner in dist.get_process_group_ranks(entry.group)
        pieces = entry.split(values[entry.parameter]) if gathers else ()
        for number, name in enumerate(entry.sources):
            whole = _whole(entry, pieces[number].contiguous()) if gathers else None
            if owner != 0 and rank == 0:
                whole = torch.empty(shapes[name], dtype=dtype, device=device())
                dist.recv(whole, owner)
            elif owner == rank != 0 and whole is not None:
                dist.send(whole, 0)
            if rank == 0 and whole is not None:
                yield name, whole


def _whole(entry: Entry, piece: Tensor) -> Tensor:
    if entry.axis is None or entry.group.size() == 1:
        return piece
    pieces = [torch.empty_like(piece) for _ in range(entry.group.size())]
    dist.all_gather(pieces, piece, group=entry.group)
    whole = torch.cat(pieces, entry.axis)
    return whole.narrow(entry.axis, 0, whole.shape[entry.axis] - entry.padding)
