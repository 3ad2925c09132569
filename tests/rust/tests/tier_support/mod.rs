//! A tier over a leaked arena in a temporary root, with payloads derived from keys.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::allow_attributes,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::as_conversions,
    clippy::missing_panics_doc,
    missing_docs,
    reason = "shared by several test programs, each of which uses a part"
)]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvstrata_core::buffer::Arena;
use kvstrata_core::config::{Size, TierOptions};
use kvstrata_core::job::{JobResult, Outcome};
use kvstrata_core::key::{GroupId, Key};
use kvstrata_core::tier::{Seams, Tier};
use kvstrata_testkit::memory::leaked_arena;
use kvstrata_testkit::payload::payload;
use serde_json::{Map, Value, json};

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
        io_backend: io_backend().to_owned(),
        deadline: Duration::from_secs(30),
        share_mode: "private".to_owned(),
        required: true,
        honours_busy: false,
    }
}

/// The engine that a test program is for, by its name.
pub fn io_backend() -> &'static str {
    if env!("CARGO_CRATE_NAME").ends_with("_uring") {
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

    pub fn begin_load(&mut self, keys: &[Key]) -> u64 {
        let job = self.job();
        self.tier
            .load(job, keys, &self.offsets(keys.len()))
            .unwrap();
        job
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
        #[expect(
            clippy::disallowed_methods,
            reason = "a test looks at what the tier wrote"
        )]
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
