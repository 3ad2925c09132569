//! What the capacity means: never more, nothing given up for nothing.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::indexing_slicing,
    clippy::as_conversions,
    reason = "a test fails where these fail"
)]

mod tier_support;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvstrata_core::config::{Size, TierOptions};
use kvstrata_core::eviction::request::Context;
use kvstrata_core::io::Direction;
use kvstrata_core::job::Outcome;
use kvstrata_core::key::{GroupId, Key};
use kvstrata_testkit::faulty::Fault;
use kvstrata_testkit::payload::payload;
use tempfile::TempDir;
use tier_support::faulty::{Faulty, Mount};
use tier_support::{
    Harness, ROW_BYTES, assert_accounted, bytes_on_disk, key, keys, options, row_files,
};

fn root() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Bytes in which 32 files of two rows fit beside directories and manifest, and not one more.
const CAPACITY_OF_64_ROWS: u64 = 32 * (8192 + 4096 + 2 * 8192) + 12 * 4096;

/// One group of rows of [`ROW_BYTES`].
fn one_group(change: &mut TierOptions) {
    change.row_bytes = BTreeMap::from([(GroupId(0), tier_support::wide(ROW_BYTES))]);
}

fn options_of_64_rows(root: &TempDir) -> TierOptions {
    let mut own = options(root.path(), ROW_BYTES, CAPACITY_OF_64_ROWS);
    one_group(&mut own);
    own
}

fn faulty(capacity: u64, change: impl FnOnce(&mut TierOptions)) -> Faulty {
    let sized = |own: &mut TierOptions| {
        own.capacity = Size::Bytes(capacity);
        change(own);
    };
    Faulty::open_on(Mount::Local, 70, sized)
}

fn stored(outcomes: &[Outcome]) -> usize {
    let ok = outcomes.iter().filter(|one| **one == Outcome::Ok);
    ok.count()
}

/// What 16 threads store in jobs of `rows`, while the disk is looked at every 10 ms.
fn sixteen_threads_store(jobs_per_thread: u64, rows: u64) {
    const THREADS: usize = 16;
    let root = root();
    let slots = THREADS * usize::try_from(rows).unwrap();
    let harness = Harness::open(options_of_64_rows(&root), slots);
    let ended = AtomicBool::new(false);
    let (samples, most) = (AtomicU64::new(0), AtomicU64::new(0));
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::channel()).unzip();
    let all = THREADS as u64 * jobs_per_thread;
    let (mut results, mut rows_most) = (Vec::new(), 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Acquire) {
                most.fetch_max(bytes_on_disk(root.path()), Ordering::AcqRel);
                samples.fetch_add(1, Ordering::AcqRel);
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        for (thread, done) in receivers.into_iter().enumerate() {
            let harness = &harness;
            scope.spawn(move || {
                let thread = thread as u64;
                for round in 0..jobs_per_thread {
                    let first = (thread * jobs_per_thread + round) * rows;
                    let own = keys(first..first + rows);
                    let mut offsets = Vec::new();
                    for (slot, key) in (thread * rows..).zip(&own) {
                        let offset = slot * ROW_BYTES as u64;
                        let bytes = payload(key.as_bytes(), ROW_BYTES);
                        let at = usize::try_from(offset).unwrap();
                        assert!(harness.arena.copy_in(at, &bytes));
                        offsets.push(offset);
                    }
                    let job = round * THREADS as u64 + thread;
                    harness.tier.store(job, &own, &offsets).unwrap();
                    done.recv().unwrap();
                }
            });
        }
        while (results.len() as u64) < all {
            for result in harness.tier.wait(Duration::from_secs(30)).unwrap() {
                results.push(result.outcomes);
                let thread = usize::try_from(result.job_id).unwrap() % THREADS;
                senders[thread].send(()).unwrap();
            }
            rows_most = rows_most.max(harness.stat("rows"));
        }
        ended.store(true, Ordering::Release);
    });
    // More rows than there are may be on their way at once: some of those find no place.
    let expected = [Outcome::Ok, Outcome::NoSpace, Outcome::Dropped];
    assert!(results.concat().iter().all(|one| expected.contains(one)));
    assert_eq!(rows_most, 64);
    assert!(samples.load(Ordering::Acquire) > 2);
    let most = most.load(Ordering::Acquire);
    assert!(most <= CAPACITY_OF_64_ROWS, "{most} bytes on disk");
    assert_eq!(harness.stat("rows"), 64);
    assert_accounted(&harness, root.path());
    assert_eq!(
        harness.tier.stats().unwrap()["groups"]["0"]["rows_capacity"],
        64
    );
    assert_eq!(harness.stat("errors"), 0);
    assert!(harness.stat("evicted_rows") >= all * rows / 2);
}

