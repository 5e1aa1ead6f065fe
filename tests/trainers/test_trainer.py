import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from trainer_builders import HELD, batch_of, read_hf_model, samples_of, train, trainer_of

from agentgym.errors import IntegrityError, ModelError
from agentgym_trainers.megatron import checkpoint
from agentgym_trainers.megatron.convert import read_safetensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_equals_one_that_was_never_stopped(
    hf_model: Callable[..., Path], tmp_path: Path, dtype: str
):
    whole = trainer_of(tmp_path, hf_model("Qwen3Moe"), dtype=dtype)
    train(whole, 1)
    saved = Path(train(whole, 2, checkpoint=True).checkpoint)
    metrics = [train(whole, step).metrics for step in (3, 4)]
    resumed = trainer_of(tmp_path, hf_model("Qwen3Moe"), resume=saved, dtype=dtype)
    assert resumed.step == 2
    again = [train(resumed, step).metrics for step in (3, 4)]
    expected, found = whole.weights(), resumed.weights()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [{**one, "seconds": 0} for one in metrics] == [{**one, "seconds": 0} for one in again]


def test_only_tokens_of_the_weights_before_the_step_count_as_mismatch(
    hf_model: Callable[..., Path], tmp_path: Path
):
    trainer = trainer_of(tmp_path, hf_model("Qwen3Moe"))  # the samples are of version 0
    assert "mismatch" in train(trainer, 1).metrics
    later = train(trainer, 2).metrics
    assert "mismatch" not in later
    assert "mismatch_all" in later


def test_whose_routes_are_replayed_is_a_setting(hf_model: Callable[..., Path], tmp_path: Path):
    found = {}
    for whose in ("rollout", "trainer", "off"):
        trainer = trainer_of(tmp_path, hf_model("Qwen3Moe"), router_replay=whose)
        found[whose] = train(trainer, 1, learning_rate=0.1).metrics
    rollout, own, native = found.values()
    assert [metrics["route_coverage"] for metrics in (rollout, own, native)] == [1, 0, 0]
    assert own["mismatch_all"] == native["mismatch_all"] != rollout["mismatch_all"]  # before the first update
    assert own["loss"] != native["loss"]  # the mean of both


def test_published_weights_are_those_of_the_version_in_their_name(
    hf_model: Callable[..., Path], tmp_path: Path
):
    trainer = trainer_of(tmp_path, hf_model("Qwen3Moe"))
    assert train(trainer, 1).weights == ""
    done = train(trainer, 2, publish=True)
    assert done.weights == str(tmp_path / "exchange/weights-2.safetensors")
    published = read_safetensors(tmp_path / "exchange")
    assert all(torch.equal(published[name], tensor) for name, tensor in trainer.weights().items())
    assert [path.name for path in (tmp_path / "exchange").iterdir()] == ["weights-2.safetensors"]


def test_a_checkpoint_is_a_model_folder_that_transformers_loads(
    hf_model: Callable[..., Path], tmp_path: Path
):
    trainer = trainer_of(tmp_path, hf_model("Llama", True))
    saved = Path(train(trainer, 1, checkpoint=True, state={"seen": 3}).checkpoint)
    loaded = read_hf_model(saved / "model").state_dict()
    expected = trainer.weights()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert json.loads((saved / "coordinator.json").read_text()) == {"seen": 3}
    assert not [path for path in saved.rglob("*") if path.suffix in (".pkl", ".pt", ".bin")]


def test_the_newest_checkpoints_are_kept_and_latest_names_the_last(
    hf_model: Callable[..., Path], tmp_path: Path
):
    trainer = trainer_of(tmp_path, hf_model("Qwen3"), keep_checkpoints=2)
    folder = tmp_path / "checkpoints"
    assert checkpoint.latest_checkpoint(folder) is None
    abandoned = folder / ".step-000001.99.partial"
    abandoned.mkdir(parents=True)
    for step in (1, 2, 3):
        train(trainer, step, checkpoint=True)
        assert checkpoint.latest_checkpoint(folder) == folder / f"step-{step:06d}"
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-000002", "step-000003"]


