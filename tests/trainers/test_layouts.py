"""Every parallel layout takes the step that one rank takes, and that a loop in transformers takes."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from layouts import ALGORITHM, LENGTHS, TEMPERATURE, TOKENS_PER_MICROBATCH, samples, take_step
from safetensors import safe_open
from torch import Tensor
from trainer_builders import Reference, relative_difference

from agentgym.batch import pack_microbatches, share_of
from agentgym_trainers.megatron.launch import run_ranks

SCRIPT = Path(__file__).parents[1] / "layouts.py"
PRECISION = 1e-5
PAIRS = ["dp2", "tp2", "ep2", "pp2", "tp2 ep2"]
TWO = [*PAIRS, *(f"{name} recompute" for name in PAIRS), "pp2 first", "tp2 ep2 first recompute"]
ADAPTED = ["tp2 lora", "ep2 lora", "tp2 ep2 lora", "pp2 recompute lora"]
FOUR = ["tp2 pp2", "pp2 ep2", "dp2 tp2", "tp2 pp2 lora", "pp2 ep2 lora"]


@dataclass
class Taken:
    """What a layout wrote."""

    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    metrics: dict[str, float]
    routes: list[bool]


def read(path: Path) -> Taken:
    with safe_open(path, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        metadata = opened.metadata()
    gradients, weights = (
        {n.removeprefix(kind): tensor for n, tensor in tensors.items() if n.startswith(kind)}
        for kind in ("gradient.", "weight.")
    )
    return Taken(gradients, weights, json.loads(metadata["metrics"]), json.loads(metadata["routes"]))


def in_ranks(ranks: int, model: Path, out: Path, names: list[str]) -> None:
    path = os.pathsep.join(sys.path)
    command = ["env", f"PYTHONPATH={path}", "OMP_NUM_THREADS=1", sys.executable, "-W", "ignore", str(SCRIPT)]
    assert run_ranks(ranks, [*command, str(model), str(out), *names], out) == 0


@pytest.fixture(scope="session")
def folder(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank wrote, without recompute and with it, and two ranks in all layouts."""
    out = tmp_path_factory.mktemp("layouts")
    for name in ("one", "one recompute", "one first", "one lora", "one recompute lora"):
        take_step(name, hf_model("Qwen3Moe"), out)
    in_ranks(2, hf_model("Qwen3Moe"), out, TWO + ADAPTED)
    return out


def check(found: Taken, expected: Taken) -> None:
    for ours, theirs in ((found.gradients, expected.gradients), (found.weights, expected.weights)):
        assert ours.keys() == theirs.keys()
        assert max(relative_difference(ours[name], theirs[name]) for name in theirs) <= PRECISION
    timeless = {name: value for name, value in expected.metrics.items() if name != "seconds"}
    assert {name: found.metrics[name] for name in timeless} == pytest.approx(timeless, rel=PRECISION)
    assert expected.metrics["grad_norm"] > 0.5  # so that it was clipped
    assert all(found.routes)


@pytest.mark.parametrize("name", ["one recompute", *TWO])
def test_a_layout_takes_the_step_that_one_rank_takes(folder: Path, name: str):
    alone = "one first" if " first" in name else "one"
    check(read(folder / f"{name}.safetensors"), read(folder / f"{alone}.safetensors"))


def test_the_ranks_get_different_numbers_of_tokens_and_of_microbatches():
    packed = pack_microbatches(LENGTHS, TOKENS_PER_MICROBATCH, 2)
    shares = [share_of(rank, 2, packed) for rank in (0, 1)]
    assert [[sum(LENGTHS[n] for n in indices) for indices in share] for share in shares] == [[25, 0], [20, 7]]


@pytest.mark.parametrize("name", ["one recompute lora", *ADAPTED])
def test_a_layout_takes_the_step_of_adapters_that_one_rank_takes(folder: Path, name: str):
    check(read(folder / f"{name}.safetensors"), read(folder / "one lora.safetensors"))


def test_one_rank_takes_the_step_of_a_loop_in_transformers(hf_model: Callable[..., Path], folder: Path):
    taken, reference = read(folder / "one.safetensors"), Reference(hf_model("Qwen3Moe"))
    total = torch.zeros(())
    for sample in samples():
        table = (reference.logits(sample)[:-1] / TEMPERATURE).log_softmax(dim=-1)
        mask = torch.from_numpy(sample.loss_mask)
        rollout, advantages, weights = (
            torch.from_numpy(getattr(sample, name))[mask] for name in ("logprobs", "advantages", "weights")
        )
        rows = table[mask[1:]]
        new = rows.gather(1, torch.from_numpy(sample.tokens.astype("int64"))[mask][:, None])[:, 0]
        moved = (new.exp() - rollout.exp()).detach()
        outside = moved * advantages.sign() > ALGORITHM.tv_threshold
        policy = torch.where(outside, torch.zeros(()), -advantages * (new - rollout).exp())
        entropy = -(rows.exp() * rows).sum(dim=-1)
        kl = ALGORITHM.kl_coefficient * (new - rollout) ** 2
        total = total + (weights * (policy + kl - ALGORITHM.entropy_coefficient * entropy)).sum()
    total.backward()
    torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 0.5)
    theirs = reference.named(gradients=True)
    assert max(relative_difference(taken.gradients[name], theirs[name]) for name in theirs) <= PRECISION


@pytest.mark.long
def test_layouts_of_four_ranks_take_the_step_that_one_rank_takes(hf_model: Callable[..., Path], folder: Path):
    in_ranks(4, hf_model("Qwen3Moe"), folder, FOUR)
    for name in FOUR:
        one = "one lora" if name.endswith("lora") else "one"
        check(read(folder / f"{name}.safetensors"), read(folder / f"{one}.safetensors"))


def test_a_tied_embedding_learns_at_both_ends_of_a_pipeline(hf_model: Callable[..., Path], tmp_path: Path):
    names = ["tp2", "pp2"]
    take_step("one", hf_model("Qwen3", True), tmp_path)
    in_ranks(2, hf_model("Qwen3", True), tmp_path, names)
    for name in names:
        check(read(tmp_path / f"{name}.safetensors"), read(tmp_path / "one.safetensors"))
