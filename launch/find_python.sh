#!/usr/bin/env bash
# Prints the path of a Python 3.12 that runs and can make virtual environments; else says how to get one.
set -euo pipefail

try() {
    # A pyenv shim may exist and refuse to run, so ask the interpreter itself for its path.
    "$@" -c 'import sys, venv, ensurepip
assert sys.version_info[:2] == (3, 12)
print(sys.executable)' 2>/dev/null
}

pyenv_pythons() {
    if command -v pyenv >/dev/null; then
        pyenv prefix "$(pyenv latest 3.12 2>/dev/null)" 2>/dev/null | sed 's|$|/bin/python|' || true
    fi
    for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
        find "$root/versions" -maxdepth 1 -name '3.12.*' 2>/dev/null | sort -rV | sed 's|$|/bin/python|' || true
    done
}

try python3.12 && exit 0
for candidate in $(pyenv_pythons); do
    try "$candidate" && exit 0
done
try python3 && exit 0

cat >&2 <<'HELP'
error: no Python 3.12 that runs and can make virtual environments was found. Get one with, for example:
  pyenv install 3.12
  apt-get install python3.12 python3.12-venv
HELP
exit 1