def test_checkpoints_of_a_run_that_was_left_make_way(hf_model: Callable[..., Path], tmp_path: Path):
    left = trainer_of(tmp_path, hf_model("Qwen3"), keep_checkpoints=4)
    saved = [Path(train(left, step, checkpoint=True).checkpoint) for step in (1, 2, 3)]
    resumed = trainer_of(tmp_path, hf_model("Qwen3"), resume=saved[0], keep_checkpoints=4)
    train(resumed, 2, checkpoint=True, learning_rate=0.1)
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-000001", "step-000002"]
    assert checkpoint.latest_checkpoint(folder) == folder / "step-000002"
    written, expected = read_safetensors(folder / "step-000002/model"), resumed.weights()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_a_checkpoint_of_another_model_is_refused(hf_model: Callable[..., Path], tmp_path: Path):
    trainer = trainer_of(tmp_path, hf_model("Qwen3"))
    saved = Path(train(trainer, 1, checkpoint=True).checkpoint)
    (saved / "optimizer.safetensors").unlink()
    save_file({"exp_avg.other": torch.ones(2)}, saved / "optimizer.safetensors")
    with pytest.raises(ModelError, match="does not fit the model"):
        trainer_of(tmp_path, hf_model("Qwen3"), resume=saved)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match="is not a checkpoint"):
        checkpoint.read_progress(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokens", "logprobs", "versions", "routes", "sampled", "loss_mask", "advantages", "weights"]
)
def test_a_sample_that_was_changed_on_the_way_is_refused(
    hf_model: Callable[..., Path], tmp_path: Path, name: str
):
    trainer = trainer_of(tmp_path, hf_model("Qwen3Moe"))
    header, arrays = batch_of(samples_of((12, 7)))
    changed = arrays[name].copy()
    changed[15] = 1 - changed[15]
    with pytest.raises(IntegrityError, match=r"(sample 1 of step 1|of a batch).*changed on the way"):
        trainer.train(header, {**arrays, name: changed})
    assert trainer.step == 0


def test_tokens_that_the_coordinator_masked_by_age_are_not_trained(
    hf_model: Callable[..., Path], tmp_path: Path
):
    trainer = trainer_of(tmp_path, hf_model("Qwen3Moe"))
    samples = samples_of((12, 7))
    masked = [replace(sample, loss_mask=sample.loss_mask & (sample.advantages > 0)) for sample in samples]
    header, arrays = batch_of(masked)
    metrics = trainer.train(header, arrays).metrics
    assert metrics["tokens_trained"] == sum(sample.loss_mask.sum() for sample in masked)


@pytest.mark.parametrize("microbatches", [[[0]], [[0, 1], [1]], [[0, 1, 2]]])
def test_microbatches_that_do_not_name_each_sample_once_are_refused(
    hf_model: Callable[..., Path], tmp_path: Path, microbatches: list[list[int]]
):
    header, arrays = batch_of(samples_of((12, 7)), microbatches=microbatches)
    with pytest.raises(IntegrityError, match="microbatches"):
        trainer_of(tmp_path, hf_model("Qwen3")).train(header, arrays)


def test_a_batch_of_another_step_is_refused(hf_model: Callable[..., Path], tmp_path: Path):
    header, arrays = batch_of(samples_of((12,)), step=5)
    with pytest.raises(IntegrityError, match="step 5 after step 0"):
        trainer_of(tmp_path, hf_model("Qwen3")).train(header, arrays)


def test_the_reference_is_what_the_warm_up_made_and_a_resumed_run_has_the_same(
    hf_model: Callable[..., Path], tmp_path: Path
):
    whole = trainer_of(tmp_path, hf_model("Qwen3"), sections=HELD)
    for step in (1, 2):
        train(whole, step, loss="sft")
    begun = {name: tensor.clone() for name, tensor in whole.weights().items()}
    first = train(whole, 3, checkpoint=True)
    assert first.metrics["kl_reference"] < 0.1
    kept = read_safetensors(tmp_path / "checkpoints/reference")
    assert all(torch.equal(kept[name], tensor) for name, tensor in begun.items())
    metrics = [train(whole, step).metrics for step in (4, 5)]
    resumed = trainer_of(tmp_path, hf_model("Qwen3"), resume=Path(first.checkpoint), sections=HELD)
    again = [train(resumed, step).metrics for step in (4, 5)]
    assert [one["kl_reference"] for one in again] == [one["kl_reference"] for one in metrics]
    assert all(torch.equal(resumed.weights()[name], tensor) for name, tensor in whole.weights().items())


def test_without_a_warm_up_the_reference_is_the_runs_model(hf_model: Callable[..., Path], tmp_path: Path):
    sections = {"algorithm": {"kl_reference_coefficient": 0.1}}
    trainer = trainer_of(tmp_path, hf_model("Qwen3"), sections=sections)
    assert (
        0 < train(trainer, 1).metrics["kl_reference"] < 0.2
    )  # the mean of two updates; before the first it is 0
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_that_began_without_a_reference_has_none_later(hf_model: Callable[..., Path], tmp_path: Path):
    plain = trainer_of(tmp_path, hf_model("Qwen3"))
    saved = [Path(train(plain, step, checkpoint=True).checkpoint) for step in (1, 2, 3)]
    resumed = trainer_of(tmp_path, hf_model("Qwen3"), resume=saved[2], sections=HELD)
    with pytest.raises(ModelError, match=r"reference is missing: .*kl_reference_coefficient; set it to 0"):
        train(resumed, 4)
    assert resumed.step == 3
