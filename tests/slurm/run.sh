#!/usr/bin/env bash
# make test-slurm: tests/slurm/run.sh <python> [pytest options]
# Installs Debian's SLURM where it is missing; where it cannot be had, says why and passes.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
packages=(slurmctld slurmd slurm-client munge)
log="$(mktemp)"
trap 'rm -f "$log"' EXIT

skip() {
    echo "test-slurm: skipped: $*"
    exit 0
}

present() {
    local program
    for program in slurmctld slurmd sbatch munged; do
        PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null || return 1
    done
}

# A package index that cannot be reached must not hold up the tests.
install_packages() {
    export DEBIAN_FRONTEND=noninteractive
    timeout 60 apt-get update -qq && timeout 180 apt-get install -qq -y --no-install-recommends "${packages[@]}"
}

[ "$(id -u)" = 0 ] || skip "only root can start SLURM's daemons"
if ! present; then
    command -v apt-get >/dev/null || skip "SLURM is not installed, and there is no apt-get"
    echo "test-slurm: installing ${packages[*]}"
    if ! install_packages >"$log" 2>&1; then
        tail -n 5 "$log"
        skip "apt-get could not install ${packages[*]}"
    fi
fi

python="${1:?usage: tests/slurm/run.sh <python> [pytest options]}"
shift
OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" timeout --kill-after=30 600 "$python" -m pytest -m slurm -q tests/slurm "$@"
