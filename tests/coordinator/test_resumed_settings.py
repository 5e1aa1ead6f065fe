"""A run is resumed with the settings it was started with, but for where it runs and how long."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders import config_of

from agentgym.config import Config
from agentgym.config_file import load_config
from agentgym.coordinator.train import prepare_run_dir
from agentgym.errors import ConfigError


def run_in(folder: Path, **sections: Any) -> Config:
    return config_of(**{**sections, "run": {"dir": str(folder), "name": "r", **sections.get("run", {})}})


@pytest.mark.parametrize(
    ("section", "changed"),
    [
        ("coordinator", {"bind": "tcp://127.0.0.1:5555"}),
        ("coordinator", {"bind": "tcp://10.0.0.1:5555", "keys": "keys"}),
        ("server", {"bind": "tcp://10.0.0.1:*"}),
        ("run", {"steps": 99}),
        ("trainer", {"nproc": 4, "tp": 2, "pp": 2, "recompute": True, "threads": 2}),
        ("trainer", {"nproc": 4, "tp": 2, "ep": 2, "etp": 1}),
    ],
)
def test_a_resumed_run_may_be_elsewhere_and_longer_and_its_trainer_of_other_ranks(
    tmp_path: Path, section: str, changed: dict[str, Any]
) -> None:
    prepare_run_dir(run_in(tmp_path), resume=False)
    moved = run_in(tmp_path, **{section: changed})
    prepare_run_dir(moved, resume=True)
    assert load_config(tmp_path / "r/config.json") == moved  # which the workers of other machines are given
    prepare_run_dir(run_in(tmp_path), resume=True)


@pytest.mark.parametrize(
    ("section", "changed"),
    [
        ("coordinator", {"max_retries": 9}),
        ("server", {"max_model_len": 99}),
        ("run", {"seed": 5}),
        ("trainer", {"dtype": "bfloat16"}),
    ],
)
def test_a_resumed_run_is_no_other_run(tmp_path: Path, section: str, changed: dict[str, Any]) -> None:
    prepare_run_dir(run_in(tmp_path), resume=False)
    before = json.loads((tmp_path / "r/config.json").read_text())
    with pytest.raises(ConfigError, match=rf"with other settings: {section} differ from .* only run.steps"):
        prepare_run_dir(run_in(tmp_path, **{section: changed}), resume=True)
    assert json.loads((tmp_path / "r/config.json").read_text()) == before
