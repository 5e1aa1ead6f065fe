#!/usr/bin/env bash
# Make (or bring up to date) the CPU environment: .venv with scripts/cpu-lock.txt and this package in editable mode.
#
#   AGENTGYM_VENV=DIR   another place for the environment; the default is .venv in the repository root
#
# Nothing to do: answers at once. Safe to run twice at the same time and after an interrupted run.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
venv=$(realpath -m "${AGENTGYM_VENV:-$root/.venv}")
lock=$root/scripts/cpu-lock.txt

say() { echo "setup: $*"; }
fail() { printf 'setup: %s\n' "$@" >&2; exit 1; }
hash_of() { cat "$@" | sha256sum | cut -d ' ' -f 1; }

find_python() {
    local name
    for name in python3.11 python3 python; do
        if "$name" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "Python 3.11 was not found (looked for python3.11, python3 and python on the PATH)." \
        "The environment is locked for 3.11: install it and run this script again."
}

make_venv() {
    local python
    [[ -f $venv/pyvenv.cfg || -z $(ls -A "$venv") ]] ||
        fail "$venv exists and is not a virtual environment; remove it or set AGENTGYM_VENV."
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python lacks the modules venv and ensurepip; install them (the package python3.11-venv on Debian and Ubuntu)."
    say "making $venv with $python"
    "$python" -m venv --clear "$venv"
}

# pip writes RECORD last, so a package without it was cut off midway: forget it, and pip installs it again.
forget_half_installed() {
    local info
    for info in "$venv"/lib/python3.11/site-packages/*.dist-info; do
        [[ ! -d $info || -f $info/RECORD ]] || rm -r "$info"
    done
}

no_cpu_torch() {
    fail "$1" \
        "The CPU wheels of torch must be reachable by pip: set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index" \
        "(its address is in PyTorch's installation instructions) and run this script again."
}

install_lock() {
    local errors=$venv/setup-errors.txt
    say "installing $(grep -c '==' "$lock") packages from scripts/cpu-lock.txt (2 GB, a few minutes)"
    forget_half_installed
    # --no-compile: compiling every module would double the time, and a run imports a third of them.
    if ! "${pip[@]}" install --no-compile --no-deps -r "$lock" 2>&1 | tee "$errors" >&2; then
        ! grep -q 'No matching distribution found for torch==' "$errors" || no_cpu_torch "pip found no CPU build of torch."
        fail "pip failed, see above; run this script again to go on where it stopped."
    fi
    rm -f "$errors"
}

verify() {
    say "checking torch, vllm and megatron-core (compiles what a run imports)"
    "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' ||
        no_cpu_torch "the torch that pip took is not a working CPU build."
    local modules="vllm.v1.engine.async_llm, vllm.v1.worker.cpu_worker, vllm.model_executor.models.qwen3_moe"
    env -u PYTHONDONTWRITEBYTECODE VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 \
        "$venv/bin/python" -W ignore -c "import $modules, megatron.core.models.gpt" ||
        fail "vllm or megatron-core cannot be imported, see above."
}

# The editable install holds the repository's path, so a copied environment is installed again.
wanted="$(hash_of "$lock") $(hash_of "$root/pyproject.toml" "$root/agentgym/__init__.py") $root"
stamp=$venv/setup-stamp.txt
up_to_date() { [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; }

! up_to_date || exit 0
mkdir -p "$venv"
exec 9<"$venv"
flock -n 9 || { say "another setup is working in $venv; waiting for it" && flock 9; }
! up_to_date || exit 0

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    make_venv
elif [[ ! -d $venv/lib/python3.11 ]]; then
    fail "$venv was made with another Python than 3.11; remove it or set AGENTGYM_VENV."
fi
pip=("$venv/bin/python" -m pip -qq --disable-pip-version-check --no-input)
# Without a stamp an interrupted run starts again here; pip skips what is installed.
installed=$(cut -d ' ' -f 1 "$stamp" 2>/dev/null || true)
rm -f "$stamp"
if [[ $installed != "${wanted%% *}" ]]; then
    install_lock
    verify
fi
"${pip[@]}" install --no-deps --no-build-isolation --editable "$root"
echo "$wanted" >"$stamp"
say "ready in $SECONDS s: $venv"
