#!/usr/bin/env bash
# The default run under fire: scripts/chaos.sh [--seconds 600] [--kills 50] [--gap 6] [--seed 1] [CONFIG] [section.key=value ...]
#
# Workers, policy servers, the trainer and the coordinator are killed, stopped and woken, fed nonsense, and find the
# disk full, at random times that the seed determines. Then the run is asked to stop, and what it left is audited.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
"$root/scripts/setup.sh"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
exec "${AGENTGYM_VENV:-$root/.venv}/bin/python" "$root/tests/chaos.py" "$@"
