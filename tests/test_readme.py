"""The README says what is: its settings are the settings, its example runs."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from builders import config_of
from pydantic_core import PydanticUndefined

from agentgym.config_file import all_keys
from agentgym.coordinator.report import COLUMNS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def settings_rows() -> list[str]:
    """The rows of the settings table, from the code."""
    rows = []
    for key, field in all_keys():
        default = "none" if field.default is None else f"`{json.dumps(field.default, default=str)}`"
        if field.default is PydanticUndefined:
            default = "required"
        rows.append(f"| `{key}` | {default} | {' '.join((field.description or '').split())} |")
    return rows


def test_the_settings_table_is_the_settings() -> None:
    table = README.split("## Settings")[1].split("\n\n")[1].splitlines()
    assert table[2:] == settings_rows()


def test_published_recipes_are_settings() -> None:
    table = README.split("## Algorithms")[1].split("\n\n")[2].splitlines()
    recipes = dict(re.fullmatch(r"\| (.*) \| `(.*)` \|", row).groups() for row in table[2:])
    assert len(recipes) > 10
    for name, text in recipes.items():
        given = tomllib.loads(f"settings = {{{text}}}")["settings"]
        config = config_of(**given)
        for section, values in given.items():
            assert getattr(config, section).model_dump().items() >= values.items(), name


def test_the_example_environment_plays(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my_env.py").write_text(example)
    command = [sys.executable, "-m", "agentgym", "play", "my_env:Backwards", "--policy", "teacher"]
    played = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert played.returncode == 0, played.stderr
    assert "Write the word" in played.stdout
    code = [line for line in example.splitlines() if line.strip()]
    assert len(code) <= 20


def test_every_source_file_is_in_the_tree() -> None:
    tree = README.split("## The tree, in reading order")[1].split("```")[1]
    for folder in ("agentgym", "trainers/agentgym_trainers"):
        for path in (ROOT / folder).rglob("*.py"):
            if not path.name.startswith("__"):
                assert re.search(rf"\b{re.escape(path.name)}\b", tree), path


def test_the_table_of_a_run_fits_a_terminal() -> None:
    assert sum(width + 1 for _, width in COLUMNS) <= 100


def test_every_benchmark_is_in_the_table() -> None:
    rows = re.findall(r"^\| `(scripts/bench/\w+\.py)` \| [^|]+ \|$", README, re.MULTILINE)
    assert sorted(rows) == sorted(
        f"scripts/bench/{path.name}" for path in (ROOT / "scripts/bench").glob("*.py")
    )
