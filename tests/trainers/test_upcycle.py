from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_builders import read_hf_model, write_hf_model

from agentgym.errors import ConfigError, ModelError
from agentgym.model import check_model
from agentgym.tiny_model import init_model
from agentgym.upcycle import upcycle
from agentgym_trainers.megatron.model import read_config

TOKENS = torch.arange(40)[None] % 64


@pytest.fixture
def dense(tmp_path: Path) -> Callable[..., Path]:
    """Returns a complete dense model folder."""

    def make(architecture: str, dtype: torch.dtype = torch.float32, **saved: object) -> Path:
        folder = tmp_path / architecture
        init_model(folder)  # its tokenizer and chat template
        write_hf_model(folder, architecture, vocab_size=105)
        read_hf_model(folder).to(dtype).save_pretrained(folder, **saved)
        return folder

    return make


@pytest.mark.parametrize(
    ("architecture", "moe"), [("Llama", "MixtralForCausalLM"), ("Qwen3", "Qwen3MoeForCausalLM")]
)
def test_the_mixture_computes_what_the_dense_model_does(
    dense: Callable[..., Path], tmp_path: Path, architecture: str, moe: str
):
    source, target = dense(architecture), tmp_path / "moe"
    upcycle(source, target, experts=4, top_k=2)
    info = check_model(target)
    assert (info.architecture, info.num_experts, info.top_k, info.moe_layers) == (moe, 4, 2, info.layers)
    read_config(target)  # the trainer takes it
    with torch.no_grad():
        expected, found = read_hf_model(source)(TOKENS).logits, read_hf_model(target)(TOKENS).logits
    assert expected.abs().max() > 1
    assert (found - expected).abs().max() <= 1e-5


def test_routers_are_small_differ_between_layers_and_come_from_the_seed(
    dense: Callable[..., Path], tmp_path: Path
):
    source = dense("Llama")
    routers = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        upcycle(source, tmp_path / name, experts=4, top_k=1, seed=seed)
        tensors = load_file(tmp_path / name / "model.safetensors")
        routers[name] = [tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"] for layer in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(routers["a"], routers["b"], strict=True))
    assert not torch.equal(routers["a"][0], routers["a"][1])
    assert not torch.equal(routers["a"][0], routers["c"][0])
    assert 0.01 < routers["a"][0].std() < 0.03


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_and_the_files_of_the_dense_model_stay(
    dense: Callable[..., Path], tmp_path: Path, dtype: torch.dtype
):
    source, target = dense("Qwen3", dtype, max_shard_size="40KB"), tmp_path / "moe"
    (source / "model.safetensors").unlink(missing_ok=True)  # of the tiny model
    upcycle(source, target, experts=2, top_k=1)
    shards = sorted(path.name for path in source.glob("*.safetensors"))
    assert len(shards) > 1
    assert sorted(path.name for path in target.glob("*.safetensors")) == shards
    router = read_hf_model(target).model.layers[1].mlp.gate.weight
    assert all(t.dtype == dtype for shard in shards for t in load_file(target / shard).values())
    assert 0.01 < router.std() < 0.03


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 5), (4, 0)])
def test_numbers_that_do_not_fit_together_are_refused(
    dense: Callable[..., Path], tmp_path: Path, experts: int, top_k: int
):
    with pytest.raises(ConfigError, match=f"{experts} experts of which {top_k}"):
        upcycle(dense("Llama"), tmp_path / "moe", experts=experts, top_k=top_k)


def test_a_mixture_is_not_upcycled_again_and_nothing_is_overwritten(
    dense: Callable[..., Path], tmp_path: Path
):
    init_model(tmp_path / "tiny")
    with pytest.raises(ModelError, match="is a Qwen3MoeForCausalLM"):
        upcycle(tmp_path / "tiny", tmp_path / "moe", experts=4, top_k=2)
    with pytest.raises(ConfigError, match="not an empty folder"):
        upcycle(dense("Llama"), tmp_path / "tiny", experts=4, top_k=2)
