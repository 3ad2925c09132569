//! A tier over a leaked arena in a temporary root, with payloads derived from keys.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::allow_attributes,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::as_conversions,
    clippy::print_stderr,
    clippy::disallowed_methods,
    clippy::missing_panics_doc,
    missing_docs,
    reason = "shared by several test programs, each of which uses a part"
)]

pub mod faulty;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvstrata_core::buffer::Arena;
use kvstrata_core::config::{Size, TierOptions};
use kvstrata_core::job::{JobResult, Outcome};
use kvstrata_core::key::{GroupId, Key};
use kvstrata_core::tier::{Seams, Tier};
use kvstrata_testkit::memory::leaked_arena;
use kvstrata_testkit::payload::payload;
use serde_json::{Map, Value, json};

pub mod mounts;

pub const ROW_BYTES: usize = 5000;

pub struct Harness {
    pub tier: Tier,
    pub arena: Arc<Arena>,
    pub row_bytes: usize,
    next_job: u64,
}

pub fn identity() -> Map<String, Value> {
    match json!({"model": "m", "dtype": "bfloat16"}) {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

pub fn options(root: &Path, row_bytes: usize, capacity: u64) -> TierOptions {
    TierOptions {
        root: root.to_path_buf(),
        identity: identity(),
        row_bytes: BTreeMap::from([
            (GroupId(0), row_bytes as u64),
            (GroupId(7), row_bytes as u64),
        ]),
        capacity: Size::Bytes(capacity),
        min_free: Size::Bytes(0),
        policy: "lru".to_owned(),
        directory: None,
        admission: kvstrata_core::eviction::admission::AdmissionOptions::default(),
        io_backend: io_backend().to_owned(),
        deadline: Duration::from_secs(30),
        share_mode: "private".to_owned(),
        required: true,
        honours_busy: false,
    }
}

/// The engine that a test program is for, by its name. Where whoever runs the tests says that this
/// process may not use `io_uring`, the tier has to find out by itself.
pub fn io_backend() -> &'static str {
    if std::env::var_os("KVSTRATA_TEST_RING_DENIED").is_some() {
        "auto"
    } else if env!("CARGO_CRATE_NAME").ends_with("_uring") {
        "uring"
    } else {
        "threads"
    }
}

pub fn key(number: u64, group: u32) -> Key {
    let mut bytes = blake3::hash(&number.to_le_bytes()).as_bytes().to_vec();
    bytes.extend(group.to_be_bytes());
    Key::new(&bytes).unwrap()
}

pub fn keys(numbers: impl IntoIterator<Item = u64>) -> Vec<Key> {
    numbers.into_iter().map(|number| key(number, 0)).collect()
}

impl Harness {
    pub fn open(options: TierOptions, slots: usize) -> Self {
        Self::open_with(options, slots, Seams::default())
    }

    pub fn open_with(options: TierOptions, slots: usize, seams: Seams) -> Self {
        let row_bytes = usize::try_from(*options.row_bytes.values().max().unwrap()).unwrap();
        let arena = leaked_arena(slots * row_bytes, 0).unwrap();
        let tier = Tier::open_shared(options, Arc::clone(&arena), seams).unwrap();
        Self {
            tier,
            arena,
            row_bytes,
            next_job: 1,
        }
    }

    /// A harness around a tier that was opened some other way.
    pub const fn around(tier: Tier, arena: Arc<Arena>, row_bytes: usize) -> Self {
        Self {
            tier,
            arena,
            row_bytes,
            next_job: 1,
        }
    }

    pub fn offsets(&self, count: usize) -> Vec<u64> {
        (0..count).map(|at| (at * self.row_bytes) as u64).collect()
    }

    pub fn fill(&self, keys: &[Key]) {
        for (at, key) in keys.iter().enumerate() {
            let bytes = payload(key.as_bytes(), self.row_bytes);
            assert!(self.arena.copy_in(at * self.row_bytes, &bytes));
        }
    }

    pub fn wipe(&self) {
        let zeros = vec![0xEE; self.arena.length()];
        assert!(self.arena.copy_in(0, &zeros));
    }

    pub fn begin_store(&mut self, keys: &[Key]) -> u64 {
        self.fill(keys);
        let job = self.job();
        self.tier
            .store(job, keys, &self.offsets(keys.len()))
            .unwrap();
        job
    }

    /// Stores from the slots from `first` on, and leaves the others alone.
    pub fn begin_store_at(&mut self, first: usize, keys: &[Key]) -> u64 {
        let offsets = self.offsets(first + keys.len()).split_off(first);
        for (key, offset) in keys.iter().zip(&offsets) {
            let bytes = payload(key.as_bytes(), self.row_bytes);
            let at = usize::try_from(*offset).unwrap();
            assert!(self.arena.copy_in(at, &bytes));
        }
        let job = self.job();
        self.tier.store(job, keys, &offsets).unwrap();
        job
    }

    pub fn begin_load(&mut self, keys: &[Key]) -> u64 {
        let job = self.job();
        self.tier
            .load(job, keys, &self.offsets(keys.len()))
            .unwrap();
        job
    }

    /// Begins to load keys to these slots.
    pub fn begin_load_at(&mut self, keys: &[Key], slots: &[usize]) -> u64 {
        let row_bytes = self.row_bytes;
        let offsets: Vec<u64> = slots.iter().map(|slot| (slot * row_bytes) as u64).collect();
        let job = self.job();
        self.tier.load(job, keys, &offsets).unwrap();
        job
    }

    /// The results of jobs, in the order given.
    pub fn results(&self, jobs: &[u64]) -> Vec<JobResult> {
        let mut found = BTreeMap::new();
        for _ in 0..200 {
            if found.len() == jobs.len() {
                break;
            }
            for result in self.tier.wait(Duration::from_millis(500)).unwrap() {
                assert!(jobs.contains(&result.job_id), "of another job: {result:?}");
                found.insert(result.job_id, result);
            }
        }
        jobs.iter().map(|job| found.remove(job).unwrap()).collect()
    }

    /// Asserts that nothing is left of any load: no pin, no waiter, no buffer.
    pub fn assert_quiet(&self) {
        self.tier.drain().unwrap();
        for name in ["rows_being_read", "load_bytes_open"] {
            assert_eq!(self.stat(name), 0, "{name}");
        }
        // A buffer comes back a moment after what was read to it was settled.
        let until = Instant::now() + Duration::from_secs(20);
        while self.stat("load_buffer_bytes") > 0 {
            assert!(Instant::now() < until, "a buffer was not given back");
            std::thread::yield_now();
        }
        let stats = self.tier.stats().unwrap();
        for (group, of_group) in stats["groups"].as_object().unwrap() {
            assert_eq!(
                of_group["rows"], of_group["evictable_rows"],
                "group {group}"
            );
        }
    }

    pub fn job(&mut self) -> u64 {
        self.next_job += 1;
        self.next_job
    }

    pub fn result(&self, job: u64) -> JobResult {
        for _ in 0..200 {
            for result in self.tier.wait(Duration::from_millis(500)).unwrap() {
                if result.job_id == job {
                    return result;
                }
            }
        }
        panic!("job {job} did not end");
    }

    pub fn store(&mut self, keys: &[Key]) -> Vec<Outcome> {
        let job = self.begin_store(keys);
        self.result(job).outcomes
    }

    /// Stores rows that a test starts from: again where a busy machine did not do it by the tier's
    /// deadline, which may be short.
    pub fn store_all(&mut self, keys: &[Key]) {
        let mut outcomes = Vec::new();
        for _ in 0..10 {
            outcomes = self.store(keys);
            if outcomes.iter().all(|outcome| outcome.is_success()) {
                return;
            }
        }
        panic!("not stored: {outcomes:?}");
    }

    /// Loads and checks: every slot with outcome ok holds its key's payload.
    pub fn load(&mut self, keys: &[Key]) -> Vec<Outcome> {
        self.wipe();
        let job = self.begin_load(keys);
        let outcomes = self.result(job).outcomes;
        for (at, outcome) in outcomes.iter().enumerate() {
            if *outcome == Outcome::Ok {
                assert!(self.holds(at, &keys[at]), "slot {at} holds other bytes");
            }
        }
        outcomes
    }

    pub fn holds(&self, slot: usize, key: &Key) -> bool {
        let mut bytes = vec![0; self.row_bytes];
        assert!(self.arena.copy_out(slot * self.row_bytes, &mut bytes));
        bytes == payload(key.as_bytes(), self.row_bytes)
    }

    pub fn found(&self, keys: &[Key]) -> Vec<bool> {
        self.tier
            .lookup(keys)
            .unwrap()
            .into_iter()
            .map(Option::unwrap)
            .collect()
    }

    pub fn stat(&self, name: &str) -> u64 {
        self.tier.stats().unwrap()[name].as_u64().unwrap()
    }
}

/// All row files below a root, sorted.
pub fn row_files(root: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![root.to_path_buf()];
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if path
                .extension()
                .is_some_and(|extension| extension == "rows")
            {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Bytes that everything below a root, and the root itself, take on the file system.
pub fn bytes_on_disk(root: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let mut bytes = 0;
    let mut open = vec![root.to_path_buf()];
    while let Some(path) = open.pop() {
        // What goes while it is looked at is gone.
        let Ok(stat) = std::fs::symlink_metadata(&path) else {
            continue;
        };
        bytes += stat.blocks() * 512;
        if stat.is_dir()
            && let Ok(entries) = std::fs::read_dir(&path)
        {
            open.extend(entries.map_while(|entry| Some(entry.ok()?.path())));
        }
    }
    bytes
}

/// Checks that the tier counts everything below its root, and beyond that at most what its row files
/// may come to take: pages that were not reserved, where space cannot be, and for their extents one
/// block of 4 KiB for every 340 pages, or part of that.
pub fn assert_accounted(harness: &Harness, root: &Path) {
    use std::os::unix::fs::MetadataExt;
    let (used, on_disk) = (harness.stat("used_bytes"), bytes_on_disk(root));
    let more: u64 = row_files(root)
        .into_iter()
        .filter_map(|path| std::fs::symlink_metadata(path).ok())
        .map(|stat| {
            let unreserved = stat.len().saturating_sub(stat.blocks() * 512);
            unreserved + 4096 * (stat.len() / 4096).div_ceil(340)
        })
        .sum();
    assert!(
        (on_disk..=on_disk + more).contains(&used),
        "{used} bytes are counted and {on_disk} taken; row files may take {more} more"
    );
}

/// A count as a number of bytes.
pub const fn wide(count: usize) -> u64 {
    count as u64
}
