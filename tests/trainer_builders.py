"""Tiny models, samples and configurations for the tests of the trainer, and references in transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from torch import Tensor

from agentgym.batch import Sample, concatenate, sums
from agentgym.config import Config
from agentgym.episode import recorded_checksum
from agentgym.protocol import BatchHeader, StepDone
from agentgym_trainers.losses.terms import Owners
from agentgym_trainers.megatron.export import stream_trained
from agentgym_trainers.megatron.lora import load_adapters
from agentgym_trainers.megatron.trainer import Trainer

VOCABULARY, LAYERS, EXPERTS, TOPK = (
    63,
    2,
    8,
    2,
)  # an odd vocabulary, which tensor-parallel ranks cannot divide
ARCHITECTURES = ("Qwen3Moe", "Mixtral", "Qwen3", "Llama")
CPU = torch.device("cpu")
HELD = {"algorithm": {"kl_reference_coefficient": 0.1}, "warmup": {"steps": 2}}
"""Sections of a run that is held near what its warm-up made."""


def write_hf_model(
    folder: Path, architecture: str, *, tied: bool = False, seed: int = 0, **fields: Any
) -> Path:
    """Save a random transformers model; weights are large enough for routers to disagree with each other."""
    moe = {
        "Qwen3Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True},
        "Mixtral": {"num_local_experts": EXPERTS},
    }
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
        **({"num_experts_per_tok": TOPK, **moe[architecture]} if architecture in moe else {}),
        **fields,
    }
    config = getattr(transformers, f"{architecture}Config")(**settings)
    torch.manual_seed(seed)
    getattr(transformers, f"{architecture}ForCausalLM")(config).float().save_pretrained(folder)
    return folder


def read_hf_model(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.train()


def routes_of(rng: np.random.Generator, tokens: int) -> NDArray[np.uint8]:
    """Random distinct experts for all tokens but the last, which has none."""
    routes = np.argsort(rng.random((tokens, LAYERS, EXPERTS)), axis=-1)[..., :TOPK].astype(np.uint8)
    routes[-1] = 255
    return routes


def sample_of(rng: np.random.Generator, tokens: int, *, version: int = 0, routes: bool = True) -> Sample:
    """A sample whose second half was sampled."""
    mask = np.arange(tokens) >= max(tokens // 2, 1)
    arrays = {
        "tokens": rng.integers(0, VOCABULARY, tokens).astype(np.int32),
        "sampled": mask,
        "logprobs": np.where(mask, rng.uniform(-6, -2, tokens), 0).astype(np.float32),
        "versions": np.where(mask, version, -1).astype(np.int32),
        "routes": routes_of(rng, tokens) if routes else None,
    }
    return Sample(
        loss_mask=mask,
        advantages=np.where(mask, rng.normal(size=tokens), 0).astype(np.float32),
        weights=np.where(mask, 0.05, 0).astype(np.float32),
        checksum=recorded_checksum(*arrays.values()),
        **arrays,
    )


def samples_of(lengths: Sequence[int], *, seed: int = 0, routes: bool = True) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [sample_of(rng, length, routes=routes) for length in lengths]


def owners_of(*lengths: int) -> Owners:
    """The owners of the tokens of samples of these lengths."""
    return Owners(torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)), len(lengths))


def batch_of(
    samples: Sequence[Sample], *, step: int = 1, **fields: Any
) -> tuple[BatchHeader, dict[str, Any]]:
    """A batch message with all samples in one microbatch."""
    settings = {
        "loss": "dppo_tv",
        "learning_rate": 1e-3,
        "updates": 1,
        "microbatches": [list(range(len(samples)))],
        "publish": False,
        "checkpoint": False,
        **fields,
    }
    arrays = {name: array for name, array in concatenate(samples).items() if array is not None}
    header = BatchHeader(
        step=step,
        lengths=[len(sample.tokens) for sample in samples],
        checksums=[sample.checksum for sample in samples],
        sums=sums(arrays),
        **settings,
    )
    return header, arrays


def config_of(model: Path, **sections: dict[str, Any]) -> Config:
    return Config.model_validate(
        {"env": {"id": "test"}, "policies": {"learner": {"model": str(model)}}, **sections}
    )


def trainer_of(
    folder: Path,
    model: Path,
    *,
    resume: Path | None = None,
    sections: dict[str, dict[str, object]] | None = None,
    **trainer: object,
) -> Trainer:
    config = config_of(model, trainer=trainer, **(sections or {}))
    exchange = folder / "exchange"
    exchange.mkdir(parents=True, exist_ok=True)
    return Trainer(
        config, policy="learner", exchange=exchange, checkpoints=folder / "checkpoints", resume=resume
    )


def train(trainer: Trainer, step: int, **fields: object) -> StepDone:
    header, arrays = batch_of(samples_of((12, 7, 9), seed=step), step=step, updates=2, **fields)
    return trainer.train(header, arrays)


class ForcedGate(torch.nn.Module):
    """A transformers router that sends token t to `routes[t]` [tokens, k]; 255: to its own choice."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.weight = gate.weight
        self.routes: Tensor | None = None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), self.weight)
        probabilities = logits.softmax(dim=-1)
        native = probabilities.topk(TOPK, dim=-1).indices
        experts = native if self.routes is None else torch.where(self.routes == 255, native, self.routes)
        chosen = probabilities.gather(1, experts)
        return logits, chosen / chosen.sum(dim=-1, keepdim=True), experts


