from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from trainer_builders import write_hf_model

from agentgym_trainers.megatron import parallel


@pytest.fixture(scope="session", autouse=True)
def process_groups() -> Iterator[None]:
    torch.set_num_threads(1)
    with parallel.single_process(seed=1):
        yield


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a random model, written once for all tests: `hf_model("Qwen3Moe", tied=True)`."""
    root, written = tmp_path_factory.mktemp("models"), {}

    def folder(architecture: str, tied: bool = False, seed: int = 0) -> Path:
        key = (architecture, tied, seed)
        if key not in written:
            target = root / f"{architecture}-{tied}-{seed}"
            written[key] = write_hf_model(target, architecture, tied=tied, seed=seed)
        return written[key]

    return folder
