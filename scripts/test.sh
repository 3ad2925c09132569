#!/usr/bin/env bash
# Runs the groups of checks that are named, in this order, and stops at the first that fails:
#   scripts/test.sh [lint] [rust] [chaos] [places] [python] [next] [schedules] [engine] [long]
# Groups with a plus between them run side by side: many tests wait more than they compute.
# The last line is a summary in pytest's words over all pytest runs of this call, or, where there
# were none, over its checks.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

REPORTS=$CACHE/reports
STEP=""
TIMES=()
declare -A BESIDE=() # groups that run beside another, with their process groups

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

# together GROUP...: the last group here, the others beside it, whose output follows in one piece.
together() {
    local group status
    set -m # each has a process group of its own, and can be ended as a whole
    for group in "${@:1:$#-1}"; do
        (
            TIMES=()
            trap report_times EXIT
            "group_$group"
        ) >"$REPORTS/$group.log" 2>&1 &
        BESIDE[$group]=$!
    done
    set +m
    "group_${*: -1}"
    for group in "${!BESIDE[@]}"; do
        status=0
        wait "${BESIDE[$group]}" || status=$?
        unset "BESIDE[$group]"
        cat "$REPORTS/$group.log"
        ((status == 0)) || exit "$status"
    done
}

report_times() {
    ((${#TIMES[@]} == 0)) || printf '%s\n' "--- seconds by step" "${TIMES[@]}"
    [[ -z $STEP ]] || printf -- '--- FAILED: %s\n' "$STEP"
}

finish() {
    local status=$? group
    for group in "${!BESIDE[@]}"; do
        kill -- "-${BESIDE[$group]}" 2>/dev/null || true
        tail -n 200 "$REPORTS/$group.log"
    done
    report_times
    "$PYTHON" scripts/summary.py "$REPORTS" "$SECONDS" "$status" "${#TIMES[@]}" || true
    exit "$status"
}

# The step's own name becomes the name of its report.
run_pytest() { "$VENV_PYTHON" -m pytest --junit-xml="$REPORTS/${STEP// /-}.xml" -o junit_suite_name="$STEP" "$@"; }

with_vllm() { # with_vllm VERSION PATH ARGUMENT...
    local version=$1 path=$2
    shift 2
    PYTHONPATH=$path VLLM_TARGET_DEVICE=cpu HF_HUB_OFFLINE=1 KVSTRATA_TEST_VLLM=$version \
        KVSTRATA_TEST_VLLM_SOURCES=$VLLM_CASES_DIR run_pytest "$@"
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
    step "ruff check" "$VENV_PYTHON" -m ruff check --no-cache .
    step "ruff format" "$VENV_PYTHON" -m ruff format --check .
    step "mypy" type_check
    step "cargo fmt" cargo fmt --all --check
    step "clippy" cargo clippy --locked --quiet --workspace --all-targets -- -D warnings
    step "clippy: schedules" cargo clippy --locked --quiet -p kvstrata-tests --all-targets \
        --features shuttle -- -D warnings
    step "cargo doc" env RUSTDOCFLAGS=-Dwarnings cargo doc --locked --quiet --workspace --no-deps
    step "core without Python" core_is_free_of_python
}

# The binding crate has no tests of its own: tests/python are its tests.
group_rust() {
    step "environment: servers" scripts/env.sh servers
    step "rust tests" cargo test --locked --quiet --workspace --exclude kvstrata-py \
        -- --skip "$CHAOS"
}

group_schedules() {
    step "schedules" schedules 300
}

# Takes a minute, most of which passes in waiting for the next kill.
CHAOS=a_process_killed_at_any_moment_leaves_whole_rows_or_none_and_its_space_exact
group_chaos() {
    step "chaos" rust_suite --test chaos -- --exact "$CHAOS"
}

# What the engines and the tier do may depend on the file system, on limits and on a sandbox.
CONTRACT=(--test place --test engine_contract --test engine_faults)
TIER=(--test tier --test tier_faults --test tier_hostile --test tier_damage)
ON_RING=(--test tier_uring --test tier_faults_uring)

# rust_suite ARGUMENT...: the named test programs of tests/rust.
rust_suite() { cargo test --locked --quiet -p kvstrata-tests "$@"; }

# rust_suite_through RUNNER ARGUMENT...: as above, each program run by the command line RUNNER.
rust_suite_through() {
    local runner=$1 host
    shift
    host=$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')
    env "CARGO_TARGET_${host}_RUNNER=$runner" cargo test --locked --quiet -p kvstrata-tests "$@"
}

# suite_on FILE_SYSTEM ARGUMENT...: the same, in directories on another kind of file system.
suite_on() {
    local kind=$1 status=0
    shift
    scripts/on_file_system.sh "$kind" cargo test --locked --quiet -p kvstrata-tests "$@" || status=$?
    # 77: the reason was printed.
    ((status == 77)) || return "$status"
}

suite_without() { # suite_without CALL ERRNO ARGUMENT...
    local tool=${CARGO_TARGET_DIR:-$ROOT/target}/debug/without runner
    runner="$tool $1 $2"
    shift 2
    cargo build --locked --quiet -p kvstrata-testkit --bin without
    KVSTRATA_TEST_RING_DENIED=1 rust_suite_through "$runner" "$@"
}

group_places() {
    local kind
    for kind in ext4 xfs tmpfs overlay fuse; do
        step "suite on $kind" suite_on "$kind" "${CONTRACT[@]}" "${TIER[@]}" "${ON_RING[@]}"
    done
    step "suite without io_uring: EPERM" suite_without io_uring_setup EPERM "${CONTRACT[@]}" "${TIER[@]}"
    step "suite without io_uring: ENOSYS" suite_without io_uring_setup ENOSYS "${TIER[@]}"
    step "suite without io_uring: enter" suite_without io_uring_enter EPERM "${TIER[@]}"
    step "suite with 64 descriptors, 64 KiB locked" rust_suite_through \
        "prlimit --nofile=64:64 --memlock=65536:65536" "${CONTRACT[@]}" "${TIER[@]}" "${ON_RING[@]}" \
        -- --test-threads 1 # the limits are those of one tier
}

# The model checker's locks take the place of the machine's in this build alone.
schedules() {
    KVSTRATA_TEST_SCHEDULES=$1 rust_suite --features shuttle --test schedules
}

group_python() {
    step "environment: wheel" scripts/env.sh tools wheel
    step "stubs match the module" "$VENV_PYTHON" -m mypy.stubtest kvstrata._native \
        --mypy-config-file pyproject.toml
    step "environment: vLLM" scripts/env.sh vllm sources cases servers
    step "pytest" run_pytest -m "not engine and not slow and not gpu" \
        --ignore=tests/python/vllm --ignore=tests/python/memory tests/python
    step "pytest torch" run_pytest -m "not slow and not gpu" tests/python/memory
    step "pytest vLLM 0.32" with_vllm 0.32 "" \
        -m "not engine and not slow and not gpu" tests/python/vllm
}

# One process, as is the engine: the two share the processors well.
group_next() {
    step "environment: vLLM" scripts/env.sh tools vllm sources cases servers wheel
    step "pytest vLLM 0.33" with_vllm 0.33 "$VLLM_NEXT_DIR" \
        -m "not engine and not slow and not gpu" tests/python/vllm
}

group_engine() {
    step "environment: all" scripts/env.sh tools vllm wheel
    step "pytest engine" run_pytest -m "engine and not slow and not gpu" tests/python
}

group_long() {
    step "stubs are as generated" scripts/stubs.sh --check
    step "environment: all" scripts/env.sh tools vllm sources servers wheel
    step "rust tests without debug assertions" env KVSTRATA_TEST_CRASH_STEP=1 \
        cargo test --locked --quiet --workspace --exclude kvstrata-py --profile testrelease \
        -- --include-ignored
    step "schedules: many" schedules 5000
    step "address sanitizer" scripts/sanitizer.sh address
    step "thread sanitizer" scripts/sanitizer.sh thread
    step "pytest slow" run_pytest -m "slow and not gpu" tests/python
    step "pytest slow vLLM 0.33" with_vllm 0.33 "$VLLM_NEXT_DIR" \
        -m slow tests/python/vllm/test_policy_equality.py
}

rm -rf "$REPORTS"
mkdir -p "$REPORTS"
trap finish EXIT
for group in "$@"; do
    IFS=+ read -ra side_by_side <<<"$group"
    together "${side_by_side[@]}"
done
