#!/usr/bin/env bash
# From a bare machine to a training run: scripts/train_agents.sh [CONFIG] [section.key=value ...]
#
#   scripts/train_agents.sh                                          teach a tiny model to guess numbers
#   scripts/train_agents.sh scripts/configs/tictactoe.toml run.steps=50
#   scripts/train_agents.sh my_run.toml env.id=my_module:MyEnv       from the folder with my_run.toml and my_module.py
#
# Paths are relative to the folder it is called from; a CONFIG that is not there is looked for in the repository.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
agentgym=${AGENTGYM_VENV:-$root/.venv}/bin/agentgym
tiny=runs/models/tiny-moe

config=scripts/configs/guess_number.toml
if (($#)) && [[ $1 != *=* && $1 != -* ]]; then
    config=$1
    shift
fi
[[ -f $config ]] || config=$root/$config
[[ -f $config ]] || { echo "train_agents: there is no ${config#"$root"/} here or in $root" >&2; exit 2; }

"$root/scripts/setup.sh"
# The tiny model has random weights: the run's warm-up and training are all it ever learns.
if [[ "$(<"$config") $*" == *"$tiny"* && ! -f $tiny/model.safetensors ]]; then
    "$agentgym" init-model --preset tiny-moe "$tiny"
fi
exec "$agentgym" train "$config" "$@"
