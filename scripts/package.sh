#!/usr/bin/env bash
# Build the sdist and the wheel into dist/, install the wheel with the core's dependencies only (no torch, no vllm)
# in an environment of its own, outside the tree, and try it there.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
"$root/scripts/setup.sh"
python=$(realpath -s "${AGENTGYM_VENV:-$root/.venv}")/bin/python
outside=$(mktemp -d)
trap 'rm -rf "$outside"' EXIT

cd "$root"
rm -rf dist
"$python" -m hatchling build
"$python" -m venv "$outside/venv"
cd "$outside"
venv/bin/python -m pip -qq --disable-pip-version-check install -c "$root/scripts/cpu-lock.txt" "$root"/dist/*.whl
venv/bin/agentgym --help >help.txt
venv/bin/python - <<'PYTHON'
import importlib.util
import agentgym, agentgym.cli, agentgym_envs, agentgym_trainers

for name in ("torch", "vllm", "megatron", "transformers"):
    assert importlib.util.find_spec(name) is None, f"the core's dependencies pull in {name}"
for name in ("envs", "trainers", "tests", "scripts"):
    assert importlib.util.find_spec(name) is None, f"the wheel installs a package called {name}"
print("package: the wheel works alone:", agentgym.__version__)
PYTHON
