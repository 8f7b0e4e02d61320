# shellcheck shell=bash
# What the launch scripts share. Sourced.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() {
    echo "error: $*" >&2
    exit 1
}

# require_verb <script> [verb ...]: refuses a command line without a known verb.
require_verb() {
    local verbs script="$1"
    shift
    verbs="$(cd "$root/conf" && printf '%s ' ./*.yaml | sed 's|\./||g; s|\.yaml||g')"
    [ $# -ge 1 ] || fail "usage: $script <verb> [overrides]; verbs: $verbs"
    [ -f "$root/conf/$1.yaml" ] || fail "verb: '$1' is unknown; use one of: $verbs"
}

# The number of GPUs that a process started now would see.
visible_gpus() {
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
    else
        echo 0
    fi
}
