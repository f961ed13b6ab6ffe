#!/usr/bin/env bash
# Writes the locked requirements anew: exact versions and hashes of everything but torch, for every platform.
# Knows which lock file carries what; must not know how they are installed (setup.sh, Dockerfile).
# Usage: scripts/lock.sh [--upgrade]
set -euo pipefail
cd "$(dirname "$0")/.."

tool=$(mktemp -d)
trap 'rm -rf "$tool"' EXIT
python3 -m venv "$tool/venv"
"$tool/venv/bin/pip" install --quiet uv
# torch is chosen by requirements/torch-{cpu,gpu}.txt: here it is made to be wanted nowhere.
echo "torch ; sys_platform == 'none'" >"$tool/overrides.txt"
echo "triton ; sys_platform == 'none'" >>"$tool/overrides.txt"

compile() {
    local output=$1
    shift
    "$tool/venv/bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes \
        --overrides "$tool/overrides.txt" --no-emit-package torch --no-emit-package triton \
        --custom-compile-command scripts/lock.sh --output-file "$output" \
        pyproject.toml requirements/torch.in "$@"
}
compile requirements/runtime.txt "$@"
compile requirements/dev.txt --extra dev --extra demo --constraints requirements/runtime.txt "$@"
