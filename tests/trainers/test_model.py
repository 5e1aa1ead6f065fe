import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainer_builders import ARCHITECTURES, CPU, Reference, read_hf_model, samples_of, write_hf_model

from agentgym.errors import ModelError
from agentgym.tiny_model import init_model
from agentgym.trainer_config import TrainerConfig
from agentgym_trainers.megatron.convert import load_hf, read_safetensors
from agentgym_trainers.megatron.microbatch import build_microbatch
from agentgym_trainers.megatron.model import build_model, check_supported, read_config, transformer_config
from agentgym_trainers.megatron.pipeline import run_stage
from agentgym_trainers.megatron.predictions import words_of

LENGTHS = (9, 1, 17, 16, 5, 33)


def load(folder: Path, dtype: torch.dtype = torch.float32):
    model = build_model(read_config(folder), dtype, CPU)
    load_hf(model, read_safetensors(folder))
    return model


def packed_logits(model, samples) -> torch.Tensor:
    return run_stage(model, build_microbatch(samples, 0, None, CPU))[:, 0] @ words_of(model).T


def reference_logits(folder: Path, samples) -> torch.Tensor:
    reference = Reference(folder)
    with torch.no_grad():
        return torch.cat([reference.logits(sample, replay=False) for sample in samples])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_transformers(hf_model: Callable[..., Path], architecture: str, tied: bool):
    folder, samples = hf_model(architecture, tied), samples_of(LENGTHS)
    found, expected = packed_logits(load(folder), samples), reference_logits(folder, samples)
    assert expected.abs().max() > 1
    assert (found - expected).abs().max() <= 1e-4


def test_gate_weights_over_all_experts_equal_transformers(tmp_path: Path):
    folder = write_hf_model(tmp_path / "model", "Qwen3Moe", norm_topk_prob=False)
    sample = samples_of((21,))[0]
    with torch.no_grad():
        expected = read_hf_model(folder)(torch.from_numpy(sample.tokens.astype("int64"))[None]).logits[0]
    assert (packed_logits(load(folder), [sample]) - expected).abs().max() <= 1e-4


def test_the_tiny_model_equals_transformers(tmp_path: Path):
    init_model(tmp_path / "tiny")
    samples = samples_of((30, 12))
    found, expected = (
        packed_logits(load(tmp_path / "tiny"), samples),
        reference_logits(tmp_path / "tiny", samples),
    )
    assert (found - expected).abs().max() <= 1e-4


def test_packed_sequences_equal_the_same_sequences_alone(hf_model: Callable[..., Path]):
    model, samples = load(hf_model("Qwen3Moe")), samples_of(LENGTHS)
    alone = torch.cat([packed_logits(model, [sample]) for sample in samples])
    assert (packed_logits(model, samples) - alone).abs().max() <= 1e-5


def test_bfloat16_is_close_to_float32(hf_model: Callable[..., Path]):
    folder, samples = hf_model("Qwen3"), samples_of((30, 12))
    model = load(folder, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    found, expected = packed_logits(model, samples).float(), reference_logits(folder, samples)
    assert (found - expected).norm() <= 0.03 * expected.norm()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_dropout", 0.1),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_only_layers", [0]),
        ("decoder_sparse_step", 2),
        ("use_sliding_window", True),
        ("quantization_config", {"bits": 4}),
        ("rope_scaling", {"rope_type": "llama3"}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("architectures", ["DeepseekV3ForCausalLM"]),
    ],
)
def test_a_field_that_would_not_be_honoured_is_refused_by_name(field: str, value: object):
    fields = {"architectures": ["Qwen3MoeForCausalLM"], field: value}
    with pytest.raises(ModelError, match=field):
        check_supported(fields)


def test_a_missing_field_is_named(hf_model: Callable[..., Path]):
    fields = json.loads((hf_model("Qwen3") / "config.json").read_text())
    del fields["rms_norm_eps"]
    with pytest.raises(ModelError, match="rms_norm_eps"):
        transformer_config(fields, torch.float32, TrainerConfig())


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        read_config(tmp_path)
