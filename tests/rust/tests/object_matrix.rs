//! Every fault with every kind of request, with kinds of requests at once, and with bodies that are
//! taken slowly: no wrong byte, no job that ends late, no call that waits.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::as_conversions,
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "a test fails where these fail, measures and waits, and tells its figures"
)]

mod object_support;
mod tier_support;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use kvstrata_core::buffer::Arena;
use kvstrata_core::job::{JobResult, Outcome};
use kvstrata_core::key::Key;
use kvstrata_core::object::ObjectOptions;
use kvstrata_core::object::limits::ObjectLimits;
use kvstrata_testkit::memory::leaked_arena;
use kvstrata_testkit::payload::payload;
use kvstrata_testkit::{Bucket, BucketFault, Method, Rule};
use object_support::{eventually, open_hasty, open_hasty_in, options, row_names};
use tier_support::{Harness, keys};

const METHODS: [Method; 4] = [Method::Get, Method::Put, Method::List, Method::Head];
const LOOKUP_WAIT: Duration = Duration::from_millis(300);
/// Bytes of a row that the kernel does not take as a whole where the peer takes it by sips.
const LARGE_ROW_BYTES: usize = 8 << 20;

/// The faults, in times of the deadline where they take time.
fn faults(deadline: Duration) -> Vec<BucketFault> {
    vec![
        BucketFault::Latency(deadline / 5),
        BucketFault::Latency(deadline * 3),
        // A slow network that makes it, and one that does not.
        BucketFault::Trickle(2000, deadline / 100),
        BucketFault::Trickle(1, deadline / 2),
        BucketFault::Reset,
        BucketFault::ResetHalfway,
        BucketFault::SlowClose,
        BucketFault::Status(500),
        BucketFault::Status(503),
        BucketFault::Status(429),
        BucketFault::Status(403),
        BucketFault::Status(404),
        BucketFault::EarlyStatus(503),
        BucketFault::Truncate,
        BucketFault::Short,
        BucketFault::WrongBody,
        BucketFault::NeverAnswer,
        BucketFault::LoseAnswer,
    ]
}

/// What is wrong in one run.
#[derive(Clone, Debug)]
struct Trouble {
    methods: Vec<Method>,
    fault: BucketFault,
    /// A second fault that hits the same requests in turns with the first.
    other: Option<BucketFault>,
    /// Whether rows are large, and their bodies taken so slowly that it takes eight deadlines. Never
    /// so slowly that the kernel gives the connection up, which it does after a tenth of one.
    by_sips: bool,
}

impl Trouble {
    fn rule(&self, fault: BucketFault, deadline: Duration) -> Rule {
        let rule = Rule::rows(&self.methods, fault);
        if self.by_sips {
            rule.by_sips(LARGE_ROW_BYTES / 128, deadline / 16)
        } else {
            rule
        }
    }

    fn options(&self, bucket: &Bucket, deadline: Duration) -> ObjectOptions {
        let mut options = hasty(bucket, deadline);
        if self.by_sips {
            for bytes in options.row_bytes.values_mut() {
                *bytes = LARGE_ROW_BYTES as u64;
            }
        }
        options
    }

    /// Rows that are loaded, and others that are stored.
    const fn rows(&self) -> usize {
        if self.by_sips { 1 } else { 8 }
    }
}

/// Memory of large rows that was used, for the next run.
type Spare = Vec<Arc<Arena>>;

/// How a run went: the longest job, in deadlines, and the longest call.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    job: f64,
    call: Duration,
}

impl Times {
    fn call<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let done = work();
        self.call = self.call.max(begun.elapsed());
        done
    }

    fn worst(self, other: Self) -> Self {
        Self {
            job: self.job.max(other.job),
            call: self.call.max(other.call),
        }
    }
}

fn hasty(bucket: &Bucket, deadline: Duration) -> ObjectOptions {
    let mut hasty = options(&bucket.endpoint());
    hasty.deadline = deadline;
    hasty.limits = ObjectLimits {
        retry_pause: Duration::from_millis(5),
        lookup_wait: LOOKUP_WAIT,
        ..hasty.limits
    };
    hasty
}

