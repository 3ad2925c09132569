#!/usr/bin/env bash
# Builds the wheel that is published, into dist/: linked by zig (from PyPI) against glibc 2.17, so that
# it installs on any x86-64 Linux of the last ten years.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

scripts/env.sh tools
"$VENV_PYTHON" -m pip install --quiet ziglang==0.16.0
rm -rf dist
registry=${CARGO_HOME:-$HOME/.cargo}/registry/src
export RUSTFLAGS="${RUSTFLAGS:-} --remap-path-prefix=$registry=registry --remap-path-prefix=$ROOT=kvstrata"
PATH=$VENV/bin:$PATH "$VENV_PYTHON" -m maturin build --quiet --release --locked --strip --zig \
    --target x86_64-unknown-linux-gnu --compatibility manylinux2014 \
    --interpreter "$VENV_PYTHON" --out dist
"$VENV_PYTHON" -m zipfile --list dist/kvstrata-*.whl
