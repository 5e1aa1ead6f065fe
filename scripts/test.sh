#!/usr/bin/env bash
# Run the tests: scripts/test.sh [pytest arguments], paths relative to the repository root.
#
# Without arguments all of them, two files at a time.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
"$root/scripts/setup.sh"
venv=$(realpath -s "${AGENTGYM_VENV:-$root/.venv}")
cd "$root"
# Nothing is fetched or reported; one thread per process, since the tests run several processes at once.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 OMP_NUM_THREADS=1
# The tests start hundreds of processes, each of which would compile our modules again.
unset PYTHONDONTWRITEBYTECODE
(($#)) || set -- --numprocesses 2 --dist loadfile --no-loadscope-reorder
exec "$venv/bin/python" -m pytest "$@"
