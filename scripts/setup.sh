#!/usr/bin/env bash
# Makes the virtual environment from the lock files: the CPU build of torch, or the CUDA build.
# Idempotent: does nothing when the environment is already what the lock files say.
# Must not know what is run in it afterwards.
#
# Usage: scripts/setup.sh [cpu|gpu]      PYTHON=python3.12 VENV=.venv may be set.
set -euo pipefail
cd "$(dirname "$0")/.."

flavour=${1:-cpu}
venv=${VENV:-.venv}
python=${PYTHON:-python3}
cpu_index=https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

fail() {
    echo "setup: $*" >&2
    exit 1
}

[[ $flavour == cpu || $flavour == gpu ]] || fail "the build of torch is 'cpu' or 'gpu', not '$flavour'"
command -v "$python" >/dev/null || fail "$python was not found; install Python 3.11 or newer (Debian, Ubuntu: apt-get install python3 python3-venv)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old; Python 3.11 or newer is needed (name one with PYTHON=python3.12)"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "this Python cannot make virtual environments (Debian, Ubuntu: apt-get install python3-venv)"

stamp=$venv/.installed
wanted=$({
    echo "$flavour $("$python" --version) $PWD"
    cat pyproject.toml requirements/*.txt "$0"
} | sha256sum)
if [[ -x $venv/bin/python && -f $stamp && $(cat "$stamp") == "$wanted" ]]; then
    exit 0
fi

# A folder whose interpreter no longer runs (moved, or made by a Python that is gone) is made anew.
"$venv/bin/python" -c '' 2>/dev/null || "$python" -m venv --clear "$venv"
pip=("$venv/bin/python" -m pip)

echo "setup: installing the locked packages into $venv ($flavour)" >&2
# The locked set is complete, so nothing is resolved: no package can pull in another build of torch.
"${pip[@]}" install -qq --no-deps --require-hashes -r requirements/dev.txt

if [[ $flavour == cpu ]]; then
    # First wherever this machine's pip already looks (a local wheel, a mirror), then the CPU index.
    "${pip[@]}" install -qq --no-deps -r requirements/torch-cpu.txt 2>/dev/null ||
        "${pip[@]}" install --no-deps --extra-index-url "$cpu_index" -r requirements/torch-cpu.txt ||
        fail "the CPU build of torch could be had neither from pip's own sources nor from $cpu_index"
else
    "${pip[@]}" install -r requirements/torch-gpu.txt
fi
"${pip[@]}" install -qq --no-deps --no-build-isolation --editable .

cuda=$("$venv/bin/python" -c 'import torch; print(torch.version.cuda or "")')
if [[ $flavour == cpu ]]; then
    [[ -z $cuda ]] || fail "torch in $venv is a CUDA $cuda build; remove $venv and run this again"
    ! "${pip[@]}" list 2>/dev/null | grep -q '^nvidia-' ||
        fail "$venv holds CUDA packages (nvidia-*); remove $venv and run this again"
else
    [[ -n $cuda ]] || fail "torch in $venv is a CPU build; remove $venv and run this again"
fi
"${pip[@]}" check >&2
echo "$wanted" >"$stamp"
