import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from simulated import cluster_of

from agentgym.config import Config
from agentgym.config_file import load_config
from agentgym.simulation.sizing import size

README = (Path(__file__).parents[2] / "README.md").read_text()
EVEN: dict[str, Any] = {"turns": 4, "answer_tokens": 50, "env_seconds": 0.1, "tokens_per_second": 100.0}


def sized(config: Config, steps: int) -> list[str]:
    """The lines of `agentgym simulate`."""
    terminal = io.StringIO()
    size(config, steps=steps, console=Console(file=terminal, width=200, soft_wrap=True))
    return terminal.getvalue().splitlines()


def rows(lines: list[str]) -> dict[str, list[float]]:
    """The numbers in the lines of a table, by what was changed."""
    found = re.findall(r"^(.*?\S)  +(\d.*)$", "\n".join(lines[2:]), re.MULTILINE)
    return {name: [float(cell.strip("%")) for cell in cells.split()] for name, cells in found}


def test_the_example_of_the_readme_is_what_the_command_prints(tmp_path: Path) -> None:
    section = README.split("## Simulate a cluster")[1].split("\n## ")[0]
    (example,) = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    (printed,) = re.findall(r"```\n\$ agentgym simulate cluster.toml\n(.*?)```", section, re.DOTALL)
    (tmp_path / "cluster.toml").write_text(example)
    lines = sized(load_config(tmp_path / "cluster.toml"), steps=20)
    assert lines[:2] == printed.splitlines()[:2]
    found, said = rows(lines), rows(printed.splitlines())
    assert found.keys() == said.keys()
    assert len(said) == 7
    for name, (seconds, *_) in said.items():
        assert found[name][0] == pytest.approx(seconds, rel=0.15), name
    assert lines[-1].split(";")[0] == printed.splitlines()[-1].split(";")[0]


@pytest.mark.parametrize(
    ("slow", "bottleneck"),
    [
        ({"trained_tokens_per_second": 300.0}, "the trainer"),
        ({"tokens_per_second": 1.0, "tokens_per_second_full": 5.0}, "the policy servers"),
        ({"env_seconds": 20.0}, "the environment"),
    ],
)
def test_what_is_slow_is_the_bottleneck(slow: dict[str, float], bottleneck: str) -> None:
    config = cluster_of(workers={"slots": 20}, simulation={**EVEN, "step_seconds": 0.1, **slow})
    assert sized(config, steps=8)[-1].startswith(f"bottleneck: {bottleneck};")


def test_too_few_slots_are_the_bottleneck_of_slow_environments() -> None:
    config = cluster_of(workers={"count": 1, "slots": 5}, simulation={**EVEN, "env_seconds": 2.0})
    assert sized(config, steps=8)[-1].startswith("bottleneck: the workers;")


def test_a_variant_that_does_not_go_on_says_why_and_the_others_are_there() -> None:
    turns = {"turns": "lognormal(4, 0.8)", "env_seconds": 5.0}  # of many plays one is long
    config = cluster_of(
        rollout={"max_staleness": 1}, coordinator={"step_timeout": 110.0}, simulation={**EVEN, **turns}
    )
    *_, last, verdict = lines = sized(config, steps=8)
    assert re.match(r"max_staleness 0 +does not go on: no progress for 110 s: \d+ episodes", last)
    assert len(rows(lines)) == 6
    assert verdict.startswith("bottleneck: ")


def test_deaths_are_counted(tmp_path: Path) -> None:
    config = cluster_of(simulation={**EVEN, "env_seconds": 5.0, "worker_crashes": 60.0})
    assert re.search(
        r"^died, as configured: \w*[Ww]orker \d+", "\n".join(sized(config, steps=8)), re.MULTILINE
    )
