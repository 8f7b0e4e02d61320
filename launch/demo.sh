#!/usr/bin/env bash
# The whole story on two CPU processes: pretrain a tiny model, train it on its own rollouts, compare before and after.
#   launch/demo.sh [directory]     default: outputs/demo/<timestamp>; it must be new
#   PYTHON=<path>                  interpreter; default: that of .venv
# Each step is a command that also works alone; it is shown as it starts. Interrupting one ends the demo; what was
# finished before stays in the directory.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
dir="${1:-outputs/demo/$(date +%Y-%m-%d_%H-%M-%S)}"
export NPROC="${NPROC:-2}" CUDA_VISIBLE_DEVICES=
export PYTHON="${PYTHON:-$root/.venv/bin/python}"

if [ -e "$dir" ]; then
    echo "error: $dir: is there already; name another directory, or none" >&2
    exit 1
fi

started=$SECONDS
step() {
    printf '\n== %s\nlaunch/torchrun.sh' "$1"
    shift
    printf ' %q' "$@"
    printf '\n'
    "$root/launch/torchrun.sh" "$@"
}
checkpoint_of() { echo "$1/checkpoints/$(cat "$1/checkpoints/latest")"; }

step "1/4 pretrain: language model and MTP layer" pretrain experiment=demo run_dir="$dir/pretrain"

step "2/4 grpo: rollouts with two drafts a step, rewards, policy steps" grpo experiment=demo_grpo \
    checkpoint.load="$(checkpoint_of "$dir/pretrain")" run_dir="$dir/grpo"

trained="$(checkpoint_of "$dir/grpo")"
for drafts in 0 2; do
    step "$((3 + drafts / 2))/4 generate: the trained policy, $drafts drafts a step" generate \
        checkpoint.load="$trained" prompts="$dir/grpo/data/held_out.jsonl" output="$dir/generate_k$drafts/samples.jsonl" \
        rollout.speculative_tokens=$drafts sampling.samples_per_prompt=8 sampling.max_new_tokens=16 \
        model.dtype=fp32 parallel=tp2_ep2 run_dir="$dir/generate_k$drafts"
done

"$PYTHON" "$root/launch/demo_summary.py" "$dir" $((SECONDS - started))
