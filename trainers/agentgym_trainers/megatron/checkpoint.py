"""Checkpoints: folders that are complete from the moment they have their name.

    CHECKPOINTS/step-000012/
        model/                   a Hugging Face folder: model.safetensors; config and tokenizer of the run's model
        adapters.safetensors     where adapters are trained: they alone; the model has them in its weights
        optimizer.safetensors    rng.safetensors
        trainer.json             format, step and updates
        coordinator.json         the coordinator's own state
    CHECKPOINTS/latest       the name of the newest folder
    CHECKPOINTS/reference/   where a loss asks for it: the model, or the adapters, that the steps began with

A checkpoint is written under another name, synced to the disk and renamed; `latest` moves after that. No file
can run code when it is read: tensors are safetensors, everything else is JSON.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentgym.errors import ModelError
from agentgym.segments import sync_path
from agentgym_trainers.megatron.export import Stream, write_safetensors

FORMAT = 2
LATEST = "latest"
MODEL = "model"
ADAPTERS = "adapters.safetensors"
REFERENCE = "reference"


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    weights: Stream,
    optimizer: Stream,
    adapters: Stream | None = None,
    updates: int,
    coordinator: Mapping[str, Any],
    model_folder: Path,
    keep: int,
) -> Path:
    """Write the checkpoint of a step, point `latest` at it and return its folder.

    Whatever the layout of the ranks, it holds whole tensors with Hugging Face's names, which any layout reads. Rank 0
    writes; all ranks must call it. `updates` are the optimizer's so far.

    All but the newest `keep` checkpoints up to this step are removed. Later ones are removed too: they are
    of a run that was left when it went on from before them.
    """
    if dist.get_rank() != 0:
        for stream in filter(None, (weights, adapters, optimizer)):
            write_safetensors(folder, stream)
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:06d}"
    partial = folder / f".{final.name}.{os.getpid()}.partial"
    partial.mkdir(mode=0o700)
    with _removed_on_failure(partial):
        _write_model(partial / MODEL, weights, model_folder)
        if adapters is not None:
            write_safetensors(partial / ADAPTERS, adapters)
        write_safetensors(partial / "optimizer.safetensors", optimizer)
        save_file({"cpu": torch.get_rng_state()}, partial / "rng.safetensors")
        (partial / "trainer.json").write_text(
            json.dumps({"format": FORMAT, "step": step, "updates": updates}) + "\n"
        )
        (partial / "coordinator.json").write_text(json.dumps(coordinator) + "\n")
        _sync_tree(partial)
    if final.exists():  # of a run that was left, see above
        final.rename(partial.with_suffix(".replaced"))
    partial.rename(final)
    sync_path(folder)
    _point_latest(folder, final.name)
    _remove_others(folder, final, keep)
    return final


def save_reference(folder: Path, weights: Stream, model_folder: Path | None) -> None:
    """Write what reinforcement learning begins with: a Hugging Face folder, or without `model_folder` the adapters.

    All ranks must call it, and find it complete when it returns.
    """
    if dist.get_rank() != 0:
        write_safetensors(folder, weights)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        final, partial = folder / REFERENCE, folder / f".{REFERENCE}.{os.getpid()}.partial"
        with _removed_on_failure(partial):
            if model_folder is None:
                partial.mkdir()
                write_safetensors(partial / ADAPTERS, weights)
            else:
                _write_model(partial, weights, model_folder)
            _sync_tree(partial)
        _remove(final)  # of a run that was left
        partial.rename(final)
        sync_path(folder)
    dist.barrier()


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, or None."""
    try:
        return folder / (folder / LATEST).read_text().strip()
    except FileNotFoundError:
        return None


def read_progress(checkpoint: Path) -> tuple[int, int]:
    """Return the step of a checkpoint, and the optimizer's updates until then.

    Raises:
        ModelError: it is not a checkpoint, or of another format.
    """
    try:
        fields = json.loads((checkpoint / "trainer.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{checkpoint} is not a checkpoint: {error}") from error
    if fields.get("format") != FORMAT:
        raise ModelError(f"{checkpoint} has format {fields.get('format')!r}; this version reads {FORMAT}")
    return int(fields["step"]), int(fields["updates"])


def read_optimizer(checkpoint: Path) -> dict[str, Tensor]:
    """Return the optimizer's tensors of a checkpoint."""
    return dict(load_file(checkpoint / "optimizer.safetensors"))


def read_adapters(folder: Path) -> dict[str, Tensor]:
    """Return the adapters of a checkpoint, or of the reference.

    Raises:
        ModelError: there are none.
    """
    path = folder / ADAPTERS
    if not path.is_file():
        raise ModelError(
            f"{folder} has no {ADAPTERS}: all weights were trained there; set trainer.lora_rank = 0"
        )
    return dict(load_file(path))


def restore_rng(checkpoint: Path) -> None:
    """Set torch's generator to where it was."""
    torch.set_rng_state(load_file(checkpoint / "rng.safetensors")["cpu"])


def write_weights(path: Path, weights: Stream) -> None:
    """Write a weights file that is complete from the moment it has its name, readable by this user only.

    Rank 0 writes; all ranks must call it.
    """
    if dist.get_rank() != 0:
        write_safetensors(path, weights)
        return
    partial = path.with_name(f".{path.name}.partial")
    with _removed_on_failure(partial):
        write_safetensors(partial, weights)
        partial.rename(path)


@contextlib.contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    """Give the space back where what was to be written did not fit."""
    with contextlib.ExitStack() as undo:
        undo.callback(_remove, path)
        yield
        undo.pop_all()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _write_model(folder: Path, weights: Stream, model_folder: Path) -> None:
    folder.mkdir()
    write_weights(folder / "model.safetensors", weights)
    for path in sorted(model_folder.iterdir()):
        # The index of a sharded model would name files that are not here.
        if path.suffix in (".json", ".jinja", ".txt", ".model") and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


def _point_latest(folder: Path, name: str) -> None:
    partial = folder / f".{LATEST}.partial"
    partial.write_text(name + "\n")
    sync_path(partial)
    partial.replace(folder / LATEST)
    sync_path(folder)


def _remove_others(folder: Path, newest: Path, keep: int) -> None:
    complete = sorted(folder.glob("step-*"))
    kept = complete[: complete.index(newest) + 1][-keep:]
    # Hidden ones are replaced, or of a process that was killed while it wrote.
    for path in [*complete, *folder.glob(".step-*")]:
        if path not in kept:
            shutil.rmtree(path)


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        sync_path(path)
    sync_path(folder)
