from pathlib import Path

import pytest

from agentgym.policy.template import ChatTokenizer
from agentgym.tiny_model import init_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, written once."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    init_model(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> ChatTokenizer:
    return ChatTokenizer(model)
