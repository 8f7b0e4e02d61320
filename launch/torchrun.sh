#!/usr/bin/env bash
# One node, one process per GPU: launch/torchrun.sh <verb> [overrides]
#   NPROC=<n>       processes; default: the number of visible GPUs. Without a GPU it must be given.
#   PYTHON=<path>   interpreter; default: that of .venv
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=launch/env.sh
source "$root/launch/env.sh"

fail() {
    echo "error: $*" >&2
    exit 1
}

verbs="$(cd "$root/conf" && printf '%s ' ./*.yaml | sed 's|\./||g; s|\.yaml||g')"
[ $# -ge 1 ] || fail "usage: launch/torchrun.sh <verb> [overrides]; verbs: $verbs"
verb="$1"
shift
[ -f "$root/conf/$verb.yaml" ] || fail "verb: '$verb' is unknown; use one of: $verbs"

python="${PYTHON:-$root/.venv/bin/python}"
command -v "$python" >/dev/null || fail "PYTHON: '$python' does not run; make install, or set PYTHON"

visible_gpus() {
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
    else
        echo 0
    fi
}

nproc="${NPROC:-$(visible_gpus)}"
[[ "$nproc" =~ ^[0-9]+$ ]] || fail "NPROC: '$nproc' is not a number of processes"
[ "$nproc" -ge 1 ] || fail "NPROC: no GPU is visible; give the number of CPU processes, such as NPROC=2"

# One directory for all ranks, decided here, once. A run_dir= among the overrides wins.
export RUN_DIR="${RUN_DIR:-outputs/$verb/$(date +%Y-%m-%d_%H-%M-%S)}"
# The caller's directory stays current, so that relative paths mean what they say.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# --standalone lets the launcher choose a free port.
exec "$python" "$root/launch/elastic.py" --standalone --nproc-per-node "$nproc" -m "recipes.$verb" "$@"
