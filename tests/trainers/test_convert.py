import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from trainer_builders import ARCHITECTURES, CPU, read_hf_model

from agentgym.errors import ModelError
from agentgym_trainers.megatron.convert import load_hf, read_safetensors
from agentgym_trainers.megatron.export import iter_hf
from agentgym_trainers.megatron.model import build_model, read_config


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_come_back_bit_for_bit(hf_model: Callable[..., Path], architecture: str, tied: bool):
    folder = hf_model(architecture, tied)
    model, tensors = build_model(read_config(folder), torch.float32, CPU), read_safetensors(folder)
    load_hf(model, tensors)
    back = dict(iter_hf(model))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_transformers_loads_what_was_written(hf_model: Callable[..., Path], tmp_path: Path):
    folder = hf_model("Qwen3Moe")
    model = build_model(read_config(folder), torch.float32, CPU)
    load_hf(model, read_safetensors(folder))
    save_file(dict(iter_hf(model)), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    found, expected = read_hf_model(tmp_path).state_dict(), read_hf_model(folder).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_sharded_folder_is_read_whole(hf_model: Callable[..., Path], tmp_path: Path):
    folder = hf_model("Qwen3")
    read_hf_model(folder).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found, expected = read_safetensors(tmp_path), read_safetensors(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_tied_copy_of_the_embedding_is_not_needed_and_not_minded(hf_model: Callable[..., Path]):
    folder = hf_model("Llama", True)
    tensors = read_safetensors(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    load_hf(build_model(read_config(folder), torch.float32, CPU), tensors)


def test_a_missing_tensor_is_named(hf_model: Callable[..., Path]):
    folder = hf_model("Qwen3Moe")
    tensors = read_safetensors(folder)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ModelError, match=r"lack model\.layers\.1\.self_attn\.k_proj\.weight"):
        load_hf(build_model(read_config(folder), torch.float32, CPU), tensors)


def test_a_tensor_of_another_shape_is_named(hf_model: Callable[..., Path]):
    folder = hf_model("Qwen3Moe")
    tensors = read_safetensors(folder)
    tensors["model.layers.0.self_attn.v_proj.weight"] = torch.zeros(7, 32)
    with pytest.raises(ModelError, match=r"v_proj\.weight': \[7, 32\].*do not make up"):
        load_hf(build_model(read_config(folder), torch.float32, CPU), tensors)


def test_a_tensor_without_a_place_is_named(hf_model: Callable[..., Path]):
    folder = hf_model("Qwen3")
    tensors = {**read_safetensors(folder), "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    with pytest.raises(ModelError, match=r"q_proj\.bias"):
        load_hf(build_model(read_config(folder), torch.float32, CPU), tensors)


def test_a_folder_without_weights_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        read_safetensors(tmp_path)
