"""What a rank does in the tests of parallel layouts; the tests start it with `run_ranks`, and read what it wrote.

    python tests/layouts.py MODEL_FOLDER OUT_FOLDER NAME [NAME ...]

Every layout takes the same step on the same batch and leaves its numbers, gradients and weights in
OUT_FOLDER/NAME.safetensors. A process that is no rank takes the step alone.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from trainer_builders import EXPERTS, TOPK, randomize_adapters, samples_of

from agentgym.algorithm_config import AlgorithmConfig
from agentgym.batch import Sample, pack_microbatches, share_of
from agentgym.trainer_config import TrainerConfig
from agentgym_trainers.megatron import parallel
from agentgym_trainers.megatron.convert import load_hf, read_safetensors
from agentgym_trainers.megatron.export import iter_hf, stream_trained
from agentgym_trainers.megatron.microbatch import build_microbatch
from agentgym_trainers.megatron.model import build_model, read_config
from agentgym_trainers.megatron.optimizer import Optimizer
from agentgym_trainers.megatron.pipeline import forward_backward
from agentgym_trainers.megatron.replay import FirstRoutes, ReplayController
from agentgym_trainers.megatron.step import StepSettings, train_step

LAYOUTS = {
    "one": {},
    "dp2": {"nproc": 2},
    "tp2": {"nproc": 2, "tp": 2},
    "pp2": {"nproc": 2, "pp": 2},
    "ep2": {"nproc": 2, "ep": 2},
    "tp2 ep2": {"nproc": 2, "tp": 2, "ep": 2, "etp": 1},
    "tp2 pp2": {"nproc": 4, "tp": 2, "pp": 2},
    "pp2 ep2": {"nproc": 4, "pp": 2, "ep": 2},
    "dp2 tp2": {"nproc": 4, "tp": 2},
}
"""By name. With " first" behind it, the second update replays the routes of the first; with " recompute", activations
are computed again; with " lora", adapters are trained."""
ALGORITHM = AlgorithmConfig(tv_threshold=0.05, kl_coefficient=0.01, entropy_coefficient=0.01)
SETTINGS = StepSettings("dppo_tv", 0.01, updates=2)
TEMPERATURE = 0.7
WAIT = 240.0
"""Seconds that ranks wait for each other, one of which may be much slower to start on a busy machine."""
LENGTHS, TOKENS_PER_MICROBATCH = (9, 25, 7, 11), 26
"""Odd on purpose: no layout can divide the tokens evenly, and one of two data-parallel ranks has one microbatch, the
other two."""


def trainer_of(name: str) -> TrainerConfig:
    layout = name.removesuffix(" lora").removesuffix(" recompute").removesuffix(" first")
    return TrainerConfig(
        **LAYOUTS[layout],
        recompute="recompute" in name,
        lora_rank=4 if "lora" in name else 0,
        lora_alpha=2.0,
        max_grad_norm=0.5,
        weight_decay=0.1,
        adam_eps=1e-3,  # so that a gradient of 1e-8, which is rounding, moves no weight by the learning rate
    )


def samples() -> list[Sample]:
    """Samples with routes, some of which are missing in the middle."""
    made = samples_of(LENGTHS)
    for sample in made:
        sample.routes[::5] = 255  # type: ignore[index]
    return made


class Routes:
    """Which experts the routers of this rank really chose, in the order of its tokens."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.chosen: list[torch.Tensor] = []
        for module in model.modules():
            if type(module).__name__ == "Router":
                module.register_forward_hook(self._record)

    def _record(self, module: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        self.chosen.append(output[1])


def routes_exact(model, replay, microbatches) -> bool:
    """Whether every token of this rank goes where its route says, in all layers and in every pass."""
    routes = Routes(model)
    forward_backward(model, replay, microbatches, lambda number, hidden: hidden.sum())
    layers = len(replay._layers)
    if not layers:
        return True
    tp, rank = dist.get_world_size(model.pg_collection.tp), dist.get_rank(model.pg_collection.tp)
    passes = len(routes.chosen) // layers
    assert passes in (len(microbatches), 2 * len(microbatches))
    for microbatch in microbatches:
        wanted = microbatch.routes.chunk(tp, 1)[rank] if microbatch.routes is not None else None
        for layer in range(layers if wanted is not None else 0):
            # Between a forward pass and its recompute there may be others, so it is looked for by its content.
            expected = wanted[replay._first + layer]
            given = (expected >= 0).all(dim=1)
            same = [
                chosen
                for chosen in routes.chosen
                if len(chosen) == len(expected)
                and torch.equal(chosen[given], as_map(expected[given]))
                and (chosen.sum(dim=1) == TOPK).all()
            ]
            if len(same) < passes // len(microbatches):
                return False
    return True


def as_map(experts: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(experts), EXPERTS, dtype=torch.bool).scatter(1, experts, True)


def take_step(name: str, folder: Path, out: Path) -> None:
    trainer = trainer_of(name)
    model = build_model(read_config(folder), torch.float32, parallel.device(), trainer)
    load_hf(model, read_safetensors(folder))
    if trainer.lora_rank:
        randomize_adapters(model)
    replay, optimizer = ReplayController(model), Optimizer(model, trainer)
    batch = samples()
    packed = pack_microbatches([len(s.tokens) for s in batch], TOKENS_PER_MICROBATCH, trainer.dp)
    microbatches = [
        build_microbatch([batch[i] for i in indices], 0, replay, parallel.device(), multiple=trainer.tp)
        for indices in share_of(parallel.data_rank(), trainer.dp, packed)
    ]
    exact = parallel.from_all(routes_exact(model, replay, microbatches))
    if " first" in name:
        microbatches = [replace(microbatch, routes=FirstRoutes()) for microbatch in microbatches]
    first = StepSettings(
        SETTINGS.loss, 0.0, updates=1
    )  # with a learning rate of 0 only the gradient is of interest
    train_step(model, Optimizer(model, trainer), replay, microbatches, first, ALGORITHM, TEMPERATURE)
    # Clipped, all by the same factor: so their common norm is checked too.
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found = {f"gradient.{n}": t.clone() for n, t in stream_trained(model, gradients).tensors}
    metrics = train_step(model, optimizer, replay, microbatches, SETTINGS, ALGORITHM, TEMPERATURE)
    found |= {f"weight.{n}": t.clone() for n, t in iter_hf(model)}
    if dist.get_rank() == 0:
        metadata = {"metrics": json.dumps(metrics), "routes": json.dumps(exact)}
        save_file({n: t.contiguous() for n, t in found.items()}, out / f"{name}.safetensors", metadata)


def main(arguments: Sequence[str]) -> None:
    folder, out, *names = arguments
    torch.set_num_threads(1)
    with parallel.without_cuda(), parallel.connected(trainer_of(names[0]).nproc, WAIT):
        for name in names:
            with parallel.layout(trainer_of(name), WAIT):
                parallel.seed_all(1)
                take_step(name, Path(folder), Path(out))


if __name__ == "__main__":
    main(sys.argv[1:])
