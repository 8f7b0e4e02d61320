#!/usr/bin/env bash
# The processes of one node: launch/node.sh alone|slurm <verb> [overrides]. Started by torchrun.sh and slurm.sbatch.
#   alone   the only node; the launcher chooses a free port
#   slurm   one of the job's nodes, by its place in the job; MASTER_ADDR and MASTER_PORT are the same on all
set -euo pipefail

# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=launch/env.sh
source "$root/launch/env.sh"

case "${1:-}" in
    alone) rendezvous=(--standalone) ;;
    slurm)
        rendezvous=(--nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID")
        rendezvous+=(--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
        ;;
    *) fail "usage: launch/node.sh alone|slurm <verb> [overrides]" ;;
esac
verb="$2"
shift 2

python="${PYTHON:-$root/.venv/bin/python}"
command -v "$python" >/dev/null || fail "PYTHON: '$python' does not run; make install, or set PYTHON"

nproc="${NPROC:-$(visible_gpus)}"
[[ "$nproc" =~ ^[0-9]+$ ]] || fail "NPROC: '$nproc' is not a number of processes"
[ "$nproc" -ge 1 ] || fail "NPROC: no GPU is visible; give the number of CPU processes, such as NPROC=2"

# The caller's directory stays current, so that relative paths mean what they say.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

exec "$python" "$root/launch/elastic.py" "${rendezvous[@]}" --nproc-per-node "$nproc" -m "recipes.$verb" "$@"
