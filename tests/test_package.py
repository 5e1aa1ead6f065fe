"""What a user meets first: the public names, quick imports, and files that mean the same on every machine."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentgym
from agentgym.config_file import load_config

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "vllm", "megatron", "transformers")
# These run inside vLLM's processes; everything else of the core is light.
HEAVY_MODULES = {"agentgym.policy.engine", "agentgym.policy.vllm_worker"}

PUBLIC_NAMES = [
    "AECEnv",
    "AgentGymError",
    "ConfigError",
    "Context",
    "EndReason",
    "Env",
    "EnvError",
    "EnvSpec",
    "Episode",
    "Message",
    "ParallelEnv",
    "ScriptedPolicy",
    "SeededPolicy",
    "TextAECWrapper",
    "TextParallelWrapper",
    "TextWrapper",
    "ToolEnv",
    "ToolError",
    "ToolRunner",
    "Toolset",
    "Trajectory",
    "Turn",
    "__version__",
    "assistant",
    "list_envs",
    "make",
    "register",
    "reward",
    "spec",
    "system",
    "tool",
    "user",
]

# What must not stand in a file: it would work here and nowhere else, or say that something is not done yet.
FORBIDDEN_TEXT = {
    "a package registry's address": r"(?:pypi|pythonhosted|pytorch|anaconda|npmjs)\.(?:org|com|dev)",
    "an index option": r"--(?:extra-)?index-ur[l]|--find-link[s]",
    "a path of one machine": r"(?<![\w.}~-])/(?:work|home|root|opt|Users|mnt)/",
    "an open end": r"\b(?:TO[D]O|FIX[M]E|XX[X])\b",
}


def fresh_python(code: str) -> str:
    """Run code in an interpreter that has imported nothing yet, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def light_modules() -> list[str]:
    """The modules of the core that must load without the heavy packages."""
    paths = sorted((ROOT / "agentgym").rglob("*.py"))
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in paths}
    return sorted(names - HEAVY_MODULES)


def test_importing_the_core_loads_no_heavy_package() -> None:
    loaded = fresh_python(
        "import importlib, json, sys\n"
        "found = {}\n"
        f"for name in {light_modules()!r}:\n"
        "    importlib.import_module(name)\n"
        f"    for heavy in {HEAVY!r}:\n"
        "        heavy in sys.modules and found.setdefault(heavy, name)\n"
        "print(json.dumps(found))"
    )
    assert json.loads(loaded) == {}


def test_the_public_names_are_these() -> None:
    assert agentgym.__all__ == PUBLIC_NAMES
    assert all(hasattr(agentgym, name) for name in PUBLIC_NAMES)


def test_help_answers_without_heavy_packages() -> None:
    output = fresh_python(
        "import sys\n"
        "from agentgym.cli import main\n"
        "sys.argv = ['agentgym', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"assert not set({HEAVY!r}) & set(sys.modules)"
    )
    assert "train" in output


@pytest.mark.parametrize(
    "path", sorted((ROOT / "scripts/configs").glob("*.toml")), ids=lambda path: path.stem
)
def test_every_shipped_configuration_is_valid(path: Path) -> None:
    assert load_config(path).run.name.replace("-", "_") == path.stem


def test_every_package_of_the_lock_has_one_version() -> None:
    lines = (ROOT / "scripts/cpu-lock.txt").read_text().splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in packages if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", line)] == []
    names = [re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in packages]
    assert len(names) == len(set(names))


def tracked_texts() -> Iterator[Path]:
    """The text files of the repository; what a run or a build makes is left out."""
    folders = ("agentgym", "envs", "trainers", "scripts", "tests", ".ci")
    everywhere = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    for path in [*everywhere, *ROOT.glob("*.*"), ROOT / "LICENSE"]:
        hidden = "__pycache__" in path.parts or path.name == ".git"  # a file in a worktree
        if path.is_file() and not hidden and path.suffix != ".png":
            yield path


def test_no_file_belongs_to_one_machine_or_is_unfinished() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {what}: {line.strip()}"
        for path in tracked_texts()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for what, pattern in FORBIDDEN_TEXT.items()
        if re.search(pattern, line)
    ]
    assert found == []