#[test]
fn sixteen_threads_never_take_more_than_the_capacity() {
    sixteen_threads_store(125, 5);
}

#[test]
#[ignore = "takes minutes"]
fn sixteen_threads_never_take_more_than_the_capacity_over_many_stores() {
    sixteen_threads_store(2000, 5);
}

#[test]
fn stores_are_refused_and_counted_while_every_row_is_in_use() {
    let mut faulty = faulty(CAPACITY_OF_64_ROWS, one_group);
    let own = keys(0..64);
    assert_eq!(faulty.harness.store(&own), [Outcome::Ok; 64]);
    faulty.fail(Direction::Read, Fault::Hold);
    let load = faulty.harness.begin_load(&own);
    for round in 0..100 {
        let one = faulty.harness.begin_store_at(64, &keys([1000 + round]));
        let result = faulty.harness.result(one);
        assert_eq!(result.outcomes, [Outcome::NoSpace]);
    }
    assert_eq!(faulty.harness.stat("errors"), 0);
    assert_eq!(faulty.harness.stat("evicted_rows"), 0);
    assert_eq!(
        faulty.harness.tier.stats().unwrap()["store_outcomes"]["no_space"],
        100
    );
    faulty.engine.release();
    assert_eq!(faulty.harness.result(load).outcomes, [Outcome::Ok; 64]);
    assert_eq!(faulty.harness.store(&keys([2000])), [Outcome::Ok]);
    assert_eq!(faulty.harness.stat("evicted_rows"), 1);
}

#[test]
fn a_job_of_three_gets_the_two_rows_there_are_at_the_cost_of_two() {
    let mut faulty = faulty(CAPACITY_OF_64_ROWS, one_group);
    let own = keys(0..64);
    assert_eq!(faulty.harness.store(&own), [Outcome::Ok; 64]);
    faulty.fail(Direction::Read, Fault::Hold);
    let load = faulty.harness.begin_load(&own[..62]);
    let job = faulty.harness.begin_store_at(62, &keys(100..103));
    let outcomes = faulty.harness.result(job).outcomes;
    assert_eq!(outcomes, [Outcome::Ok, Outcome::Ok, Outcome::NoSpace]);
    assert_eq!(faulty.harness.stat("evicted_rows"), 2);
    assert_eq!(faulty.harness.found(&own[60..]), [true, true, false, false]);
    faulty.engine.release();
    assert_eq!(faulty.harness.result(load).outcomes, [Outcome::Ok; 62]);
    faulty.choose(|_| Fault::None);
    assert_eq!(faulty.harness.load(&keys(100..102)), [Outcome::Ok; 2]);
}

