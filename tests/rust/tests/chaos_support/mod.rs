//! What the process that is killed and the one that kills it have in common.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::allow_attributes,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::missing_panics_doc,
    clippy::disallowed_methods,
    clippy::print_stdout,
    missing_docs,
    reason = "shared by the parts of one test program"
)]

pub mod child;
pub mod ground;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvstrata_core::config::{Size, TierOptions};
use kvstrata_core::io::probe::is_trial_name;
use kvstrata_core::key::{GroupId, Key};
use kvstrata_testkit::payload::next;
use serde_json::{Map, Value};

/// Keys that are stored, loaded and evicted.
pub const KEYS: u64 = 20_000;
/// How a child ends that was handed wrong bytes.
pub const WRONG_BYTES: i32 = 77;
/// How a child ends that found the space not to be what it was told.
pub const WRONG_SPACE: i32 = 78;
/// How a child ends that found something left over.
pub const LEFTOVERS: i32 = 79;

/// A number below `limit`.
pub fn below(state: &mut u64, limit: u64) -> u64 {
    next(state) % limit
}

/// What differs from run to run, all of it drawn from the seed.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    /// Payload bytes of the rows of both groups.
    pub row_bytes: [u64; 2],
    pub capacity: u64,
    pub slots: usize,
}

/// The groups that rows are stored in.
pub const GROUPS: [GroupId; 2] = [GroupId(0), GroupId(3)];

impl Plan {
    pub fn new(seed: u64) -> Self {
        let mut state = seed;
        Self {
            seed,
            row_bytes: [
                4096 * (1 + below(&mut state, 4)),
                512 + below(&mut state, 12_000),
            ],
            capacity: (16 + below(&mut state, 32)) << 20,
            slots: 32 + usize::try_from(below(&mut state, 64)).unwrap(),
        }
    }

    pub fn row_bytes_of(&self, number: u64) -> usize {
        usize::try_from(self.row_bytes[usize::try_from(number % 2).unwrap()]).unwrap()
    }

    pub fn slot_bytes(&self) -> usize {
        usize::try_from(self.row_bytes[0].max(self.row_bytes[1])).unwrap()
    }

    pub fn options(&self, root: &Path, io_backend: &str) -> TierOptions {
        TierOptions {
            root: root.to_path_buf(),
            identity: Map::from_iter([("model".to_owned(), Value::from("chaos"))]),
            row_bytes: BTreeMap::from([
                (GROUPS[0], self.row_bytes[0]),
                (GROUPS[1], self.row_bytes[1]),
            ]),
            capacity: Size::Bytes(self.capacity),
            min_free: Size::Bytes(0),
            policy: "lru".to_owned(),
            directory: None,
            admission: kvstrata_core::eviction::admission::AdmissionOptions::default(),
            io_backend: io_backend.to_owned(),
            deadline: Duration::from_secs(30),
            share_mode: "private".to_owned(),
            required: true,
            honours_busy: false,
        }
    }
}

/// Key `number`; even ones are of the first group.
pub fn key(number: u64) -> Key {
    let mut bytes = blake3::hash(&number.to_le_bytes()).as_bytes().to_vec();
    bytes.extend(GROUPS[usize::try_from(number % 2).unwrap()].0.to_be_bytes());
    Key::new(&bytes).unwrap()
}

/// Everything below a directory, and itself.
pub fn everything(root: &Path) -> Vec<PathBuf> {
    let mut found = vec![root.to_path_buf()];
    let mut at = 0;
    while let Some(path) = found.get(at).cloned() {
        at += 1;
        if path.is_dir() && !path.is_symlink() {
            for entry in std::fs::read_dir(&path).into_iter().flatten() {
                found.push(entry.unwrap().path());
            }
        }
    }
    found
}

/// Whether it is the file that an opening tier tries the root with, before it knows what is there:
/// all that may be there beyond the capacity.
pub fn is_trial(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(is_trial_name)
}

/// Bytes that everything below a directory takes on the file system.
pub fn allocated(root: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    everything(root)
        .iter()
        .filter(|path| !is_trial(path))
        .filter_map(|path| std::fs::symlink_metadata(path).ok())
        .map(|stat| stat.blocks() * 512)
        .sum()
}
