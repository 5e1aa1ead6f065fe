"""Adapters: their gradients, what they are merged into, what is sent, kept and resumed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from trainer_builders import (
    CPU,
    HELD,
    Reference,
    randomize_adapters,
    relative_difference,
    samples_of,
    train,
    trainer_of,
)

from agentgym.adapters import DOWN, SCALE, UP, check_adapters
from agentgym.errors import ModelError
from agentgym.trainer_config import TrainerConfig
from agentgym_trainers.megatron import checkpoint
from agentgym_trainers.megatron.convert import load_hf, read_safetensors
from agentgym_trainers.megatron.export import iter_hf, stream_trained
from agentgym_trainers.megatron.lora import reset_adapters
from agentgym_trainers.megatron.microbatch import build_microbatch
from agentgym_trainers.megatron.model import build_model, read_config
from agentgym_trainers.megatron.pipeline import run_stage
from agentgym_trainers.megatron.predictions import words_of
from agentgym_trainers.megatron.reference import Reference as FrozenPolicy
from agentgym_trainers.megatron.replay import ReplayController
from agentgym_trainers.megatron.step import forward

LENGTHS = (13, 5, 22, 9)
SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Matrices with the same A."""
MIXTRAL = {"block_sparse_moe": "mlp", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
"""What transformers calls what Mixtral's files name otherwise."""


def adapted(folder: Path, **trainer: object):
    model = build_model(
        read_config(folder), torch.float32, CPU, TrainerConfig(lora_rank=4, lora_alpha=8.0, **trainer)
    )
    load_hf(model, read_safetensors(folder))
    reset_adapters(model, seed=3)
    return model


def folder_of(tensors: dict[str, Tensor], like: Path, folder: Path) -> Path:
    folder.mkdir()
    save_file({n: t.detach() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((like / "config.json").read_text())
    return folder


def merged_by_hand(
    weights: dict[str, Tensor], adapters: dict[str, Tensor], scale: float
) -> dict[str, Tensor]:
    merged = dict(weights)
    for name in weights:
        stem = name.removesuffix(".weight")
        if stem + DOWN in adapters:
            merged[name] = weights[name] + scale * adapters[stem + UP] @ adapters[stem + DOWN]
    return merged


def logits_of(model, samples) -> Tensor:
    return run_stage(model, build_microbatch(samples, 0, None, CPU))[:, 0] @ words_of(model).T


def shared_sum(gradients: dict[str, Tensor], name: str) -> Tensor:
    """The gradient of an A, over all matrices that have the same."""
    letters = name.removesuffix(DOWN).rpartition(".")[2]
    group = next((group for group in SHARED if letters in group), (letters,))
    return sum(gradients[name.replace(f".{letters}.", f".{other}.")] for other in group)  # type: ignore[return-value]


def in_transformers(name: str) -> str:
    for on_disk, module in MIXTRAL.items():
        name = name.replace(on_disk, module)
    return name


def test_new_adapters_change_nothing_and_leave_nothing_else_to_train(hf_model: Callable[..., Path]):
    model = adapted(hf_model("Qwen3Moe"))
    weights = read_safetensors(hf_model("Qwen3Moe"))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in iter_hf(model))
    file = dict(stream_trained(model).tensors)
    assert not any(tensor.any() for name, tensor in file.items() if name.endswith(UP))
    for name, tensor in file.items():
        if name.endswith(DOWN):
            bound = tensor.shape[1] ** -0.5
            assert 0.8 * bound < tensor.abs().max() <= bound, name
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} == {"lora_a", "lora_b"}
    linears = {name.split(".")[-2] for name in trained}
    assert linears == {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
    only = adapted(hf_model("Qwen3Moe"), lora_layers=["attention"])
    assert {n.split(".")[-2] for n, p in only.named_parameters() if p.requires_grad} == {
        "linear_qkv",
        "linear_proj",
    }


@pytest.mark.parametrize(
    ("architecture", "layers"),
    [
        ("Qwen3Moe", ["attention", "mlp"]),
        ("Mixtral", ["mlp"]),
        ("Qwen3", ["attention", "mlp"]),
        ("Llama", ["attention"]),
    ],
)
def test_gradients_are_those_of_autograd_through_merged_weights_in_transformers(
    hf_model: Callable[..., Path], tmp_path: Path, architecture: str, layers: list[str]
):
    folder, samples = hf_model(architecture), samples_of(LENGTHS)
    model = adapted(folder, lora_layers=layers)
    adapters = {name: tensor.requires_grad_() for name, tensor in randomize_adapters(model).items()}
    merged = merged_by_hand(read_safetensors(folder), adapters, scale=2.0)
    reference = Reference(folder_of(merged, folder, tmp_path / "merged"))
    microbatch = build_microbatch(samples, 0, replay := ReplayController(model), CPU)
    logprobs, _ = forward(model, replay, microbatch, 1.0)
    expected = torch.cat([reference.logprobs(sample) for sample in samples])
    assert (logprobs - expected).abs().max() <= 1e-4
    (microbatch.advantages * logprobs).sum().backward()
    (microbatch.advantages * expected).sum().backward()
    theirs = reference.named(gradients=True)
    for name, weight in merged.items():
        if weight.requires_grad:
            weight.backward(theirs[in_transformers(name)], retain_graph=True)
    wanted = {name: tensor.grad for name, tensor in adapters.items()}
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(found) == {n for n, p in model.named_parameters() if p.requires_grad}
    for name, gradient in stream_trained(model, found).tensors:
        exact = shared_sum(wanted, name) if name.endswith(DOWN) else wanted[name]
        assert relative_difference(gradient, exact) <= 1e-5, name


@pytest.mark.parametrize("architecture", ["Qwen3Moe", "Mixtral", "Qwen3", "Llama"])
def test_a_checkpoint_has_a_model_with_the_adapters_in_it_that_transformers_loads(
    hf_model: Callable[..., Path], tmp_path: Path, architecture: str
):
    folder = hf_model(architecture, architecture == "Llama")
    trainer = trainer_of(tmp_path, folder, lora_rank=4)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    saved = Path(train(trainer, 1, checkpoint=True, learning_rate=0.05).checkpoint)
    for name, parameter in trainer.model.named_parameters():
        same = torch.equal(parameter, before[name])
        assert same or parameter.requires_grad, name
        assert not same or not name.endswith("linear_qkv.lora_b")
    samples = samples_of(LENGTHS, routes=False)
    reference = Reference(saved / "model")
    with torch.no_grad():
        expected = torch.cat([reference.logits(sample) for sample in samples])
        found = logits_of(trainer.model, samples)
        assert (found - expected).abs().max() <= 1e-4
        original = Reference(folder)
        moved = torch.cat([original.logits(sample) for sample in samples])
    assert (moved - expected).abs().max() > 0.1


def test_what_is_sent_are_the_adapters_alone(hf_model: Callable[..., Path], tmp_path: Path):
    folder = hf_model("Qwen3Moe")
    whole, adapters = (trainer_of(tmp_path / str(rank), folder, lora_rank=rank) for rank in (0, 4))
    sizes = []
    for trainer in (whole, adapters):
        path = Path(train(trainer, 1, publish=True).weights)
        sizes.append(path.stat().st_size)
    with safe_open(path, "pt") as opened:
        assert float(opened.metadata()[SCALE]) == 32 / 4
        sent = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    base = read_safetensors(folder)
    matrices = {name.removesuffix(DOWN).removesuffix(UP) + ".weight" for name in sent}
    assert len(sent) == 2 * len(matrices)
    assert matrices == {n for n in base if "_proj" in n}
    assert sum(t.numel() for t in sent.values()) == sum(4 * sum(base[name].shape) for name in matrices)
    check_adapters(path, *({n: list(t.shape) for n, t in tensors.items()} for tensors in (sent, base)))
    merged = merged_by_hand(base, sent, scale=8.0)
    assert all((tensor - merged[name]).abs().max() <= 1e-6 for name, tensor in adapters.weights().items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_of_adapters_equals_one_that_was_never_stopped(
    hf_model: Callable[..., Path], tmp_path: Path, dtype: str
):
    whole = trainer_of(tmp_path, hf_model("Qwen3Moe"), lora_rank=4, dtype=dtype)
    train(whole, 1)
    saved = Path(train(whole, 2, checkpoint=True).checkpoint)
    metrics = [train(whole, step).metrics for step in (3, 4)]
    resumed = trainer_of(tmp_path, hf_model("Qwen3Moe"), resume=saved, lora_rank=4, dtype=dtype)
    again = [train(resumed, step).metrics for step in (3, 4)]
    assert [{**one, "seconds": 0} for one in metrics] == [{**one, "seconds": 0} for one in again]
    for (name, found), (_, expected) in zip(
        stream_trained(resumed.model).tensors, stream_trained(whole.model).tensors, strict=True
    ):
        assert torch.equal(found, expected), name
    state = checkpoint.read_optimizer(saved)
    assert {name.rpartition(".lora_")[1] for name in state} == {".lora_"}


def test_the_reference_of_adapters_is_the_same_model_as_it_was(hf_model: Callable[..., Path], tmp_path: Path):
    folder, samples = hf_model("Qwen3Moe"), samples_of(LENGTHS)
    model = adapted(folder)
    begun = randomize_adapters(model, seed=1)
    model_then = folder_of(dict(iter_hf(model)), folder, tmp_path / "then")
    now = randomize_adapters(model, seed=2)
    microbatches = [build_microbatch(samples, 0, ReplayController(model), CPU)]
    for adapters, same in ((begun, model_then), (None, folder)):
        kept = FrozenPolicy.with_adapters(model, adapters).logprobs(microbatches, 0.7)
        expected = FrozenPolicy.load(same, torch.float32, CPU, TrainerConfig()).logprobs(microbatches, 0.7)
        assert (kept[0] - expected[0]).abs().max() <= 1e-4
    assert all(torch.equal(tensor, now[name]) for name, tensor in stream_trained(model).tensors)


def test_the_adapters_of_the_warm_up_are_the_reference_of_a_resumed_run(
    hf_model: Callable[..., Path], tmp_path: Path
):
    whole = trainer_of(tmp_path, hf_model("Qwen3"), sections=HELD, lora_rank=4)
    for step in (1, 2):
        train(whole, step, loss="sft")
    first = train(whole, 3, checkpoint=True)
    assert [path.name for path in (tmp_path / "checkpoints/reference").iterdir()] == ["adapters.safetensors"]
    metrics = [train(whole, step).metrics for step in (4, 5)]
    resumed = trainer_of(
        tmp_path, hf_model("Qwen3"), resume=Path(first.checkpoint), sections=HELD, lora_rank=4
    )
    again = [train(resumed, step).metrics for step in (4, 5)]
    assert [one["kl_reference"] for one in again] == [one["kl_reference"] for one in metrics]
    assert 0 < first.metrics["kl_reference"] < metrics[1]["kl_reference"]


def test_what_does_not_fit_together_is_refused(hf_model: Callable[..., Path], tmp_path: Path):
    folder = hf_model("Qwen3")
    with pytest.raises(
        ModelError, match=r"lora_rank = 40 is more than an adapted matrix has \(32\); lower it"
    ):
        trainer_of(tmp_path, folder, lora_rank=40)
    whole = Path(train(trainer_of(tmp_path / "whole", folder), 1, checkpoint=True).checkpoint)
    with pytest.raises(ModelError, match=r"all weights were trained there; set trainer\.lora_rank = 0"):
        trainer_of(tmp_path, folder, resume=whole, lora_rank=4)
    adapters = trainer_of(tmp_path / "adapters", folder, lora_rank=4)
    saved = Path(train(adapters, 1, checkpoint=True).checkpoint)
    other = hf_model("Qwen3", seed=1)
    with pytest.raises(ModelError, match=r"trained beside other weights than .*Qwen3-False-1 has now"):
        trainer_of(tmp_path, other, resume=saved, lora_rank=4)
    with pytest.raises(ModelError, match=r"lora_A\.weight': \[4, 32\].* do not make up"):
        trainer_of(tmp_path, folder, resume=saved, lora_rank=8)
    with pytest.raises(ModelError, match=r"without a place: .*mlp.*; see trainer\.lora_layers"):
        trainer_of(tmp_path, folder, resume=saved, lora_rank=4, lora_layers=["attention"])
