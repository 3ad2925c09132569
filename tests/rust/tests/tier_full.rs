//! What stores to a tier that is as full as it may be ask of the kernel. Alone in its process, whose
//! system calls it counts.
mod tier_support;

use std::sync::Arc;

use kvstrata_core::job::Outcome;
use kvstrata_core::tier::Seams;
use kvstrata_testkit::clock::ManualClock;
use kvstrata_testkit::sandbox::{count_instead, counted};
use tier_support::{Harness, keys, options};

#[test]
fn a_store_in_the_place_of_others_looks_at_no_row_file() {
    let root = tempfile::tempdir().unwrap();
    // Nothing is due but the stores.
    let seams = Seams {
        clock: Arc::new(ManualClock::default()),
        ..Seams::default()
    };
    let mut harness = Harness::open_with(options(root.path(), 4096, 4 << 20), 100, seams);
    let store = |harness: &mut Harness, round: u64| {
        let outcomes = harness.store(&keys(round * 100..round * 100 + 100));
        assert_eq!(outcomes, [Outcome::Ok; 100], "round {round}");
    };
    // Twice what it holds: all files are open for writing.
    (0..20).for_each(|round| store(&mut harness, round));
    let evicted = harness.stat("evicted_rows");
    assert!(evicted > 500, "{evicted}");

    count_instead(libc::SYS_newfstatat).unwrap();
    (20..30).for_each(|round| store(&mut harness, round));
    let looks = counted();
    assert_eq!(harness.stat("evicted_rows"), evicted + 1000);
    assert_eq!(looks, 0, "files were looked at");

    #[expect(unsafe_code, reason = "the one way to make a call without meaning it")]
    // SAFETY: no descriptor is -1, and the filter keeps the call from the kernel anyway.
    unsafe {
        libc::syscall(libc::SYS_newfstatat, -1, c"".as_ptr(), 0, 0);
    }
    assert_eq!(counted(), 1, "a look would have been counted");
}
