#!/usr/bin/env bash
# One node, one process per GPU: launch/torchrun.sh <verb> [overrides]
#   NPROC=<n>       processes; default: the number of visible GPUs. Without a GPU it must be given.
#   PYTHON=<path>   interpreter; default: that of .venv
# Exit code 75: stopped by SIGTERM, SIGUSR1 or Ctrl-C, with a checkpoint; the same RUN_DIR goes on.
set -euo pipefail

# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
require_verb launch/torchrun.sh "$@"

# One directory for all ranks, decided here, once. A run_dir= among the overrides wins.
export RUN_DIR="${RUN_DIR:-outputs/$1/$(date +%Y-%m-%d_%H-%M-%S)}"
exec "$root/launch/node.sh" alone "$@"
