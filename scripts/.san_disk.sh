#!/usr/bin/env bash
# Runs Rust tests under a sanitizer, in a build of their own:
#   scripts/sanitizer.sh address   every test: no use of memory that is not, or no longer, there
#   scripts/sanitizer.sh thread    job table and tier: no access that no lock orders
# First a planted fault must be reported, so that silence means something. The standard library
# comes compiled and is not instrumented; what the kernel writes is not seen either.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

KIND=${1:-}
HOST=$(rustc -vV | sed -n 's/^host: //p')
TIME_LIMIT=30m
# Sanitizers are options of the compiler that it takes only with this variable.
export RUSTC_BOOTSTRAP=1
case $KIND in
    address)
        RUSTFLAGS="-Zsanitizer=address"
        PLANTED=use-after-free REPORT="SUMMARY: AddressSanitizer: heap-use-after-free"
        # Tests leave memory behind on purpose, so that nothing late can harm them, and ask for more
    # than there is.
        export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1
        TESTS=(-p kvstrata-tests --test engine_contract --test engine_faults --test tier --test tier_faults --test tier_uring --test tier_faults_uring --test tier_hostile --test tier_damage)
        ;;
    thread)
        RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer"
        PLANTED=race REPORT="SUMMARY: ThreadSanitizer: data race .*_volatile"
        export TSAN_OPTIONS="suppressions=$ROOT/scripts/thread_sanitizer.txt"
        TESTS=(-p kvstrata-tests --features instrumented --test races)
        ;;
    *) fail "usage: sanitizer.sh address|thread" ;;
esac
export RUSTFLAGS
BUILD=(--locked --quiet --target "$HOST" --target-dir "${CARGO_TARGET_DIR:-target}/$KIND-sanitizer")

cargo build "${BUILD[@]}" -p kvstrata-testkit --bin planted
planted=${CARGO_TARGET_DIR:-target}/$KIND-sanitizer/$HOST/debug/planted
output=$("$planted" "$PLANTED" 2>&1) && fail "a planted $PLANTED went unnoticed"
grep -q "$REPORT" <<<"$output" || fail "a planted $PLANTED was reported otherwise: $output"

timeout "$TIME_LIMIT" cargo test "${BUILD[@]}" --no-fail-fast "${TESTS[@]}"