/// Stores `first` rows, then asks for a store of `second` while the writer thread is busy, does
/// `between`, and says how `second` ended and how many rows had to go for it.
fn store_behind_a_busy_writer(between: impl FnOnce(&Harness, &[Key])) -> (Vec<Outcome>, u64) {
    let mut faulty = faulty(CAPACITY_OF_64_ROWS, one_group);
    assert_eq!(faulty.harness.store(&keys(0..64)), [Outcome::Ok; 64]);
    let (entered, is_in) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel::<()>();
    // Operations are submitted on the writer thread, which waits here.
    faulty.choose(move |_| {
        entered.send(()).unwrap();
        let _ = may_go_on.recv();
        Fault::None
    });
    let first = faulty.harness.begin_store(&keys([500]));
    is_in.recv().unwrap();
    let before = faulty.harness.stat("evicted_rows");
    let second = keys(600..608);
    let job = faulty.harness.begin_store(&second);
    between(&faulty.harness, &second);
    drop(go_on);
    let mut results = Vec::new();
    while results.len() < 2 {
        results.extend(faulty.harness.tier.wait(Duration::from_secs(5)).unwrap());
    }
    results.sort_by_key(|result| result.job_id);
    assert_eq!(results[0].job_id, first);
    assert_eq!(results[1].job_id, job);
    let outcomes = results.pop().unwrap().outcomes;
    (outcomes, faulty.harness.stat("evicted_rows") - before)
}

#[test]
fn no_row_goes_for_a_store_that_was_removed_or_reset_before_it_was_planned() {
    let (outcomes, evicted) = store_behind_a_busy_writer(|_, _| ());
    assert_eq!((outcomes, evicted), (vec![Outcome::Ok; 8], 8));
    let (outcomes, evicted) = store_behind_a_busy_writer(|harness, second| {
        harness.tier.remove(second).unwrap();
    });
    assert_eq!((outcomes, evicted), (vec![Outcome::Dropped; 8], 0));
    let (outcomes, evicted) = store_behind_a_busy_writer(|harness, _| {
        assert!(harness.tier.reset().unwrap());
    });
    assert_eq!((outcomes, evicted), (vec![Outcome::Dropped; 8], 0));
}

#[test]
fn the_tail_of_a_request_goes_first_whatever_order_its_rows_came_in() {
    const LARGE: usize = 600_000;
    let mut faulty = faulty(16 << 20, |own| {
        own.row_bytes = BTreeMap::from([(GroupId(0), LARGE as u64)]);
    });
    let request = keys(0..8);
    // Rows of this size go one by one.
    faulty.choose(|_| Fault::Hold);
    let job = faulty.harness.begin_store(&request);
    while faulty.engine.held() < 8 {
        std::thread::yield_now();
    }
    faulty.engine.release_backwards();
    assert_eq!(faulty.harness.result(job).outcomes, [Outcome::Ok; 8]);
    let job = faulty.harness.begin_load(&request);
    while faulty.engine.held() < 8 {
        std::thread::yield_now();
    }
    faulty.engine.release_backwards();
    assert_eq!(faulty.harness.result(job).outcomes, [Outcome::Ok; 8]);
    for _ in 0..500 {
        faulty.harness.tier.touch(&request).unwrap();
    }
    faulty.choose(|_| Fault::None);
    let mut filler = 1000;
    while faulty.harness.stat("evicted_rows") < 3 {
        assert_eq!(faulty.harness.store(&keys([filler])), [Outcome::Ok]);
        filler += 1;
        assert!(filler < 1100);
    }
    assert_eq!(
        faulty.harness.found(&request),
        [true, true, true, true, true, false, false, false]
    );
    // As many touches as there were count no more than one: the next to go is the next in line.
    assert_eq!(faulty.harness.store(&keys([filler])), [Outcome::Ok]);
    assert_eq!(faulty.harness.found(&request[3..5]), [true, false]);
}

