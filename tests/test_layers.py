"""Imports point downward, heavy packages stay in their places, and no file is too long for one sitting."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 400
MAX_FUNCTION_LINES = 60
PACKAGES = {
    "agentgym": ROOT / "agentgym",
    "agentgym_envs": ROOT / "envs/agentgym_envs",
    "agentgym_trainers": ROOT / "trainers/agentgym_trainers",
}

# A module of the core may import only modules of a row above its own.
LAYERS = [
    # what everything may use
    "busy errors lifeline log memory messages protocol scratch section",
    "algorithm_config policy_config trainer_config simulation_config weights",
    # records, settings, what crosses a socket
    "config episode keys model registry spaces",
    "adapters wire",
    "segments",
    "batch door busy config_file episode_codec prefix ratings tensorboard",
    "metrics",
    "catalog episode_json routes",
    "origins",
    "episode_print",
    "evaluation.stats",
    "evaluation.summary",
    # environments and their tools
    "env rewards tool_schema",
    "tool_runner wrappers.referee policy.answers policy.tool_text",
    "tools wrappers.seated wrappers.single",
    "toolsets.calculator toolsets.mcp toolsets.python toolsets.sql wrappers.aec wrappers.parallel",
    # policies
    "policy.client policy.scripted policy.template policy.vllm_plugin tiny_model upcycle",
    "policy.endpoint policy.link policy.suffix policy.vllm_worker",
    "policy.engine policy.tokens",
    "policy.patterns policy.server",
    # the process that plays
    "worker.driver",
    "worker.table",
    "worker.table_codec worker.threads",
    "worker.zygote",
    "worker.inline worker.isolated",
    "worker.pool worker.seat",
    "worker.rollout worker.seating",
    "worker.human worker.local_server",
    "worker.play worker.process",
    # what environments promise
    "check.subject",
    "check.rule",
    "check.rules check.tool_rules check.worker_rules",
    "check.run",
    # the process that joins them
    "advantages.returns",
    "advantages.plays advantages.running advantages.shaping advantages.teams advantages.turns",
    "advantages.menu coordinator.groups coordinator.leases coordinator.lineup coordinator.peers coordinator.pools "
    "coordinator.clock coordinator.schedule coordinator.supervisor",
    "coordinator.concurrency coordinator.ledger",
    "coordinator.store",
    "show coordinator.assemble coordinator.launch coordinator.scoring coordinator.serving",
    "coordinator.evaluations",
    "coordinator.surroundings coordinator.forks",
    "coordinator.dispatcher coordinator.report",
    "coordinator.status",
    "coordinator.training",
    "coordinator.process",
    # the same in virtual time
    "simulation.clock simulation.engine simulation.ledger simulation.quantity",
    "simulation.network simulation.play",
    "simulation.site",
    "simulation.machine simulation.measure",
    "simulation.processes",
    "simulation.cluster",
    # commands
    "coordinator.train evaluation.plan replay.source",
    "evaluation.run replay.record simulation.sizing",
    "replay.run",
    "cli",
    "__main__",
]

# What one package may import of another; everything else there is out of its sight.
ALLOWED = {
    ("agentgym", "agentgym_envs"): "",
    ("agentgym", "agentgym_trainers"): "",
    ("agentgym_envs", "agentgym"): (
        "env errors messages registry rewards spaces tool_runner tool_schema tools policy.scripted "
        "toolsets toolsets.calculator toolsets.mcp toolsets.python toolsets.sql "
        "wrappers.aec wrappers.parallel wrappers.referee wrappers.single"
    ),
    ("agentgym_envs", "agentgym_trainers"): "",
    ("agentgym_trainers", "agentgym"): (
        "adapters algorithm_config batch busy config config_file episode errors keys lifeline log model protocol "
        "origins segments trainer_config weights wire"
    ),
    ("agentgym_trainers", "agentgym_envs"): "",
}

# The only places where these packages are imported, at the top of a file or inside a function.
HEAVY = {
    "vllm": "agentgym.policy.engine agentgym.policy.vllm_plugin agentgym.policy.vllm_worker",
    "torch": "agentgym.policy.engine agentgym.policy.vllm_worker agentgym_trainers",
    "transformers": "agentgym_trainers",
    "megatron": "agentgym_trainers.megatron",
    # Nothing that crosses a socket or lies in a file is unpickled; one copies objects inside of its process.
    "pickle": "agentgym_envs.tau2.domains",
    "cloudpickle": "",
    "dill": "",
    "marshal": "",
    "shelve": "",
}

# `except Exception` and its like, per module: only where a process meets code that is not ours. Never more.
BROAD_EXCEPTS = {
    "agentgym.check.subject": 1,
    "agentgym.coordinator.lineup": 1,
    "agentgym.registry": 1,
    "agentgym.rewards": 1,
    "agentgym.tool_runner": 2,
    "agentgym.toolsets.mcp": 2,
    "agentgym.worker.process": 1,
    "agentgym.worker.table": 1,
    "agentgym_envs.reasoning_gym.verifier": 1,
    "agentgym_trainers.megatron.main": 1,
}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the three packages with its file."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *parts)).removesuffix(".__init__"), path


MODULES = dict(modules())
LEVEL = {f"agentgym.{name}": row for row, names in enumerate(LAYERS) for name in names.split()}


def imported(path: Path) -> set[str]:
    """The full names of what a file imports, wherever in the file it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{path}:{node.lineno}: relative import"
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            # `from package import module` imports the module, `from module import name` what stands before.
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in whole}
    return found


