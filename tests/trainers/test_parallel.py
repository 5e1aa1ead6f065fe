from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainer_builders import CPU

from agentgym.errors import ConfigError, ModelError
from agentgym.trainer_config import TrainerConfig
from agentgym_trainers.megatron import parallel
from agentgym_trainers.megatron.cpu import REPLACED, without_cuda
from agentgym_trainers.megatron.model import build_model, read_config


def test_every_name_that_is_replaced_on_a_cpu_is_there_and_comes_back():
    with without_cuda():
        before = [getattr(owner, name) for owner, name, _ in REPLACED]
        with without_cuda():
            assert torch.cuda.current_device() == torch.device("cpu")
        assert [getattr(owner, name) for owner, name, _ in REPLACED] == before


def test_another_number_of_processes_than_the_settings_say_is_refused():
    with (
        pytest.raises(ConfigError, match=r"trainer\.nproc = 2, but the trainer was started as 1 processes"),
        parallel.connected(2, 60.0),
    ):
        pass


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"nproc": 4, "tp": 4}, "tp = 4 cannot divide the model's num_key_value_heads = 2"),
        ({"nproc": 3, "pp": 3}, "pp = 3 cannot divide the model's num_hidden_layers = 2"),
        ({"nproc": 3, "ep": 3}, "ep = 3 cannot divide the model's num_experts = 8"),
    ],
)
def test_ranks_that_cannot_divide_the_model_are_refused(
    hf_model: Callable[..., Path], layout: dict[str, int], message: str
):
    fields = read_config(hf_model("Qwen3Moe"))
    with pytest.raises(ModelError, match=message):
        build_model(fields, torch.float32, CPU, TrainerConfig(**layout))


def test_experts_of_a_dense_model_are_not_to_be_divided(hf_model: Callable[..., Path]):
    with pytest.raises(ModelError, match="number of experts"):
        build_model(read_config(hf_model("Qwen3")), torch.float32, CPU, TrainerConfig(nproc=2, ep=2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs can")
def test_what_gloo_cannot_gather_is_refused():
    config = TrainerConfig(nproc=4, tp=2, ep=2)
    with pytest.raises(ConfigError, match=r"set trainer\.etp = 1"), parallel.layout(config, 60.0):
        pass
