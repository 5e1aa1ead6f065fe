from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_builders import CPU, LAYERS, Reference, relative_difference, samples_of

from agentgym.algorithm_config import AlgorithmConfig
from agentgym.errors import RunError
from agentgym.trainer_config import TrainerConfig
from agentgym_trainers.megatron.convert import load_hf, read_safetensors
from agentgym_trainers.megatron.export import iter_hf
from agentgym_trainers.megatron.microbatch import build_microbatch
from agentgym_trainers.megatron.model import build_model, read_config
from agentgym_trainers.megatron.optimizer import Optimizer
from agentgym_trainers.megatron.reference import Reference as FrozenPolicy
from agentgym_trainers.megatron.replay import Action, ReplayController
from agentgym_trainers.megatron.step import StepSettings, train_step

LENGTHS = (13, 5, 22, 9)
ALGORITHM = AlgorithmConfig(tv_threshold=0.05, kl_coefficient=0.01)
TRAINER = TrainerConfig(max_grad_norm=0.5, weight_decay=0.1)


class Training:
    """A model and what trains it."""

    def __init__(
        self, folder: Path, dtype: torch.dtype = torch.float32, trainer: TrainerConfig = TRAINER
    ) -> None:
        self.model = build_model(read_config(folder), dtype, CPU)
        load_hf(self.model, read_safetensors(folder))
        self.replay = ReplayController(self.model)
        self.optimizer = Optimizer(self.model, trainer)

    def step(
        self,
        groups,
        *,
        loss="dppo_tv",
        updates=1,
        rate=0.01,
        temperature=1.0,
        algorithm=ALGORITHM,
        reference=None,
    ):
        microbatches = [build_microbatch(group, 0, self.replay, CPU) for group in groups]
        settings = StepSettings(loss, rate, updates)
        return train_step(
            self.model, self.optimizer, self.replay, microbatches, settings, algorithm, temperature, reference
        )


def reference_step(reference: Reference, optimizer: torch.optim.Optimizer, samples) -> tuple[float, float]:
    """DPPO, written a second time, one sequence at a time on the transformers model."""
    optimizer.zero_grad()
    total = torch.zeros(())
    for sample in samples:
        mask = torch.from_numpy(sample.loss_mask)
        rollout, advantages, weights = (
            torch.from_numpy(getattr(sample, name))[mask] for name in ("logprobs", "advantages", "weights")
        )
        logprobs = reference.logprobs(sample)
        for new, old, advantage, weight in zip(logprobs, rollout, advantages, weights, strict=True):
            moved = (new.exp() - old.exp()).item()
            outside = (advantage > 0 and moved > 0.05) or (advantage < 0 and moved < -0.05)
            policy_term = 0.0 if outside else -advantage * (new - old).exp()
            total = total + weight * (policy_term + 0.01 * (new - old) ** 2)
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 0.5).item()
    optimizer.step()
    return total.item(), norm


