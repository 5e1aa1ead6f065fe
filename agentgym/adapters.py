"""Files of low-rank adapters: what a trainer of adapters sends in place of the weights.

For each adapted tensor NAME.weight [out, in] of a model folder, such a safetensors file has NAME.lora_A.weight
[rank, in] and NAME.lora_B.weight [out, rank]; its metadata has the scale, and a fingerprint of the folder's weights.
What they stand for is W + scale * B A.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from safetensors import safe_open

from agentgym.errors import ModelError
from agentgym.model import weight_files

DOWN, UP = ".lora_A.weight", ".lora_B.weight"
"""What the names of A and B have in place of ".weight"."""
SCALE, BASE = "lora_scale", "lora_base"
"""The keys of the metadata."""
SAMPLE = 256
"""Bytes of each tensor that its fingerprint looks at."""


def merged(weight: Any, down: Any, up: Any, scale: float) -> Any:
    """Return W + scale * B A as float32 [out, in], for the tensors W [out, in], A [rank, in] and B [out, rank]."""
    return weight.float() + scale * (up.float() @ down.float())


def adapter_metadata(scale: float, model: Path) -> dict[str, str]:
    """Return what a file of adapters for the weights of a model folder says of itself."""
    return {SCALE: repr(scale), BASE: fingerprint(model)}


def adapter_scale(path: Path) -> float | None:
    """Return the scale of a file of adapters; None for any other file, and for a folder."""
    value = _metadata(path).get(SCALE)
    return None if value is None else float(value)


def check_adapters(
    path: Path, found: Mapping[str, Sequence[int]], weights: Mapping[str, Sequence[int]]
) -> None:
    """Raise ModelError unless the tensors of a file, given by their shapes, are pairs of adapters for these weights."""
    for name in found:
        stem = name.removesuffix(DOWN).removesuffix(UP)
        down, up = found.get(stem + DOWN), found.get(stem + UP)
        base = weights.get(stem + ".weight")
        if name == stem or base is None:
            raise ModelError(f"{path} has {name}, which adapts no matrix of this model; the old weights stay")
        if down is None or up is None or [up[0], down[1]] != list(base) or down[0] != up[1]:
            raise ModelError(
                f"{path} has A {down} and B {up} for {stem}.weight {list(base)}, which do not fit; the old weights stay"
            )


def check_base(path: Path, model: Path) -> None:
    """Raise ModelError unless a file of adapters was trained beside the weights that a model folder has now."""
    if _metadata(path).get(BASE) != fingerprint(model):
        raise ModelError(
            f"{path} was trained beside other weights than {model} has now; give the run the folder that it began with"
        )


def fingerprint(model: Path) -> str:
    """Return a checksum of the names, types and shapes of a folder's weights, and of the beginning of each.

    Raises:
        ModelError: a file is missing.
    """
    found = []
    for path in weight_files(model):
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                for name, entry in json.loads(file.read(size)).items():
                    if name != "__metadata__":
                        start, end = entry["data_offsets"]
                        file.seek(8 + size + start)
                        sample = crc32(file.read(min(end - start, SAMPLE)))
                        found.append((name, entry["dtype"], entry["shape"], sample))
        except OSError as error:
            raise ModelError(
                f"cannot read {path}: {error.strerror}; the adapters belong to its weights"
            ) from error
    return f"{crc32(json.dumps(sorted(found)).encode()):08x}"


def _metadata(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    with safe_open(path, "np") as opened:
        return opened.metadata() or {}
