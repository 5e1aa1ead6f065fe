"""Low-rank adapters beside frozen matrices, in every parallel layout (LoRA: Hu et al. 2021, arXiv:2106.09685).

    y = W x + scale * B (A x)        scale = lora_alpha / lora_rank

W has no gradient and no optimizer state. At the start A is uniform within 1 / sqrt(in) and B is 0, so that the model
computes what it did. `linear_qkv` and `linear_fc1` hold several of Hugging Face's matrices one above the other; these
share A, and each has its rows of B.

Tensor-parallel ranks divide B where they divide the rows of W, and A where they divide its columns. The other matrix is
whole on all of them, and its gradient is the sum of what each has seen. Between A and B are rank numbers per token, so
sequence parallelism gathers and scatters these.

Shapes: T tokens on this rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor
from torch.nn import Parameter

from agentgym import adapters
from agentgym.errors import ModelError
from agentgym.trainer_config import TrainerConfig
from agentgym_trainers.megatron.convert import ADAPTERS, COLUMNS, ROWS, Entry, entries, fill

LINEARS = {"attention": ("linear_qkv", "linear_proj"), "mlp": ("linear_fc1", "linear_fc2")}
"""By what `trainer.lora_layers` may name: megatron-core's names of the matrices."""


class ColumnAdapter(ColumnParallelLinear):  # type: ignore[misc]
    """A matrix whose rows ranks divide, frozen, with an adapter."""

    def __init__(self, *sizes: int, rank: int, scale: float, **options: Any) -> None:
        """Take megatron-core's arguments, and the adapter's."""
        super().__init__(*sizes, **options)
        _add_adapter(self, rank, scale, whole="lora_a")

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return [..., out] of this rank for [..., in], and no bias."""
        out, bias = super().forward(input_, weight, runtime_gather_output)
        inner = F.linear(input_, self.lora_a)
        if self.sequence_parallel and not self.explicit_expert_comm:
            inner = gather_from_sequence_parallel_region(inner, group=self.tp_group)
        return out + self.scale * F.linear(inner, self.lora_b), bias


class RowAdapter(RowParallelLinear):  # type: ignore[misc]
    """A matrix whose columns ranks divide, frozen, with an adapter."""

    def __init__(self, *sizes: int, rank: int, scale: float, **options: Any) -> None:
        """Take megatron-core's arguments, and the adapter's."""
        super().__init__(*sizes, **options)
        _add_adapter(self, rank, scale, whole="lora_b")

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return [..., out] for this rank's part of [..., in], and no bias."""
        out, bias = super().forward(input_)
        inner = F.linear(input_, self.lora_a)
        if self.sequence_parallel and not self.explicit_expert_comm:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=self.tp_group)
        return out + self.scale * F.linear(inner, self.lora_b), bias


def _add_adapter(linear: Any, rank: int, scale: float, whole: str) -> None:
    rows, columns = linear.weight.shape
    linear.scale = scale
    linear.lora_a = Parameter(torch.zeros(rank, columns, dtype=linear.weight.dtype))
    linear.lora_b = Parameter(torch.zeros(rows, rank, dtype=linear.weight.dtype))
    for name in ("lora_a", "lora_b"):
        parameter: Any = getattr(linear, name)
        parameter.allreduce = linear.weight.allreduce
        parameter.tensor_model_parallel = name != whole
        # All have the whole of it, and each only a part of its gradient, as of a norm under sequence parallelism.
        parameter.sequence_parallel = name == whole


def add_adapters(layer: TransformerLayerSubmodules, config: TrainerConfig, shape: TransformerConfig) -> None:
    """Give the matrices of a layer's spec the adapters that the settings ask for.

    Raises:
        ModelError: the rank is more than one of the matrices has.
    """
    inner = {
        "attention": shape.kv_channels * shape.num_attention_heads,
        "mlp": shape.moe_ffn_hidden_size if shape.num_moe_experts else shape.ffn_hidden_size,
    }
    smallest = min(shape.hidden_size, *(inner[layers] for layers in config.lora_layers))
    if config.lora_rank > smallest:
        raise ModelError(
            f"trainer.lora_rank = {config.lora_rank} is more than an adapted matrix has ({smallest}); lower it, or "
            "train all weights with 0"
        )
    options = {"rank": config.lora_rank, "scale": config.lora_scale}
    column, row = ModuleSpec(ColumnAdapter, options), ModuleSpec(RowAdapter, options)
    if "attention" in config.lora_layers:
        attention = layer.self_attention.submodules
        attention.linear_qkv, attention.linear_proj = column, row
    if "mlp" in config.lora_layers:
        mlp = layer.mlp.submodules
        if hasattr(mlp, "experts"):
            mlp = mlp.experts.submodules
        mlp.linear_fc1, mlp.linear_fc2 = column, row