def test_two_updates_over_two_microbatches_equal_a_loop_in_transformers(hf_model: Callable[..., Path]):
    folder, samples = hf_model("Qwen3Moe"), samples_of(LENGTHS)
    training, reference = Training(folder), Reference(folder)
    parameters = list(reference.model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    expected = [reference_step(reference, optimizer, samples) for _ in range(2)]
    metrics = training.step([samples[2:], samples[:2]], updates=2)
    assert metrics["loss"] == pytest.approx(sum(loss for loss, _ in expected) / 2, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(sum(norm for _, norm in expected) / 2, rel=1e-4)
    assert 0 < metrics["mask_share"] < 1
    ours, theirs = dict(iter_hf(training.model)), reference.named()
    assert max(relative_difference(ours[name], theirs[name]) for name in theirs) <= 1e-4


def test_tokens_sampled_by_the_same_weights_show_no_mismatch(hf_model: Callable[..., Path]):
    folder, samples = hf_model("Qwen3Moe"), samples_of(LENGTHS)
    reference = Reference(folder)
    for sample in samples:
        with torch.no_grad():
            sample.logprobs[sample.loss_mask] = reference.logprobs(sample).numpy()
    samples[0].versions[-1] = -1  # as if of other weights
    samples[0].logprobs[-1] -= 1
    metrics = Training(folder).step([samples])
    assert metrics["mismatch"] <= 1e-4
    assert metrics["mismatch_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["mismatch_all"] == pytest.approx(1 / metrics["tokens_trained"], abs=1e-4)
    assert metrics["route_coverage"] == 1
    assert metrics["tokens"] == sum(LENGTHS)


def test_the_temperature_divides_the_logits(hf_model: Callable[..., Path]):
    folder, samples = hf_model("Qwen3"), samples_of((13,), routes=False)
    with torch.no_grad():
        table = (Reference(folder).logits(samples[0])[:-1] / 0.5).log_softmax(dim=-1)
    mask = samples[0].loss_mask
    chosen = table.gather(1, torch.from_numpy(samples[0].tokens[1:].astype("int64"))[:, None])[:, 0].numpy()
    samples[0].logprobs[mask] = chosen[mask[1:]]
    assert Training(folder).step([samples], temperature=0.5)["mismatch"] <= 1e-4


def test_the_old_policy_is_that_of_before_the_first_update(hf_model: Callable[..., Path]):
    algorithm, samples = AlgorithmConfig(loss="ppo_clip", correction="tis"), samples_of(LENGTHS)
    training = Training(hf_model("Qwen3Moe"))
    assert training.step([samples], loss="ppo_clip", algorithm=algorithm)["ratio_max"] == 1
    metrics = training.step([samples[:2], samples[2:]], loss="ppo_clip", updates=2, algorithm=algorithm)
    assert metrics["ratio_max"] > 1.01
    assert 0 < metrics["rho_outside_share"] < 1


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_reference_holds_the_policy_where_it_was(hf_model: Callable[..., Path], place: str):
    folder, samples = hf_model("Qwen3"), samples_of(LENGTHS, routes=False)
    moved = {}
    for coefficient in (1e-9, 3.0):
        algorithm = AlgorithmConfig.model_validate(
            {"loss": "ppo_clip", "kl_reference_coefficient": coefficient, "kl_reference_in": place}
            | {"kl_reference_estimator": "k3" if place == "loss" else "k1"}
        )
        training = Training(folder)
        kept = FrozenPolicy.load(folder, torch.float32, CPU, TRAINER)
        metrics = [
            training.step([samples[:2], samples[2:]], loss="ppo_clip", algorithm=algorithm, reference=kept)
            for _ in range(8)
        ]
        assert metrics[0]["kl_reference"] == pytest.approx(0, abs=1e-6)
        last = training.step([samples], loss="ppo_clip", algorithm=algorithm, reference=kept)
        moved[coefficient] = abs(last["kl_reference"])
    assert moved[3.0] < 0.5 * moved[1e-9]


def test_the_divergence_in_the_reward_is_that_of_this_and_the_later_tokens(hf_model: Callable[..., Path]):
    samples = samples_of(LENGTHS, routes=False)
    folder, other = hf_model("Qwen3"), hf_model("Qwen3", seed=1)
    training, kept = Training(folder), FrozenPolicy.load(other, torch.float32, CPU, TRAINER)
    algorithm = AlgorithmConfig(
        loss="reinforce", kl_reference_coefficient=0.5, kl_reference_estimator="k1", kl_reference_in="reward"
    )
    found = training.step([samples], loss="reinforce", rate=0.0, algorithm=algorithm, reference=kept)["loss"]
    expected = 0.0
    for sample in samples:
        new, asked = (Reference(f).logprobs(sample).detach().numpy() for f in (folder, other))
        mask = sample.loss_mask
        to_go = np.cumsum((new - asked)[::-1])[::-1]
        expected -= (sample.weights[mask] * (sample.advantages[mask] - 0.5 * to_go) * new).sum()
    assert found == pytest.approx(expected, rel=1e-4)


def test_no_routes_are_left_for_the_next_step(hf_model: Callable[..., Path]):
    training, samples = Training(hf_model("Qwen3Moe")), samples_of(LENGTHS)
    training.step([samples])
    assert [(layer.action, layer.target, layer.waiting) for layer in training.replay._layers] == [
        (Action.NATIVE, None, [])
    ] * LAYERS


def test_supervised_steps_lower_the_loss_and_report_no_mismatch(hf_model: Callable[..., Path]):
    training, samples = Training(hf_model("Qwen3Moe")), samples_of(LENGTHS)
    metrics = [training.step([samples], loss="sft") for _ in range(6)]
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]
    assert not {name for name in metrics[0] if name.startswith(("mismatch", "kl"))}


def test_a_bfloat16_model_learns_from_steps_smaller_than_its_precision(hf_model: Callable[..., Path]):
    training = Training(hf_model("Qwen3"), torch.bfloat16)
    samples = samples_of(LENGTHS, routes=False)
    losses = [training.step([samples], loss="sft", rate=1e-4)["loss"] for _ in range(20)]
    assert losses[-1] < losses[0] - 0.1


def test_a_step_without_samples_changes_nothing(hf_model: Callable[..., Path]):
    training = Training(hf_model("Qwen3"))
    before = {name: tensor.clone() for name, tensor in iter_hf(training.model)}
    assert training.step([])["tokens"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in iter_hf(training.model))


def test_a_gradient_that_is_not_finite_is_refused_before_it_reaches_the_weights(
    hf_model: Callable[..., Path],
):
    training, samples = Training(hf_model("Qwen3")), samples_of(LENGTHS, routes=False)
    before = {name: tensor.clone() for name, tensor in iter_hf(training.model)}
    samples[0].advantages[-1] = float("nan")
    with pytest.raises(RunError, match="norm of the gradient is nan"):
        training.step([samples])
    assert all(torch.equal(tensor, before[name]) for name, tensor in iter_hf(training.model))