class Reference:
    """A transformers model that computes what the trainer computes, one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = read_hf_model(folder)
        self.gates = [
            ForcedGate(layer.mlp.gate) for layer in self.model.model.layers if hasattr(layer.mlp, "gate")
        ]
        for layer, gate in zip(self.model.model.layers, self.gates, strict=False):
            layer.mlp.gate = gate

    def logits(self, sample: Sample, *, replay: bool = True) -> Tensor:
        for number, gate in enumerate(self.gates):
            forced = replay and sample.routes is not None
            gate.routes = torch.from_numpy(sample.routes[:, number].astype(np.int64)) if forced else None
        return self.model(torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits[0]

    def logprobs(self, sample: Sample, *, replay: bool = True) -> Tensor:
        """Log-probabilities of the trained tokens."""
        table = self.logits(sample, replay=replay)[:-1].log_softmax(dim=-1)
        every = table.gather(1, torch.from_numpy(sample.tokens[1:].astype(np.int64))[:, None])[:, 0]
        return every[torch.from_numpy(sample.loss_mask[1:])]

    def named(self, *, gradients: bool = False) -> dict[str, Tensor]:
        """Weights or gradients with the names that `save_pretrained` writes."""
        out = {}
        for name, parameter in self.model.named_parameters():
            tensor = parameter.grad if gradients else parameter.detach()
            prefix, _, last = name.rpartition(".")
            if last == "gate_up_proj":
                for expert, both in enumerate(tensor):
                    out[f"{prefix}.{expert}.gate_proj.weight"], out[f"{prefix}.{expert}.up_proj.weight"] = (
                        both.chunk(2)
                    )
            elif last == "down_proj":
                out.update({f"{prefix}.{expert}.down_proj.weight": one for expert, one in enumerate(tensor)})
            else:
                out[name] = tensor
        return out


def relative_difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / (expected.norm() + 1e-9)).item()


def randomize_adapters(model: Any, seed: int = 0) -> dict[str, Tensor]:
    """Give the adapters of a model values that matter, the same in any layout, and return those of a file on rank 0."""
    drawn = {}
    for name, shape in stream_trained(model).shapes.items():
        generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
        drawn[name] = 0.1 * torch.randn(shape, generator=generator)
    load_adapters(model, drawn)
    return {name: tensor.clone() for name, tensor in stream_trained(model).tensors}