def freeze(model: GPTModel, config: TrainerConfig) -> None:
    """Leave nothing to train but the adapters of a model that was built with them."""
    model.adapted = {linear for layers in config.lora_layers for linear in LINEARS[layers]}
    model.lora_scale = config.lora_scale
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(ADAPTERS))
    if config.recompute and model.pre_process:
        # A layer that is computed again passes gradients on to its parameters only if its input wants one.
        model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())


def has_adapters(model: GPTModel) -> bool:
    """Say whether adapters are trained in place of the weights."""
    return bool(getattr(model, "adapted", ()))


def trained_entries(model: GPTModel) -> Iterator[Entry]:
    """Yield how each trained parameter of the whole model is made of tensors in files, everywhere in the same order."""
    for entry in entries(model):
        if not has_adapters(model):
            yield entry
        elif entry.parameter.split(".")[-2] in model.adapted:
            yield _down(entry)
            yield _up(entry)


def reset_adapters(model: GPTModel, seed: int) -> None:
    """Make every A random, by the seed and its name alone, and every B zero."""
    parameters = dict(model.named_parameters())
    for entry in trained_entries(model):
        if not entry.here:
            continue
        parameter = parameters[entry.parameter]
        value = torch.zeros_like(parameter)
        if entry.parameter.endswith(".lora_a"):
            linear = model.get_submodule(entry.parameter.rpartition(".")[0])
            generator = torch.Generator().manual_seed(
                ((seed << 32) + crc32(entry.sources[0].encode())) % 2**63
            )
            whole = torch.rand(len(parameter), linear.input_size, generator=generator)
            value = entry.piece((2 * whole - 1) / linear.input_size**0.5)
        with torch.no_grad():
            parameter.copy_(value)


def load_adapters(model: GPTModel, tensors: Mapping[str, Tensor]) -> None:
    """Fill the adapters from the tensors of a file.

    Raises:
        ModelError: a tensor is missing, has a wrong shape, or belongs to no adapter of the model.
    """
    targets = {name: p for name, p in model.named_parameters() if name.endswith(ADAPTERS)}
    unused = tensors.keys() - fill(trained_entries(model), targets, tensors)
    if unused:
        raise ModelError(f"adapters without a place: {sorted(unused)[:3]}; see trainer.lora_layers")


class Merged(Mapping[str, Tensor]):
    """This rank's weights by parameter, with the adapters in them; each is computed when it is asked for."""

    def __init__(self, model: GPTModel) -> None:
        """Look at the parameters as they are at that moment."""
        self._parameters: dict[str, Tensor] = dict(model.named_parameters())
        self._scale: float = getattr(model, "lora_scale", 0.0)

    def __getitem__(self, name: str) -> Tensor:
        """Return the weights of a parameter that is no adapter's."""
        weight, stem = self._parameters[name].detach(), name.removesuffix("weight")
        if stem + "lora_a" not in self._parameters:
            return weight
        down, up = (self._parameters[stem + part].detach() for part in ("lora_a", "lora_b"))
        return adapters.merged(weight, down, up, self._scale).to(weight.dtype)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return (name for name in self._parameters if not name.endswith(ADAPTERS))

    def __len__(self) -> int:
        """Return how many there are."""
        return sum(1 for _ in self)


def _down(entry: Entry) -> Entry:
    """A, which the matrices of an entry share."""
    count = len(entry.sources)
    return replace(
        entry,
        parameter=entry.parameter.removesuffix("weight") + "lora_a",
        sources=tuple(source.removesuffix(".weight") + adapters.DOWN for source in entry.sources),
        axis=COLUMNS if entry.axis == COLUMNS else None,
        join=lambda parts: parts[0],
        split=lambda matrix: (matrix,) * count,
    )


def _up(entry: Entry) -> Entry:
    """B, whose rows are arranged as those of the entry."""
    return replace(
        entry,
        parameter=entry.parameter.removesuffix("weight") + "lora_b",
        sources=tuple(source.removesuffix(".weight") + adapters.UP for source in entry.sources),
        axis=ROWS if entry.axis == ROWS else None,
    )
