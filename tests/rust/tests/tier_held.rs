//! A tier on a mount whose daemon is stopped. Needs `bindfs`; says so where it is missing.

#[path = "engine_support/mount.rs"]
#[expect(
    dead_code,
    clippy::unwrap_used,
    reason = "used by several tests, each of a part"
)]
mod mount;
mod tier_support;

use std::time::Duration;

use kvstrata_core::buffer::Arena;
use kvstrata_core::config::Size;
use kvstrata_core::io::Direction;
use kvstrata_core::job::Outcome;
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_testkit::faulty::Fault;
use mount::Mount;
use rustix::process::Signal;
use tier_support::faulty::{self, Faulty};
use tier_support::{Harness, ROW_BYTES, key, keys, options};

const CAPACITY: u64 = 16 << 20;

#[test]
fn a_load_from_a_dead_mount_ends_at_its_deadline_and_its_slot_is_another_rows_from_then_on() {
    let Some(mount) = Mount::new() else {
        return;
    };
    let mut own = options(&mount.path().join("root"), ROW_BYTES, CAPACITY);
    own.deadline = Duration::from_millis(500);
    let mut harness = Harness::open(own, 16);
    let capabilities = harness.tier.capabilities().unwrap();
    assert_eq!(capabilities["file_system"], "fuse");
    assert_eq!(capabilities["io_mode"], "direct", "reads may not be cached");
    let own = keys(0..8);
    harness.store_all(&own);
    assert_eq!(harness.load(&own), [Outcome::Ok; 8]);
    harness.wipe();

    mount.signal(Signal::STOP);
    let load = harness.begin_load(&own[..4]);
    let result = harness.result(load);
    assert_eq!(result.outcomes, [Outcome::Timeout; 4]);
    assert_eq!(result.busy, Vec::<usize>::new());
    let held = harness.stat("stuck_load_buffer_bytes");
    assert_eq!(held, 4 * 8192, "the kernel had nothing");
    // The slots are other rows' now.
    let others = keys(100..104);
    harness.fill(&others);
    mount.signal(Signal::CONT);
    while harness.stat("load_buffer_bytes") > 0 {
        SystemClock.sleep(Duration::from_millis(1));
    }
    for (slot, key) in others.iter().enumerate() {
        assert!(harness.holds(slot, key), "slot {slot} has foreign bytes");
    }
    assert_eq!(harness.found(&own)[..4], [false; 4]);
    assert_eq!(harness.load(&own[4..]), [Outcome::Ok; 4]);
    let again = harness.store(&own[..4]);
    assert_eq!(again, [Outcome::Ok; 4]);
    assert_eq!(harness.load(&own), [Outcome::Ok; 8]);
    harness.assert_quiet();
    harness.tier.close(Duration::from_secs(10)).unwrap();
}

