"""A mixture of experts from a dense model: sparse upcycling.

    upcycle(Path("models/dense"), Path("models/moe"), experts=4, top_k=2)

Every expert is a copy of the dense feed-forward network, the router is small and random, and the weights of the chosen
experts sum to 1. So the new model computes what the dense one does, until training makes its experts differ
(Komatsuzaki et al. 2022, https://arxiv.org/abs/2212.05055).

    LlamaForCausalLM  -> MixtralForCausalLM
    Qwen3ForCausalLM  -> Qwen3MoeForCausalLM

Tensors are copied as bytes from file to file, whatever their dtype and however large: nothing here needs torch. A
safetensors file is the length of its header, the header in JSON, and the tensors' bytes
(https://huggingface.co/docs/safetensors).
"""

import json
import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentgym.errors import ConfigError, ModelError
from agentgym.model import check_model, weight_files

ROUTER_STD = 0.02
"""Standard deviation of the router's random weights."""

_FEED_FORWARD = re.compile(r"model\.layers\.(\d+)\.mlp\.(gate_proj|up_proj|down_proj)\.weight")
_INDEX = "model.safetensors.index.json"


class _Tensor(NamedTuple):
    """A tensor of a file to be written: a piece of the dense model's file, or bytes of its own."""

    dtype: str
    shape: list[int]
    begin: int
    end: int
    own: bytes = b""

    @property
    def size(self) -> int:
        return len(self.own) or self.end - self.begin


@dataclass(frozen=True, slots=True)
class _Target:
    """What a dense architecture becomes."""

    fields: dict[str, Any]
    """Of config.json, new or changed."""
    block: str
    names: dict[str, str]
    """What the three matrices of an expert are called, by their dense names."""


def upcycle(source: Path, target: Path, *, experts: int, top_k: int, seed: int = 1) -> None:
    """Write the mixture of experts that a dense model folder becomes into a new or empty folder.

    Args:
        source: the dense model, a Hugging Face folder.
        target: where to write.
        experts: of every layer, at least 2.
        top_k: experts for each token, at most `experts`.
        seed: of the router's random weights.

    Raises:
        ConfigError: the numbers do not fit together, or the target is not empty.
        ModelError: the source is not a complete model folder, or of another architecture.
    """
    info = check_model(source)
    if not 1 <= top_k <= experts or experts < 2:
        raise ConfigError(
            f"{experts} experts of which {top_k} are chosen: use at least 2, and choose at most all"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not an empty folder; name a new one")
    config = json.loads((source / "config.json").read_text())
    made = _target(info.architecture, config, experts, top_k, source)
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name not in ("config.json", _INDEX):
            shutil.copyfile(path, target / path.name)
    (target / "config.json").write_text(json.dumps(config | made.fields, indent=2) + "\n")
    rng = np.random.default_rng(seed)
    places: dict[str, str] = {}
    for path in weight_files(source):
        places |= dict.fromkeys(_write(path, target / path.name, made, experts, rng), path.name)
    if (source / _INDEX).is_file():
        (target / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}, indent=2) + "\n")


def _target(architecture: str, config: dict[str, Any], experts: int, top_k: int, source: Path) -> _Target:
    if architecture == "LlamaForCausalLM":
        fields = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": experts,
                  "sliding_window": None}  # fmt: skip
        block, names = "block_sparse_moe", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    elif architecture == "Qwen3ForCausalLM":
        fields = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": experts,
                  "moe_intermediate_size": config["intermediate_size"], "norm_topk_prob": True,
                  "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
        block, names = "mlp", {name: name for name in ("gate_proj", "up_proj", "down_proj")}
    else:
        raise ModelError(
            f"the model in {source} is a {architecture}; a LlamaForCausalLM or a Qwen3ForCausalLM can be upcycled"
        )
    return _Target({**fields, "num_experts_per_tok": top_k, "router_aux_loss_coef": 0.0}, block, names)


def _write(source: Path, target: Path, made: _Target, experts: int, rng: np.random.Generator) -> list[str]:
    """Write what becomes of a file of the dense model; return the names in it."""
    with source.open("rb") as dense, target.open("wb") as moe:
        (length,) = struct.unpack("<Q", dense.read(8))
        header = json.loads(dense.read(length))
        tensors = dict(_grown(header, made, experts, rng))
        offset = 0
        described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, tensor in tensors.items():
            described[name] = {
                "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, offset + tensor.size]
            }  # fmt: skip
            offset += tensor.size
        text = json.dumps(described).encode()
        text += b" " * (-len(text) % 8)
        moe.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            dense.seek(8 + length + tensor.begin)
            moe.write(tensor.own or dense.read(tensor.size))
    return list(tensors)


def _grown(
    header: dict[str, Any], made: _Target, experts: int, rng: np.random.Generator
) -> Iterator[tuple[str, _Tensor]]:
    """Yield the tensors of the mixture that come from a file of the dense model."""
    for name, described in header.items():
        if name == "__metadata__":
            continue
        tensor = _Tensor(described["dtype"], described["shape"], *described["data_offsets"])
        found = _FEED_FORWARD.fullmatch(name)
        if found is None:
            yield name, tensor
            continue
        layer, matrix = found.groups()
        block = f"model.layers.{layer}.{made.block}"
        for expert in range(experts):
            yield f"{block}.experts.{expert}.{made.names[matrix]}.weight", tensor
        if matrix == "gate_proj":
            router = rng.standard_normal((experts, tensor.shape[1]), np.float32) * np.float32(ROUTER_STD)
            own = _as_bytes(router, tensor.dtype)
            yield f"{block}.gate.weight", _Tensor(tensor.dtype, list(router.shape), 0, 0, own)


def _as_bytes(values: NDArray[np.float32], dtype: str) -> bytes:
    """Return float32 values in a dtype of safetensors."""
    match dtype:
        case "F32":
            return values.tobytes()
        case "F16":
            return values.astype(np.float16).tobytes()
        case "BF16":  # the upper half of a float32
            return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    raise ModelError(f"the feed-forward weights are {dtype}; expected F32, F16 or BF16")
