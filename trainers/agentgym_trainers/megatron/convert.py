"""Weights between Hugging Face's names on disk and megatron-core's, bit for bit, in every parallel layout.

    q_proj, k_proj, v_proj          -> self_attention.linear_qkv, per group: its queries, its key, its value
    gate_proj, up_proj              -> linear_fc1 (one above the other)
    down_proj                       -> linear_fc2
    mlp.gate                        -> mlp.router

Mixtral calls the last four block_sparse_moe.experts.N.w1, w3 and w2, and block_sparse_moe.gate.

Each entry of `entries` is one megatron-core parameter, the Hugging Face tensors it is made of, and the two functions
between them, so that both directions come from the same table. With tensor parallelism each Hugging Face tensor is cut
along one axis, and a rank's parameter is made of its pieces.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from safetensors import safe_open
from torch import Tensor

from agentgym.errors import ModelError

ROWS, COLUMNS = 0, 1
ADAPTERS = (".lora_a", ".lora_b")
"""How the names of parameters end that are beside the model's own; see `lora`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter of the megatron-core model, on the ranks that have it."""

    parameter: str
    """Its name there."""
    sources: tuple[str, ...]
    """The Hugging Face tensors it holds."""
    axis: int | None = None
    """Along which tensor-parallel ranks divide each of the sources; None: all have the whole."""
    stage: int = 0
    """The pipeline stage that has it."""
    expert_rank: int | None = None
    """The expert-parallel rank that has it; None: all have it."""
    copy: bool = False
    """It holds again what another entry holds."""
    padding: int = 0
    """Rows of zeros behind the sources, so that the ranks can divide them evenly."""
    join: Callable[[tuple[Tensor, ...]], Tensor] = lambda parts: parts[0]
    split: Callable[[Tensor], tuple[Tensor, ...]] = lambda weight: (weight,)

    @property
    def here(self) -> bool:
        """Whether this rank has it."""
        mine = (None, parallel_state.get_expert_model_parallel_rank())
        return self.stage == parallel_state.get_pipeline_model_parallel_rank() and self.expert_rank in mine

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks among which this rank's copy is divided."""
        of_experts = parallel_state.get_expert_tensor_parallel_group()
        group: dist.ProcessGroup = (
            parallel_state.get_tensor_model_parallel_group() if self.expert_rank is None else of_experts
        )
        return group

    def piece(self, source: Tensor) -> Tensor:
        """Return this rank's piece of a whole source. Raises RuntimeError where it cannot be divided."""
        if self.axis is None or self.group.size() == 1:
            return source
        source = F.pad(source, (0, 0, 0, self.padding)) if self.padding else source
        if source.shape[self.axis] % self.group.size():
            raise RuntimeError(f"{list(source.shape)} cannot be divided among {self.group.size()} ranks")
        return source.chunk(self.group.size(), self.axis)[self.group.rank()]