/// Makes an arena inaccessible, as one that its owner has given back.
fn give_back(arena: &Arena) {
    let whole_pages = arena.length() / 4096 * 4096;
    #[expect(unsafe_code, reason = "memory that nobody may use any more")]
    // SAFETY: the arena is never freed, begins at a page, and nothing else lies in these pages.
    let done = unsafe { libc::mprotect(arena.base().cast(), whole_pages, libc::PROT_NONE) };
    assert_eq!(done, 0);
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "the list of this process's threads"
)]
fn a_store_whose_planning_hangs_reads_no_slot_once_the_tier_is_closed() {
    let Some(mount) = Mount::new() else {
        return;
    };
    let own = options(&mount.path().join("root"), ROW_BYTES, CAPACITY);
    let mut harness = Harness::open(own, 16);
    harness.store_all(&keys(0..1));
    mount.signal(Signal::STOP);
    // The other group has no row file yet: the writer asks the mount for space and hangs.
    let others: Vec<_> = (0..8).map(|number| key(number, 7)).collect();
    harness.begin_store(&others);
    while harness.stat("queued_stores") > 0 {
        SystemClock.sleep(Duration::from_millis(1));
    }
    harness.tier.close(Duration::from_millis(100)).unwrap();
    give_back(&harness.arena);
    mount.signal(Signal::CONT);
    // Reading a slot would end the process.
    let writes = |task: std::io::Result<std::fs::DirEntry>| {
        let name = std::fs::read_to_string(task.unwrap().path().join("comm"));
        name.is_ok_and(|name| name.starts_with("kvstrata-write"))
    };
    while std::fs::read_dir("/proc/self/task").unwrap().any(writes) {
        SystemClock.sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_store_whose_planning_hangs_ends_at_its_deadline_and_its_slots_are_others_from_then_on() {
    let Some(mount) = Mount::new() else {
        return;
    };
    let mut own = options(&mount.path().join("root"), ROW_BYTES, CAPACITY);
    own.deadline = Duration::from_millis(300);
    let mut harness = Harness::open(own, 16);
    harness.store_all(&keys(0..1));
    mount.signal(Signal::STOP);
    // The other group has no row file yet: the writer asks the mount for space and hangs.
    let others: Vec<_> = (0..8).map(|number| key(number, 7)).collect();
    let hung = harness.begin_store(&others);
    assert_eq!(harness.result(hung).outcomes, [Outcome::Timeout; 8]);
    // Other bytes in the same slots, under other keys: one that waits for the writer ends, too.
    let next: Vec<_> = (100..108).map(|number| key(number, 7)).collect();
    let queued = harness.begin_store(&next);
    assert_eq!(harness.result(queued).outcomes, [Outcome::Timeout; 8]);
    mount.signal(Signal::CONT);
    while harness.store(&next) != [Outcome::Ok; 8] {
        SystemClock.sleep(Duration::from_millis(50));
    }
    assert_eq!(harness.found(&others), [false; 8]);
    assert_eq!(harness.load(&next), [Outcome::Ok; 8]);
    assert_eq!(harness.stat("corrupt_rows"), 0);
    harness.assert_quiet();
    harness.tier.close(Duration::from_secs(10)).unwrap();
}

#[test]
fn a_store_that_the_engine_returns_after_its_deadline_ends_though_the_writer_hangs_then() {
    let Some(mount) = Mount::new() else {
        return;
    };
    let deadline = Duration::from_millis(300);
    let mut faulty = Faulty::open_on(faulty::Mount::MayHang, 16, |own| {
        own.root = mount.path().join("root");
        own.deadline = deadline;
    });
    faulty.harness.store_all(&keys(0..1));
    faulty.choose(|operation| match operation.direction {
        Direction::Write => Fault::Hold,
        Direction::Read => Fault::None,
    });
    let late = keys(10..14);
    let job = faulty.harness.begin_store(&late);
    while faulty.engine.held() == 0 {
        SystemClock.sleep(Duration::from_millis(1));
    }
    mount.signal(Signal::STOP);
    SystemClock.sleep(deadline * 2);
    let early = faulty.harness.tier.poll().unwrap();
    assert!(early.is_empty(), "the engine has its slots: {early:?}");
    // Its rows are written now, and its entries wait for the mount.
    faulty.choose(|_| Fault::None);
    faulty.engine.release();
    assert_eq!(faulty.harness.result(job).outcomes, [Outcome::Timeout; 4]);
    mount.signal(Signal::CONT);
    let harness = &mut faulty.harness;
    while !harness.store(&late).iter().all(|one| one.is_success()) {
        SystemClock.sleep(Duration::from_millis(50));
    }
    harness.wipe();
    assert_eq!(harness.load(&late), [Outcome::Ok; 4]);
    assert!((0..4).all(|slot| harness.holds(slot, &late[slot])));
    harness.assert_quiet();
    harness.tier.close(Duration::from_secs(10)).unwrap();
}

#[test]
fn a_store_of_which_keys_wait_to_be_planned_ends_though_the_engine_returns_others_later() {
    let Some(mount) = Mount::new() else {
        return;
    };
    let deadline = Duration::from_secs(1);
    let mut faulty = Faulty::open_on(faulty::Mount::MayHang, 600, |own| {
        own.root = mount.path().join("root");
        own.capacity = Size::Bytes(1 << 30);
        own.deadline = deadline;
    });
    faulty.harness.store_all(&keys(0..1));
    // The first MiB, four writes, is done and held. While the writer hands over the next, the mount
    // stops, and a key is removed whose entry the writer clears before it plans the rest.
    let (says_so, second_mib) = std::sync::mpsc::channel();
    let (goes_on, until) = std::sync::mpsc::channel::<()>();
    let mut writes = 0;
    faulty.choose(move |operation| {
        if operation.direction == Direction::Read {
            return Fault::None;
        }
        writes += 1;
        if writes == 5 {
            says_so.send(()).unwrap();
            until.recv().unwrap();
        }
        if writes < 5 {
            Fault::Hold
        } else {
            Fault::Stall
        }
    });
    let job = faulty.harness.begin_store(&keys(10..610));
    second_mib.recv().unwrap();
    faulty.wait_held(4);
    mount.signal(Signal::STOP);
    faulty.harness.tier.remove(&keys(0..1)).unwrap();
    goes_on.send(()).unwrap();
    SystemClock.sleep(deadline * 2);
    let early = faulty.harness.tier.poll().unwrap();
    assert!(early.is_empty(), "the engine has some slots: {early:?}");
    faulty.choose(|_| Fault::None);
    faulty.engine.release();
    let result = faulty.harness.result(job);
    assert_eq!(result.outcomes, vec![Outcome::Timeout; 600]);
    mount.signal(Signal::CONT);
    faulty.harness.assert_quiet();
    faulty.harness.tier.close(Duration::from_secs(10)).unwrap();
}
