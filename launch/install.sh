#!/usr/bin/env bash
# Installs the package and its dependencies into a virtual environment: launch/install.sh <venv>
# CONSTRAINTS=<file> pins versions, such as those of launch/constraints-h200.txt.
# Does nothing when that was done already for this setup.cfg, these constraints and this checkout.
set -euo pipefail

venv="${1:?usage: launch/install.sh <venv>}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# The stamps are written last, so a broken installation is never taken for a whole one.
dependencies="$venv/.dependencies"
source="$venv/.source"
constraints="${CONSTRAINTS:-}"
if [ -n "$constraints" ] && [ ! -f "$constraints" ]; then
    echo "error: CONSTRAINTS=$constraints: no such file" >&2
    exit 1
fi
wanted="$(cat "$root/setup.cfg" ${constraints:+"$constraints"} | sha256sum | cut -d' ' -f1)"
needed_gb=8

holds() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

if ! holds "$dependencies" "$wanted"; then
    python="$("$root/launch/find_python.sh")"
    mkdir -p "$venv"
    free_gb="$(df -Pk "$venv" | awk 'NR == 2 { print int($4 / 1048576) }')"
    echo "Installing into $venv: about 5.5 GB (most of it torch with CUDA), 3 to 6 minutes; free there: $free_gb GB."
    if [ "$free_gb" -lt "$needed_gb" ] && [ ! -f "$dependencies" ]; then
        echo "error: $venv: $free_gb GB free, at least $needed_gb GB needed; make room or give VENV=<dir>" >&2
        exit 1
    fi
    rm -f "$dependencies" "$source"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check \
        ${constraints:+--constraint "$(realpath "$constraints")"} -e "${root}[dev]"
    echo "$root" >"$source"
    echo "$wanted" >"$dependencies"
fi

if ! holds "$source" "$root"; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -e "$root"
    echo "$root" >"$source"
fi
