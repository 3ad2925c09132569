//! The whole path: a tier with its index, row tables, eviction and checksums.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use kvstrata_core::config::{Size, TierOptions};
use kvstrata_core::error::{Error, Result};
use kvstrata_core::io::Direction;
use kvstrata_core::key::{GroupId, Key};
use kvstrata_core::tier::Tier;
use kvstrata_testkit::memory::leaked;
use kvstrata_testkit::payload::{next, payload};

use crate::measure::Pass;

/// Bytes of a job, about what a long prompt stores at once.
const JOB_BYTES: usize = 16 << 20;
const JOB_TIME_MAX: Duration = Duration::from_mins(5);

/// A tier with one group for each row size, and what was stored last in each.
#[derive(Debug)]
pub struct Whole {
    tier: Tier,
    row_bytes: Vec<usize>,
    pass_bytes: usize,
    stored: BTreeMap<GroupId, Vec<Key>>,
    keys: u64,
    jobs: u64,
}

impl Whole {
    /// Opens a tier at `root` that holds two passes of each row size.
    ///
    /// # Errors
    /// As [`Tier::open`].
    pub fn open(root: PathBuf, row_bytes: &[usize], pass_bytes: usize) -> Result<Self> {
        let arena = leaked(pass_bytes, 0)?;
        let pattern = payload(b"whole path", 1 << 20);
        for offset in (0..pass_bytes).step_by(pattern.len()) {
            if !arena.copy_in(offset, &pattern) {
                return Err(Error::argument("a pass is whole MiB"));
            }
        }
        let groups = (0..)
            .map(GroupId)
            .zip(row_bytes.iter().map(|bytes| count(*bytes)));
        let mut identity = serde_json::Map::new();
        identity.insert("model".to_owned(), "bench".into());
        let options = TierOptions {
            root,
            identity,
            row_bytes: groups.collect(),
            capacity: Size::Bytes(count(pass_bytes) * 2 * count(row_bytes.len())),
            min_free: Size::Bytes(0),
            policy: "lru".to_owned(),
            io_backend: "auto".to_owned(),
            deadline: JOB_TIME_MAX,
            share_mode: "private".to_owned(),
            required: true,
            honours_busy: false,
        };
        Ok(Self {
            tier: Tier::open(options, arena)?,
            row_bytes: row_bytes.to_vec(),
            pass_bytes,
            stored: BTreeMap::new(),
            keys: 0,
            jobs: 0,
        })
    }

    /// Stores a pass of new rows, or loads the rows stored last in random order, all jobs at once;
    /// None when a row was not stored or loaded.
    ///
    /// # Errors
    /// As [`Tier::store`] and [`Tier::load`].
    pub fn pass(
        &mut self,
        direction: Direction,
        row_bytes: usize,
        seed: &mut u64,
    ) -> Result<Option<Pass>> {
        let position = self.row_bytes.iter().position(|bytes| *bytes == row_bytes);
        let group = position
            .and_then(|position| u32::try_from(position).ok())
            .map(GroupId);
        let group = group.ok_or_else(|| Error::argument("no group has rows of that size"))?;
        let last = self.stored.get(&group).cloned().unwrap_or_default();
        let known = self.tier.lookup(&last)?;
        if direction == Direction::Read && (last.is_empty() || known.contains(&Some(false))) {
            // Other sizes may have taken the space since.
            self.store(group, row_bytes)?;
        }
        if direction == Direction::Write {
            return self.store(group, row_bytes);
        }
        let mut keys = self.stored.get(&group).cloned().unwrap_or_default();
        keys.sort_by_cached_key(|_| next(seed));
        self.run(direction, row_bytes, &keys)
    }

    /// Closes the tier.
    ///
    /// # Errors
    /// As [`Tier::close`].
    pub fn close(self) -> Result<()> {
        self.tier.close(JOB_TIME_MAX)
    }

    fn store(&mut self, group: GroupId, row_bytes: usize) -> Result<Option<Pass>> {
        let mut keys = Vec::new();
        for _ in 0..self.pass_bytes / row_bytes {
            self.keys += 1;
            let mut bytes = payload(&self.keys.to_le_bytes(), 32);
            bytes.extend(group.0.to_be_bytes());
            keys.push(Key::new(&bytes)?);
        }
        let pass = self.run(Direction::Write, row_bytes, &keys)?;
        self.stored.insert(group, keys);
        Ok(pass)
    }

    fn run(
        &mut self,
        direction: Direction,
        row_bytes: usize,
        keys: &[Key],
    ) -> Result<Option<Pass>> {
        let bytes = keys.len() * row_bytes;
        let mut outcome = Ok(false);
        let pass = Pass::of(bytes, || outcome = self.jobs(direction, row_bytes, keys));
        Ok(outcome?.then_some(pass))
    }

    fn jobs(&mut self, direction: Direction, row_bytes: usize, keys: &[Key]) -> Result<bool> {
        let mut slots = (0..).step_by(row_bytes).map(count);
        let mut open = 0_usize;
        for keys in keys.chunks((JOB_BYTES / row_bytes).max(1)) {
            let offsets: Vec<u64> = slots.by_ref().take(keys.len()).collect();
            self.jobs += 1;
            match direction {
                Direction::Write => self.tier.store(self.jobs, keys, &offsets)?,
                Direction::Read => self.tier.load(self.jobs, keys, &offsets)?,
            }
            open += 1;
        }
        let mut good = true;
        while open > 0 {
            let results = self.tier.wait(JOB_TIME_MAX)?;
            if results.is_empty() {
                return Ok(false);
            }
            good &= results.iter().all(kvstrata_core::job::JobResult::success);
            open = open.saturating_sub(results.len());
        }
        Ok(good)
    }
}

fn count(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}