@dataclass(frozen=True, slots=True)
class MoeNames:
    """What an architecture calls the parts of a layer with experts."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


MOE_NAMES = {"MixtralForCausalLM": MoeNames("block_sparse_moe", "w1", "w3", "w2")}
"""By architecture; the others say it as `MoeNames` does by default."""


def entries(model: GPTModel) -> Iterator[Entry]:
    """Yield how each parameter of the whole model is made of Hugging Face tensors, on all ranks in the same order."""
    config = model.config
    names = MOE_NAMES.get(model.architecture, MoeNames())
    stages = config.pipeline_model_parallel_size
    tied = model.share_embeddings_and_output_weights
    embedding = ("model.embed_tokens.weight",)
    padding = model.vocab_size - model.words
    yield Entry("embedding.word_embeddings.weight", embedding, ROWS, padding=padding)
    for number in range(config.num_layers):
        stage, local = divmod(number, config.num_layers // stages)
        yield from _layer(config, names, stage, f"decoder.layers.{local}.", f"model.layers.{number}.")
    yield Entry("decoder.final_layernorm.weight", ("model.norm.weight",), stage=stages - 1)
    if not tied:
        yield Entry("output_layer.weight", ("lm_head.weight",), ROWS, stages - 1, padding=padding)
    elif stages > 1:
        yield Entry("output_layer.weight", embedding, ROWS, stages - 1, copy=True, padding=padding)


def load_hf(model: GPTModel, tensors: Mapping[str, Tensor]) -> None:
    """Fill the model from tensors with Hugging Face names, converted to the model's dtype.

    Raises:
        ModelError: a tensor is missing, has a wrong shape, or belongs to no part of the model.
    """
    targets = {name: p for name, p in model.named_parameters() if not name.endswith(ADAPTERS)}
    used = fill(entries(model), targets, tensors)
    unused = tensors.keys() - used
    if model.share_embeddings_and_output_weights:
        unused -= {"lm_head.weight"}  # some folders keep the tied copy
    if unused:
        raise ModelError(f"weights without a place: {sorted(unused)[:3]}")


def fill(table: Iterable[Entry], targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> set[str]:
    """Fill this rank's tensors of a table, given by parameter, and return the names that the whole table uses.

    Raises:
        ModelError: a tensor is missing or has a wrong shape, or the table lacks a target.
    """
    left = dict(targets)
    used: set[str] = set()
    for entry in table:
        used.update(entry.sources)
        missing = [name for name in entry.sources if name not in tensors]
        if missing:
            raise ModelError(f"the weights lack {', '.join(missing)}; the folder is incomplete")
        if not entry.here:
            continue
        target = left.pop(entry.parameter)
        try:
            joined = entry.join(tuple(entry.piece(tensors[name]) for name in entry.sources))
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
    if left:
        raise ModelError(f"parameters without weights: {list(left)[:3]}")
    return used


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


def _layer(config: TransformerConfig, names: MoeNames, stage: int, ours: str, theirs: str) -> Iterator[Entry]:
    yield Entry(ours + "input_layernorm.weight", (theirs + "input_layernorm.weight",), stage=stage)
    groups = config.num_query_groups // config.tensor_model_parallel_size
    yield _qkv(stage, ours, theirs, groups, config.kv_channels)
    yield Entry(
        ours + "self_attention.linear_proj.weight", (theirs + "self_attn.o_proj.weight",), COLUMNS, stage
    )
    for letter in "qk" if config.qk_layernorm else "":
        norm = f"{theirs}self_attn.{letter}_norm.weight"
        yield Entry(f"{ours}self_attention.{letter}_layernorm.weight", (norm,), stage=stage)
    post_norm = theirs + "post_attention_layernorm.weight"
    yield Entry(ours + "pre_mlp_layernorm.weight", (post_norm,), stage=stage)
    if not config.num_moe_experts:
        yield from _mlp(stage, None, ours + "mlp.", theirs + "mlp.", names)
        return
    yield Entry(ours + "mlp.router.weight", (f"{theirs}{names.block}.gate.weight",), stage=stage)
    each = config.num_moe_experts // config.expert_model_parallel_size
    for expert in range(config.num_moe_experts):
        owner, local = divmod(expert, each)
        prefix = f"{ours}mlp.experts.local_experts.{local}."
        yield from _mlp(stage, owner, prefix, f"{theirs}{names.block}.experts.{expert}.", names)


def _mlp(stage: int, expert_rank: int | None, ours: str, theirs: str, names: MoeNames) -> Iterator[Entry]:
    yield Entry(
        ours + "linear_fc1.weight",
        (f"{theirs}{names.gate}.weight", f"{theirs}{names.up}.weight"),
        ROWS,
        stage,
        expert_rank,
        join=torch.cat,
        split=lambda weight: weight.chunk(2),
    )
    yield Entry(ours + "linear_fc2.weight", (f"{theirs}{names.down}.weight",), COLUMNS, stage, expert_rank)


def _qkv(stage: int, ours: str, theirs: str, groups: int, head_dim: int) -> Entry:
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
        ROWS,
        stage,
        join=join,
        split=split,
    )