/// Opens a tier. That of large rows uses memory that is there and that nobody else uses any more.
fn open(trouble: &Trouble, bucket: &Bucket, deadline: Duration, spare: &mut Spare) -> Harness {
    let options = trouble.options(bucket, deadline);
    if !trouble.by_sips {
        return open_hasty(options, 24);
    }
    let free = spare.iter().find(|arena| Arc::strong_count(arena) == 1);
    let free = free.map(Arc::clone);
    let arena = free.unwrap_or_else(|| {
        let arena = leaked_arena(2 * LARGE_ROW_BYTES, 0).unwrap();
        spare.push(Arc::clone(&arena));
        arena
    });
    open_hasty_in(options, arena)
}

/// Looks keys up until there is an answer; it has to come soon after the bound.
fn look_up(harness: &Harness, numbers: std::ops::Range<u64>, times: &mut Times) {
    let begun = Instant::now();
    let wanted = keys(numbers);
    loop {
        let found = times.call(|| harness.tier.lookup(&wanted).unwrap());
        if found.iter().all(Option::is_some) {
            return;
        }
        let took = begun.elapsed();
        assert!(took < LOOKUP_WAIT * 10, "{took:?}: {found:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn finish(harness: &Harness, jobs: &[u64], times: &mut Times) -> Vec<JobResult> {
    let mut found: Vec<JobResult> = Vec::new();
    let begun = Instant::now();
    while found.len() < jobs.len() {
        found.extend(times.call(|| harness.tier.poll().unwrap()));
        times.call(|| harness.tier.stats().unwrap());
        assert!(begun.elapsed() < Duration::from_mins(1), "{found:?}");
        thread::sleep(Duration::from_millis(2));
    }
    let place = |result: &JobResult| jobs.iter().position(|job| *job == result.job_id);
    found.sort_by_key(place);
    found
}

/// Stores rows once all is well, and loads them with a tier that knows nothing. A busy machine may
/// miss a deadline; and a deletion of what was corrupt, given up as late, may yet reach the server.
fn store_again(harness: &mut Harness, mut fresh: Harness, own: &[Key]) {
    let mut loaded = Vec::new();
    for _ in 0..3 {
        harness.store_all(own);
        loaded = fresh.load(own);
        if loaded.iter().all(|outcome| *outcome == Outcome::Ok) {
            return;
        }
        // The first tier learns of it.
        harness.load(own);
    }
    panic!("{loaded:?}");
}

/// One run: rows are there; then lookups, a load and a store meet the trouble; then it is over.
fn run(trouble: &Trouble, deadline: Duration, spare: &mut Spare) -> Times {
    let bucket = Bucket::start().unwrap();
    let mut times = Times::default();
    let patience = Duration::from_secs(20);
    let rows = trouble.rows();
    let count = rows as u64;
    let (there, others) = (keys(0..count), keys(100..100 + count));
    let mut first = open(trouble, &bucket, patience, spare);
    assert_eq!(first.store(&there), vec![Outcome::Ok; rows]);
    drop(first);
    // This one knows nothing of them.
    let mut harness = open(trouble, &bucket, deadline, spare);
    if let Some(other) = trouble.other {
        for _ in 0..4 {
            bucket.rule(trouble.rule(other, deadline).times(1));
            bucket.rule(trouble.rule(trouble.fault, deadline).times(1));
        }
    }
    bucket.rule(trouble.rule(trouble.fault, deadline));
    harness.wipe();
    // Where bytes are large, they are there before the time is taken.
    for (slot, key) in (rows..).zip(&others) {
        let bytes = payload(key.as_bytes(), harness.row_bytes);
        assert!(harness.arena.copy_in(slot * harness.row_bytes, &bytes));
    }
    let offsets = harness.offsets(2 * rows).split_off(rows);
    let load = times.call(|| harness.begin_load(&there));
    let store = harness.job();
    times.call(|| harness.tier.store(store, &others, &offsets).unwrap());
    look_up(&harness, 0..16, &mut times);
    look_up(&harness, 100..108, &mut times);
    times.call(|| harness.tier.touch(&there).unwrap());
    let results = finish(&harness, &[load, store], &mut times);
    for result in &results {
        times.job = times
            .job
            .max(result.duration.as_secs_f64() / deadline.as_secs_f64());
    }
    for (slot, key) in there.iter().enumerate() {
        if results[0].outcomes[slot] == Outcome::Ok {
            assert!(harness.holds(slot, key), "{trouble:?}: wrong bytes");
        }
    }
    bucket.heal();
    eventually("requests are over", || harness.stat("in_flight_bytes") == 0);
    // Slots are used again at once: nothing that was still being sent from them is ever served.
    for own in [there, others] {
        let calm = open(trouble, &bucket, patience, spare);
        store_again(&mut harness, calm, &own);
    }
    assert_eq!(row_names(&bucket).len(), 2 * rows, "{trouble:?}");
    times
}

/// Runs all troubles, so many at a time.
fn run_all(troubles: Vec<Trouble>, deadline: Duration, at_a_time: usize) -> Times {
    let count = troubles.len();
    let queue = Mutex::new(VecDeque::from(troubles));
    let worst = Mutex::new((Times::default(), None));
    thread::scope(|scope| {
        for _ in 0..at_a_time {
            scope.spawn(|| {
                let mut spare = Spare::new();
                loop {
                    let next = queue.lock().unwrap().pop_front();
                    let Some(trouble) = next else { return };
                    let times = run(&trouble, deadline, &mut spare);
                    let mut worst = worst.lock().unwrap();
                    if times.job > worst.0.job {
                        worst.1 = Some(trouble);
                    }
                    worst.0 = worst.0.worst(times);
                }
            });
        }
    });
    let (worst, slowest) = worst.into_inner().unwrap();
    eprintln!(
        "{count} troubles: the longest job took {:.3} deadlines ({slowest:?}), the longest call {:?}",
        worst.job, worst.call
    );
    worst
}

#[test]
fn each_fault_of_each_kind_of_request_and_of_all_costs_rows_only() {
    let deadline = Duration::from_secs(1);
    let mut troubles = Vec::new();
    for fault in faults(deadline) {
        for methods in METHODS.chunks(1).chain([&METHODS[..]]) {
            troubles.push(Trouble {
                methods: methods.to_vec(),
                fault,
                other: None,
                by_sips: false,
            });
        }
    }
    let worst = run_all(troubles, deadline, 12);
    // 1.2 is what is promised; a busy machine may not get round to it.
    assert!(worst.job <= 3.6, "{worst:?}");
    assert!(worst.call < deadline, "{worst:?}");
}

#[test]
fn bodies_that_are_taken_slowly_give_their_slots_back_in_time_whatever_comes_of_them() {
    let deadline = Duration::from_secs(1);
    let mut troubles = Vec::new();
    for fault in faults(deadline).into_iter().chain([BucketFault::Nothing]) {
        troubles.push(Trouble {
            methods: vec![Method::Put],
            fault,
            other: None,
            by_sips: true,
        });
    }
    let worst = run_all(troubles, deadline, 4);
    // As above.
    assert!(worst.job <= 3.6, "{worst:?}");
}

#[test]
#[ignore = "takes minutes: every set of kinds of requests, and every pair of faults"]
fn every_set_of_requests_with_every_pair_of_faults_keeps_its_deadline() {
    let deadline = Duration::from_secs(2);
    let mut troubles = Vec::new();
    for set in 1_usize..1 << METHODS.len() {
        let methods: Vec<Method> = (0..METHODS.len())
            .filter(|at| set & (1 << at) != 0)
            .map(|at| METHODS[at])
            .collect();
        let by_sips = methods.contains(&Method::Put);
        for fault in faults(deadline) {
            for by_sips in [false, true].into_iter().take(1 + usize::from(by_sips)) {
                troubles.push(Trouble {
                    methods: methods.clone(),
                    fault,
                    other: None,
                    by_sips,
                });
            }
        }
        if by_sips {
            troubles.push(Trouble {
                methods,
                fault: BucketFault::Nothing,
                other: None,
                by_sips,
            });
        }
    }
    for fault in faults(deadline) {
        for other in faults(deadline) {
            if fault != other {
                troubles.push(Trouble {
                    methods: METHODS.to_vec(),
                    fault,
                    other: Some(other),
                    by_sips: false,
                });
            }
        }
    }
    let worst = run_all(troubles, deadline, 8);
    assert!(worst.job <= 1.2, "{worst:?}");
    assert!(worst.call < deadline / 10, "{worst:?}");
}
