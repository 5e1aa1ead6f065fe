#!/usr/bin/env bash
# Check what a reader sees: format, lint, types, and that imports point downward.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
"$root/scripts/setup.sh"
python=$(realpath -s "${AGENTGYM_VENV:-$root/.venv}")/bin/python
cd "$root"
"$python" -m ruff format --check .
"$python" -m ruff check .
"$python" -m mypy
"$python" -m pytest -q tests/test_layers.py
