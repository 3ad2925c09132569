#!/usr/bin/env bash
# Runs the groups of checks that are named, in this order, and stops at the first that fails:
#   scripts/test.sh [lint] [rust] [python] [engine] [long]
# The last line is a summary in pytest's words over all pytest runs of this call.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

REPORTS=$CACHE/reports
STEP=""
TIMES=()

# step NAME COMMAND...: runs one check and says how long it took.
step() {
    STEP=$1
    shift
    printf -- '--- %s\n' "$STEP"
    local start=$SECONDS
    "$@"
    TIMES+=("$(printf '%5d s  %s' $((SECONDS - start)) "$STEP")")
    STEP=""
}

finish() {
    local status=$?
    ((${#TIMES[@]} == 0)) || printf '%s\n' "--- seconds by step" "${TIMES[@]}"
    [[ -z $STEP ]] || printf -- '--- FAILED: %s\n' "$STEP"
    "$PYTHON" scripts/summary.py "$REPORTS" "$SECONDS" "$status" || true
    exit "$status"
}

# The step's own name becomes the name of its report.
run_pytest() { "$VENV_PYTHON" -m pytest --junit-xml="$REPORTS/${STEP// /-}.xml" -o junit_suite_name="$STEP" "$@"; }

with_vllm() { # with_vllm VERSION PATH ARGUMENT...
    local version=$1 path=$2
    shift 2
    PYTHONPATH=$path VLLM_TARGET_DEVICE=cpu HF_HUB_OFFLINE=1 KVSTRATA_TEST_VLLM=$version run_pytest "$@"
}

core_is_free_of_python() {
    local tree
    tree=$(cargo tree --locked -p kvstrata-core -e normal --prefix none)
    ! grep -E '^pyo3' <<<"$tree" || fail "kvstrata-core depends on pyo3"
}

scripts_parse() {
    local script
    for script in .ci/run scripts/*.sh; do bash -n "$script"; done
}

type_check() {
    local typing=()
    [[ ! -d tests/python/typing ]] || typing=(tests/python/typing)
    "$VENV_PYTHON" -m mypy python scripts "${typing[@]}"
}

# The environment is part of the measured time, and a failure there is a failure of the run.
group_lint() {
    step "environment: tools" scripts/env.sh tools
    step "scripts parse" scripts_parse
    step "typos" "$VENV/bin/typos"
    step "ruff check" "$VENV_PYTHON" -m ruff check .
    step "ruff format" "$VENV_PYTHON" -m ruff format --check .
    step "mypy" type_check
    step "cargo fmt" cargo fmt --all --check
    step "clippy" cargo clippy --locked --quiet --workspace --all-targets -- -D warnings
    step "cargo doc" env RUSTDOCFLAGS=-Dwarnings cargo doc --locked --quiet --workspace --no-deps
    step "core without Python" core_is_free_of_python
}

# The binding crate has no tests of its own: tests/python are its tests.
group_rust() {
    step "rust tests" cargo test --locked --quiet --workspace --exclude kvstrata-py
}

group_python() {
    step "environment: wheel" scripts/env.sh tools wheel
    step "stubs match the module" "$VENV_PYTHON" -m mypy.stubtest kvstrata._native \
        --mypy-config-file pyproject.toml
    step "environment: vLLM" scripts/env.sh vllm sources
    step "pytest" run_pytest -m "not engine and not slow and not gpu" \
        --ignore=tests/python/vllm tests/python
    step "pytest vLLM 0.32" with_vllm 0.32 "" \
        -m "not engine and not slow and not gpu" tests/python/vllm
    step "pytest vLLM 0.33" with_vllm 0.33 "$VLLM_NEXT_DIR" \
        -m "not engine and not slow and not gpu" tests/python/vllm
}

group_engine() {
    step "environment: all" scripts/env.sh tools vllm wheel
    step "pytest engine" run_pytest -m "engine and not slow and not gpu" tests/python
}

group_long() {
    step "stubs are as generated" scripts/stubs.sh --check
    step "environment: all" scripts/env.sh tools vllm wheel
    step "rust tests without debug assertions" cargo test --locked --quiet --workspace \
        --exclude kvstrata-py --profile testrelease -- --include-ignored
    step "pytest slow" run_pytest -m "slow and not gpu" tests/python
}

rm -rf "$REPORTS"
mkdir -p "$REPORTS"
trap finish EXIT
for group in "$@"; do
    "group_$group"
done
