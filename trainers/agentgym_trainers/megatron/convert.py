"""Weights between Hugging Face's names on disk and megatron-core's, bit for bit.

    q_proj, k_proj, v_proj          -> self_attention.linear_qkv, per group: its queries, its key, its value
    gate_proj, up_proj              -> linear_fc1 (one above the other)
    down_proj                       -> linear_fc2
    mlp.gate                        -> mlp.router

Mixtral calls the last four block_sparse_moe.experts.N.w1, w3 and w2, and block_sparse_moe.gate.

Each entry of `layout` is one megatron-core parameter, the Hugging Face tensors it is made of, and the two
functions between them, so that both directions come from the same table.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from safetensors import safe_open
from torch import Tensor

from agentgym.errors import ModelError


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter of the megatron-core model."""

    parameter: str
    sources: tuple[str, ...]
    """The Hugging Face tensors it holds."""
    join: Callable[[tuple[Tensor, ...]], Tensor]
    split: Callable[[Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class MoeNames:
    """What an architecture calls the parts of a layer with experts."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


MOE_NAMES = {"MixtralForCausalLM": MoeNames("block_sparse_moe", "w1", "w3", "w2")}
"""By architecture; the others say it as `MoeNames` does by default."""


def layout(model: GPTModel) -> Iterator[Entry]:
    """Yield how each parameter of the model is made of Hugging Face tensors."""
    config, names = model.config, MOE_NAMES.get(model.architecture, MoeNames())
    yield _same("embedding.word_embeddings.weight", "model.embed_tokens.weight")
    for number in range(config.num_layers):
        ours, theirs = f"decoder.layers.{number}.", f"model.layers.{number}."
        yield _same(ours + "input_layernorm.weight", theirs + "input_layernorm.weight")
        yield _qkv(ours, theirs, config.num_query_groups, config.kv_channels)
        yield _same(ours + "self_attention.linear_proj.weight", theirs + "self_attn.o_proj.weight")
        if config.qk_layernorm:
            for letter in "qk":
                yield _same(
                    f"{ours}self_attention.{letter}_layernorm.weight",
                    f"{theirs}self_attn.{letter}_norm.weight",
                )
        yield _same(ours + "pre_mlp_layernorm.weight", theirs + "post_attention_layernorm.weight")
        if config.num_moe_experts:
            yield _same(ours + "mlp.router.weight", f"{theirs}{names.block}.gate.weight")
            for expert in range(config.num_moe_experts):
                yield from _mlp(
                    f"{ours}mlp.experts.local_experts.{expert}.",
                    f"{theirs}{names.block}.experts.{expert}.",
                    names,
                )
        else:
            yield from _mlp(ours + "mlp.", theirs + "mlp.", names)
    yield _same("decoder.final_layernorm.weight", "model.norm.weight")
    if not model.share_embeddings_and_output_weights:
        yield _same("output_layer.weight", "lm_head.weight")


def load_hf(model: GPTModel, tensors: Mapping[str, Tensor]) -> None:
    """Fill the model from tensors with Hugging Face names, converted to the model's dtype.

    Raises:
        ModelError: a tensor is missing, has a wrong shape, or belongs to no part of the model.
    """
    parameters = dict(model.named_parameters())
    used: set[str] = set()
    for entry in layout(model):
        missing = [name for name in entry.sources if name not in tensors]
        if missing:
            raise ModelError(f"the weights lack {', '.join(missing)}; the folder is incomplete")
        target = parameters.pop(entry.parameter)
        try:
            joined = entry.join(tuple(tensors[name] for name in entry.sources))
            fits = joined.shape == target.shape
        except RuntimeError:  # torch could not even bring the parts together
            fits = False
        if not fits:
            shapes = {name: list(tensors[name].shape) for name in entry.sources}
            raise ModelError(
                f"{shapes} do not make up {entry.parameter} {list(target.shape)}; see config.json"
            )
        with torch.no_grad():
            target.copy_(joined)
        used.update(entry.sources)
    unused = tensors.keys() - used
    if model.share_embeddings_and_output_weights:
        unused -= {"lm_head.weight"}  # some folders keep the tied copy
    if parameters or unused:
        raise ModelError(
            f"weights without a place: {sorted(unused)[:3]}; "
            f"parameters without weights: {list(parameters)[:3]}"
        )


def iter_hf(model: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor) for all weights of the model, contiguous and without gradient."""
    parameters = dict(model.named_parameters())
    for entry in layout(model):
        for name, tensor in zip(
            entry.sources, entry.split(parameters[entry.parameter].detach()), strict=True
        ):
            yield name, tensor.contiguous()


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the folder's `*.safetensors` files.

    Raises:
        ModelError: there is no such file.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no *.safetensors file; convert the model, or give the right folder")
    tensors: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 - not a mapping
    return tensors


def _same(parameter: str, source: str) -> Entry:
    return Entry(parameter, (source,), lambda parts: parts[0], lambda weight: (weight,))


def _mlp(ours: str, theirs: str, names: MoeNames) -> Iterator[Entry]:
    yield Entry(
        ours + "linear_fc1.weight",
        (f"{theirs}{names.gate}.weight", f"{theirs}{names.up}.weight"),
        torch.cat,
        lambda weight: weight.chunk(2),
    )
    yield _same(ours + "linear_fc2.weight", f"{theirs}{names.down}.weight")


def _qkv(ours: str, theirs: str, groups: int, head_dim: int) -> Entry:
    def join(parts: tuple[Tensor, ...]) -> Tensor:
        by_group = [part.view(groups, -1, head_dim, part.shape[-1]) for part in parts]
        return torch.cat(by_group, dim=1).flatten(0, 2)

    def split(weight: Tensor) -> tuple[Tensor, ...]:
        by_group = weight.view(groups, -1, head_dim, weight.shape[-1])
        queries = by_group.shape[1] - 2
        return tuple(part.flatten(0, 2) for part in torch.split(by_group, [queries, 1, 1], dim=1))

    return Entry(
        ours + "self_attention.linear_qkv.weight",
        tuple(f"{theirs}self_attn.{letter}_proj.weight" for letter in "qkv"),
        join,
        split,
    )
