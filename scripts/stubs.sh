#!/usr/bin/env bash
# Writes python/kvstrata/_native.pyi anew from the binding crate. With --check it changes nothing
# and fails when the file is not what would be written.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"

made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
maturin generate-stubs --quiet --features stubs --out "$made"
stub=$made/kvstrata/_native.pyi
ruff check --config pyproject.toml --silent --exit-zero --fix --unsafe-fixes "$stub"
ruff format --config pyproject.toml --silent "$stub"
if [[ ${1:-} == --check ]]; then
    diff -u python/kvstrata/_native.pyi "$stub"
else
    cp "$stub" python/kvstrata/_native.pyi
fi