def within(name: str, package: str) -> bool:
    """Whether a dotted name is the package or lies in it."""
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("name", [name for name in MODULES if name != "agentgym"])
def test_imports_point_downward(name: str) -> None:
    for other in imported(MODULES[name]):
        assert other != "agentgym", f"{name} imports the root; import the module that defines the name"
        if name in LEVEL and other in LEVEL:
            assert LEVEL[other] < LEVEL[name], f"{name} -> {other}: it stands in no row above"


@pytest.mark.parametrize("name", MODULES)
def test_packages_see_only_what_they_may(name: str) -> None:
    mine = name.split(".")[0]
    for other in imported(MODULES[name]):
        theirs = other.split(".")[0]
        if theirs in PACKAGES and theirs != mine:
            allowed = {f"{theirs}.{part}" for part in ALLOWED[mine, theirs].split()}
            assert other in allowed, f"{name} -> {other}"
        places = HEAVY.get(theirs)
        assert places is None or any(within(name, place) for place in places.split()), f"{name} -> {other}"


@pytest.mark.parametrize("name", MODULES)
def test_no_library_is_asked_to_unpickle(name: str) -> None:
    # torch.distributed passes objects as pickles. (torchrun keeps its own state as one, in a file of its user's.)
    objects = r"(gather|broadcast|scatter|send|recv)_object"
    assert not re.search(rf"torch\.load\(|allow_pickle|{objects}", MODULES[name].read_text())


def test_every_module_of_the_core_has_a_row() -> None:
    core = {n for n, path in MODULES.items() if within(n, "agentgym") and path.name != "__init__.py"}
    assert core == set(LEVEL)


def test_no_file_is_too_long() -> None:
    paths = [*MODULES.values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.*")]
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths if is_text(path)
    }
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def is_text(path: Path) -> bool:
    """Whether a file is one that people read."""
    return path.suffix in (".py", ".sh", ".toml", ".md")


def test_no_function_is_too_long() -> None:
    long = {
        f"{name}.{node.name}": lines
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_broad_excepts_only_grow_fewer() -> None:
    assert {name: count for name, path in MODULES.items() if (count := broad_excepts(path))} == BROAD_EXCEPTS


def broad_excepts(path: Path) -> int:
    """Count the handlers of a file that catch Exception, BaseException or everything."""
    broad = {"Exception", "BaseException"}
    return sum(
        node.type is None or bool(broad & {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)})
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
    )
