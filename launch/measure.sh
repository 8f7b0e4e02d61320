#!/usr/bin/env bash
# What speculation gives a checkpoint on prompts, end to end: doctor, generate with 0 and with 2 drafts a step, the
# acceptance that score predicts for the same samples, one table.
#   launch/measure.sh <checkpoint> <prompts.jsonl> [overrides of generate]
#   MEASURE_DIR=<directory>   where everything goes; default: outputs/measure/<timestamp>; it must be new
#   NPROC, PYTHON             as for launch/torchrun.sh
# On GPUs with Triton kernels in CUDA graphs, elsewhere in fp32 with torch kernels. Overrides of model.*, parallel.*
# and sampling.temperature hold for score too.
set -euo pipefail

# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[ $# -ge 2 ] || fail "usage: launch/measure.sh <checkpoint> <prompts.jsonl> [overrides of generate]"
checkpoint="$1" prompts="$2"
shift 2
dir="${MEASURE_DIR:-outputs/measure/$(date +%Y-%m-%d_%H-%M-%S)}"
[ ! -e "$dir" ] || fail "$dir: is there already; name another MEASURE_DIR, or none"
export PYTHON="${PYTHON:-$root/.venv/bin/python}"

gpus="$(visible_gpus)"
if [ "$gpus" -gt 0 ]; then
    decode=(rollout=speculative) forward=(model.kda=fla model.experts=grouped model.kernels=triton)
else
    decode=(model.dtype=fp32) forward=(model.dtype=fp32)
fi
for override in "$@"; do
    case "$override" in
        model.* | parallel.* | parallel=*) forward+=("$override") ;;
        sampling.temperature=*) forward+=("${override#sampling.}") ;;
    esac
done

step() {
    printf '\n== %s\n' "$*"
    "$root/launch/torchrun.sh" "$@"
}
generate() {
    local drafts="$1" name="$2"
    shift 2
    step generate "checkpoint.load=$checkpoint" "prompts=$prompts" "output=$dir/$name/samples.jsonl" \
        "run_dir=$dir/$name" "${decode[@]}" "rollout.speculative_tokens=$drafts" "$@"
}

# One process is enough to read headers.
NPROC=1 step doctor "checkpoint.load=$checkpoint"
for drafts in 0 2; do
    # Compiled kernels stay on disk, so that the timed process does not compile.
    [ "$gpus" -eq 0 ] || generate "$drafts" "warm_k$drafts" "$@" sampling.max_new_tokens=8
    generate "$drafts" "k$drafts" "$@"
done
step score "checkpoint.load=$checkpoint" "input=$dir/k2/samples.jsonl" report=acceptance "run_dir=$dir/score" "${forward[@]}"

"$PYTHON" "$root/launch/measure_summary.py" "$dir" "$checkpoint"