#[test]
fn an_observed_request_counts_once_and_its_rows_go_last_until_it_ends() {
    const LARGE: usize = 600_000;
    let mut faulty = faulty(16 << 20, |own| {
        own.row_bytes = BTreeMap::from([(GroupId(0), LARGE as u64)]);
    });
    let (request, other) = (keys(0..4), keys(100..104));
    assert_eq!(faulty.harness.store(&request), [Outcome::Ok; 4]);
    assert_eq!(faulty.harness.store(&other), [Outcome::Ok; 4]);
    let context = Context::default();
    let tier = &faulty.harness.tier;
    tier.observe("one", &request, context).unwrap();
    tier.observe("other", &other, context).unwrap();
    tier.finish("other", Some(7)).unwrap();
    // Were these counted, or the request not awaited, its rows would be the older ones.
    for _ in 0..10 {
        tier.touch(&request).unwrap();
    }
    tier.touch(&other).unwrap();
    let mut filler = 1000;
    while faulty.harness.stat("evicted_rows") < 4 {
        assert_eq!(faulty.harness.store(&keys([filler])), [Outcome::Ok]);
        filler += 1;
        assert!(filler < 1100);
    }
    assert_eq!(faulty.harness.found(&request), [true; 4]);
    assert_eq!(faulty.harness.found(&other), [false; 4]);
    faulty.harness.tier.finish("one", None).unwrap();
    faulty.harness.tier.finish("never begun", None).unwrap();
}

#[test]
fn a_capacity_alone_is_a_limit_also_for_three_times_as_much() {
    let root = root();
    let capacity = 3 << 20;
    let mut own = options(root.path(), ROW_BYTES, capacity);
    own.min_free = Size::Percent(5.0);
    let mut harness = Harness::open(own, 64);
    for round in 0..3 * capacity / (8192 * 64) {
        let group = u32::try_from(round % 2).unwrap() * 7;
        let own: Vec<Key> = (round * 64..round * 64 + 64)
            .map(|n| key(n, group))
            .collect();
        assert!(stored(&harness.store(&own)) >= 60);
        assert!(bytes_on_disk(root.path()) <= capacity);
        assert_accounted(&harness, root.path());
    }
    harness.tier.close(Duration::from_secs(10)).unwrap();
    drop(harness);
    let harness = Harness::open(options(root.path(), ROW_BYTES, capacity), 64);
    assert_accounted(&harness, root.path());
    drop(harness);
    // Less than before: files go until it fits.
    let harness = Harness::open(options(root.path(), ROW_BYTES, capacity / 3), 64);
    assert!(bytes_on_disk(root.path()) <= capacity / 3);
    assert_accounted(&harness, root.path());
    assert!(harness.stat("rows") > 40);
}

#[test]
fn an_idle_namespace_shrinks_for_the_one_in_use() {
    const CAPACITY: u64 = 8 << 20;
    let root = root();
    let mut first = options(root.path(), ROW_BYTES, CAPACITY);
    first.identity.insert("model".to_owned(), "first".into());
    one_group(&mut first);
    {
        let mut harness = Harness::open(first.clone(), 64);
        let mut next = 0;
        while harness.stat("used_bytes") < CAPACITY / 10 * 8 {
            assert_eq!(harness.store(&keys(next..next + 16)), [Outcome::Ok; 16]);
            next += 16;
        }
        harness.tier.close(Duration::from_secs(10)).unwrap();
    }
    let before = row_files(root.path()).len();
    let mut second = options(root.path(), ROW_BYTES, CAPACITY);
    one_group(&mut second);
    let mut harness = Harness::open(second, 64);
    for round in 0..CAPACITY / 2 / 8192 / 16 {
        let own = keys(10_000 + round * 16..10_016 + round * 16);
        assert_eq!(harness.store(&own), [Outcome::Ok; 16]);
        assert!(bytes_on_disk(root.path()) <= CAPACITY);
    }
    assert_eq!(harness.stat("evicted_rows"), 0, "nothing of its own goes");
    assert_accounted(&harness, root.path());
    let left = harness.stat("foreign_files");
    assert!(left > 0 && left < before as u64 - 8, "{left} of {before}");
    harness.tier.close(Duration::from_secs(10)).unwrap();
    drop(harness);
    // What is left of the first one is as good as ever.
    let mut harness = Harness::open(first, 64);
    let rows = harness.stat("rows");
    assert!(rows > 0);
    let found = (0..CAPACITY / 8192).filter(|number| harness.found(&keys([*number])) == [true]);
    let found: Vec<u64> = found.collect();
    assert_eq!(found.len() as u64, rows);
    for some in found.chunks(64) {
        let own = keys(some.iter().copied());
        assert_eq!(harness.load(&own), vec![Outcome::Ok; own.len()]);
    }
}

