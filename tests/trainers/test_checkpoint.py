"""Checkpoints on a disk that is full."""

import json
from pathlib import Path

import pytest
import torch
from full_disk import files_end_at
from safetensors.torch import load_file

from agentgym_trainers.megatron.checkpoint import (
    latest_checkpoint,
    read_optimizer,
    read_progress,
    save_checkpoint,
    write_weights,
)
from agentgym_trainers.megatron.export import Stream

WEIGHTS = {"embedding": torch.arange(50_000, dtype=torch.float32)}
OPTIMIZER = {"moments": torch.ones(100_000)}


def stream_of(tensors: dict[str, torch.Tensor]) -> Stream:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Stream(shapes, torch.float32, iter(tensors.items()))


def save(folder: Path, step: int) -> Path:
    model = folder / "base"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    return save_checkpoint(
        folder / "checkpoints",
        step,
        weights=stream_of(WEIGHTS),
        optimizer=stream_of(OPTIMIZER),
        updates=7,
        coordinator={"step": step},
        model_folder=model,
        keep=2,
    )


@pytest.mark.parametrize("size", [100_000, 300_000], ids=["in the model", "in the optimizer"])
def test_a_checkpoint_that_does_not_fit_leaves_the_older_one_as_it_is(tmp_path: Path, size: int):
    first = save(tmp_path, 3)
    with files_end_at(size), pytest.raises(OSError, match="File too large"):
        save(tmp_path, 6)
    assert [path.name for path in (tmp_path / "checkpoints").glob("*step*")] == ["step-000003"]
    assert latest_checkpoint(tmp_path / "checkpoints") == first
    assert read_progress(first) == (3, 7)
    assert torch.equal(read_optimizer(first)["moments"], OPTIMIZER["moments"])
    # When there is room again, the next one takes its place.
    assert latest_checkpoint(tmp_path / "checkpoints") == first != save(tmp_path, 6)
    newest = latest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None
    assert json.loads((newest / "coordinator.json").read_text()) == {"step": 6}


def test_weights_that_do_not_fit_leave_nothing_behind(tmp_path: Path):
    with files_end_at(100_000), pytest.raises(OSError, match="File too large"):
        write_weights(tmp_path / "weights-1.safetensors", stream_of(WEIGHTS))
    assert list(tmp_path.iterdir()) == []
    write_weights(tmp_path / "weights-1.safetensors", stream_of(WEIGHTS))
    assert torch.equal(load_file(tmp_path / "weights-1.safetensors")["embedding"], WEIGHTS["embedding"])