/// Three groups whose rows take 4, 12 and 40 KiB.
fn three_groups(root: &TempDir, capacity: u64) -> TierOptions {
    let mut own = options(root.path(), ROW_BYTES, capacity);
    own.row_bytes = BTreeMap::from([
        (GroupId(0), 4096),
        (GroupId(1), 10_000),
        (GroupId(2), 40_960),
    ]);
    own
}

#[test]
fn groups_with_steady_demand_do_not_take_each_others_files_in_turn() {
    let root = root();
    let mut harness = Harness::open(three_groups(&root, 12 << 20), 16);
    let mut next = 0;
    let mut round = |harness: &mut Harness, groups: &[u32]| {
        for group in groups {
            let own: Vec<Key> = (next..next + 8).map(|number| key(number, *group)).collect();
            next += 8;
            let job = harness.job();
            harness.tier.store(job, &own, &harness.offsets(8)).unwrap();
            assert_eq!(harness.result(job).outcomes, [Outcome::Ok; 8]);
        }
    };
    for _ in 0..300 {
        round(&mut harness, &[0, 1, 2]);
    }
    let settled = harness.stat("evicted_files");
    for _ in 0..300 {
        round(&mut harness, &[0, 1, 2]);
    }
    let moved = harness.stat("evicted_files") - settled;
    assert!(
        moved <= 6,
        "{moved} files changed hands while nothing changed"
    );
    // Demand moves to the group with the largest rows: so does the space.
    for _ in 0..120 {
        round(&mut harness, &[2]);
    }
    let stats = harness.tier.stats().unwrap();
    let bytes = |group: &str| {
        let group = &stats["groups"][group];
        group["rows_capacity"].as_u64().unwrap() * group["row_stride_bytes"].as_u64().unwrap()
    };
    assert!(bytes("2") > 9 << 20, "{}", bytes("2"));
    assert_accounted(&harness, root.path());
    assert!(harness.stat("used_bytes") <= 12 << 20);
}

#[test]
fn a_group_that_others_have_squeezed_still_gets_the_rows_of_a_job() {
    let root = root();
    let mut harness = Harness::open(three_groups(&root, 6 << 20), 16);
    for round in 0..120_u64 {
        // Runs of one group, long enough to take most of what the others have.
        let chance = blake3::hash(&(round / 8).to_le_bytes()).as_bytes()[0];
        let group = u32::from(chance % 3);
        let own: Vec<Key> = (round * 8..round * 8 + 8)
            .map(|number| key(number, group))
            .collect();
        let job = harness.job();
        harness.tier.store(job, &own, &harness.offsets(8)).unwrap();
        assert_eq!(harness.result(job).outcomes, [Outcome::Ok; 8], "{round}");
    }
    assert_accounted(&harness, root.path());
}

#[test]
fn two_groups_whose_demand_wavers_take_few_of_each_others_files() {
    let root = root();
    let mut harness = Harness::open(options(root.path(), ROW_BYTES, 4 << 20), 16);
    let mut settled = 0;
    for round in 0..1500_u64 {
        if round == 500 {
            settled = harness.stat("evicted_files");
        }
        let chance = blake3::hash(&round.to_le_bytes()).as_bytes()[0];
        let own: Vec<Key> = (round * 2..round * 2 + 2)
            .map(|number| key(number, u32::from(chance % 2) * 7))
            .collect();
        assert_eq!(harness.store(&own), [Outcome::Ok; 2]);
    }
    let moved = harness.stat("evicted_files") - settled;
    // Without a margin of age it is four times as many.
    assert!(moved <= 22, "{moved} files changed hands");
}

#[test]
fn no_file_is_taken_from_others_unless_one_can_come_in_its_place() {
    let root = root();
    let mut own = options(root.path(), ROW_BYTES, 2 << 20);
    // Even all files of the first group but the last few are too small for a row of the second.
    own.row_bytes = BTreeMap::from([(GroupId(0), 4096), (GroupId(1), 1_500_000)]);
    let mut harness = Harness::open(own, 4);
    let mut next = 0;
    while harness.stat("evicted_rows") == 0 {
        let one = [key(next, 0)];
        let job = harness.job();
        harness.tier.store(job, &one, &[0]).unwrap();
        assert_eq!(harness.result(job).outcomes, [Outcome::Ok]);
        next += 1;
    }
    let (rows, files) = (harness.stat("rows"), row_files(root.path()).len());
    let job = harness.job();
    harness.tier.store(job, &[key(1, 1)], &[0]).unwrap();
    assert_eq!(harness.result(job).outcomes, [Outcome::NoSpace]);
    assert_eq!(harness.stat("rows"), rows);
    assert_eq!(row_files(root.path()).len(), files);
    assert_eq!(harness.stat("evicted_files"), 0);
}

/// Readers and writers on more keys than fit: every load is whole or a miss.
fn readers_against_evictors(time: Duration) {
    const SLOTS: u64 = 12;
    let root = root();
    let harness = Harness::open(options_of_64_rows(&root), 12);
    let until = Instant::now() + time;
    // A slow machine takes longer to do enough.
    let goes_on = || {
        let now = Instant::now();
        now < until || (harness.stat("evicted_rows") <= 100 && now < until + 20 * time)
    };
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..SLOTS).map(|_| mpsc::channel()).unzip();
    let (loaded, open) = (AtomicU64::new(0), AtomicU64::new(SLOTS));
    std::thread::scope(|scope| {
        for (slot, done) in (0_u64..).zip(receivers) {
            let (harness, loaded, open, goes_on) = (&harness, &loaded, &open, &goes_on);
            scope.spawn(move || {
                let at = usize::try_from(slot).unwrap();
                let mut round = 0;
                while goes_on() {
                    round += 1;
                    let number = blake3::hash(&(slot << 32 | round).to_le_bytes()).as_bytes()[0];
                    let own = keys([u64::from(number) % 100]);
                    let bytes = payload(own[0].as_bytes(), ROW_BYTES);
                    let (job, offset) = (round * SLOTS + slot, [slot * ROW_BYTES as u64]);
                    if slot < 4 {
                        assert!(harness.arena.copy_in(at * ROW_BYTES, &bytes));
                        harness.tier.store(job, &own, &offset).unwrap();
                        let _: Outcome = done.recv().unwrap();
                        continue;
                    }
                    assert!(
                        harness
                            .arena
                            .copy_in(at * ROW_BYTES, &vec![0xEE; ROW_BYTES])
                    );
                    harness.tier.load(job, &own, &offset).unwrap();
                    match done.recv().unwrap() {
                        Outcome::Ok => assert!(harness.holds(at, &own[0]), "foreign bytes"),
                        other => assert_eq!(other, Outcome::Miss),
                    }
                    loaded.fetch_add(1, Ordering::AcqRel);
                }
                open.fetch_sub(1, Ordering::AcqRel);
            });
        }
        while open.load(Ordering::Acquire) > 0 {
            for result in harness.tier.wait(Duration::from_millis(20)).unwrap() {
                let slot = usize::try_from(result.job_id % SLOTS).unwrap();
                let _ = senders[slot].send(result.outcomes[0]);
            }
        }
    });
    assert!(loaded.load(Ordering::Acquire) > 100);
    assert!(harness.stat("evicted_rows") > 100);
    assert_eq!(harness.stat("corrupt_rows"), 0);
    assert_accounted(&harness, root.path());
}

#[test]
fn readers_and_evictors_meet_and_every_load_is_whole_or_a_miss() {
    readers_against_evictors(Duration::from_secs(2));
}

#[test]
#[ignore = "takes half a minute"]
fn readers_and_evictors_meet_for_long_and_every_load_is_whole_or_a_miss() {
    readers_against_evictors(Duration::from_secs(30));
}
