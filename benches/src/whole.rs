//! The whole path: a tier with its index, row tables, eviction and checksums.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvstrata_core::buffer::Arena;
use kvstrata_core::config::{Size, TierOptions};
use kvstrata_core::error::{Error, Result};
use kvstrata_core::io::Direction;
use kvstrata_core::job::JobResult;
use kvstrata_core::key::{GroupId, Key};
use kvstrata_core::tier::{Seams, Tier};
use kvstrata_testkit::payload::{next, payload};

use crate::count;
use crate::ground::PASSES_HELD;
use crate::measure::Pass;

const JOB_TIME_MAX: Duration = Duration::from_mins(5);
/// Room for superblocks and row tables, beside the rows.
const OVERHEAD: usize = 64;

/// A tier with one group, and the keys it was given.
#[derive(Debug)]
pub struct Whole {
    tier: Tier,
    row_bytes: usize,
    pass_bytes: usize,
    /// All keys that may be there, the last stored at the end.
    stored: Vec<Key>,
    made: u64,
    jobs: u64,
}

impl Whole {
    /// Opens an empty tier at `root` with as much room as the reference's file has.
    ///
    /// # Errors
    /// As [`Tier::open`].
    pub fn open(
        root: PathBuf,
        io_backend: &str,
        row_bytes: usize,
        arena: &Arc<Arena>,
    ) -> Result<Self> {
        let pass_bytes = arena.length();
        let held = pass_bytes * PASSES_HELD;
        let mut identity = serde_json::Map::new();
        identity.insert("model".to_owned(), "bench".into());
        let options = TierOptions {
            root,
            identity,
            row_bytes: [(GroupId(0), count(row_bytes))].into(),
            capacity: Size::Bytes(count(held + held / OVERHEAD)),
            min_free: Size::Bytes(0),
            policy: "lru".to_owned(),
            directory: None,
            admission: kvstrata_core::eviction::admission::AdmissionOptions::default(),
            io_backend: io_backend.to_owned(),
            deadline: JOB_TIME_MAX,
            share_mode: "private".to_owned(),
            required: true,
            honours_busy: false,
        };
        Ok(Self {
            tier: Tier::open_shared(options, Arc::clone(arena), Seams::default())?,
            row_bytes,
            pass_bytes,
            stored: Vec::new(),
            made: 0,
            jobs: 0,
        })
    }

    /// Stores a pass of new rows, all jobs at once, each of `job_bytes` or one row; None when a row was not stored.
    ///
    /// # Errors
    /// As [`Tier::store`].
    pub fn store(&mut self, job_bytes: usize) -> Result<Option<Pass>> {
        let mut keys = Vec::new();
        for _ in 0..self.pass_bytes / self.row_bytes {
            self.made += 1;
            let mut bytes = payload(&self.made.to_le_bytes(), 32);
            bytes.extend(0_u32.to_be_bytes());
            keys.push(Key::new(&bytes)?);
        }
        let pass = self.run(Direction::Write, &keys, job_bytes)?;
        self.stored.extend(keys);
        let rows_max = PASSES_HELD * self.pass_bytes / self.row_bytes;
        let excess = self.stored.len().saturating_sub(rows_max);
        self.stored.drain(..excess);
        Ok(pass)
    }

    /// Fills the tier until every store must evict, then puts the rows in a random order of age,
    /// so that the next pass overwrites rows at random places.
    ///
    /// # Errors
    /// As [`Tier::store`].
    pub fn settle(&mut self, seed: &mut u64) -> Result<()> {
        while self.made < count((PASSES_HELD + 1) * self.pass_bytes / self.row_bytes) {
            if self.store(self.pass_bytes)?.is_none() {
                return Err(Error::argument("the tier cannot be filled"));
            }
        }
        self.stored.sort_by_cached_key(|_| next(seed));
        for key in &self.stored {
            self.tier.touch(core::slice::from_ref(key))?;
        }
        // The order in which they will be evicted.
        let known = self.tier.lookup(&self.stored)?;
        let mut known = known.into_iter();
        self.stored.retain(|_| known.next().flatten() == Some(true));
        Ok(())
    }

    /// Loads a pass of rows in random order, all jobs at once, each of `job_bytes` or one row; None when a row was not loaded.
    ///
    /// # Errors
    /// As [`Tier::load`].
    pub fn load(&mut self, seed: &mut u64, job_bytes: usize) -> Result<Option<Pass>> {
        let mut keys = self.stored.clone();
        keys.sort_by_cached_key(|_| next(seed));
        keys.truncate(self.pass_bytes / self.row_bytes);
        self.run(Direction::Read, &keys, job_bytes)
    }

    /// Closes the tier.
    ///
    /// # Errors
    /// As [`Tier::close`].
    pub fn close(self) -> Result<()> {
        self.tier.close(JOB_TIME_MAX)
    }

    fn run(
        &mut self,
        direction: Direction,
        keys: &[Key],
        job_bytes: usize,
    ) -> Result<Option<Pass>> {
        let mut outcome = Ok(false);
        let pass = Pass::of(keys.len() * self.row_bytes, || {
            outcome = self.jobs(direction, keys, job_bytes);
        });
        Ok(outcome?.then_some(pass))
    }

    fn jobs(&mut self, direction: Direction, keys: &[Key], job_bytes: usize) -> Result<bool> {
        let mut slots = (0..).step_by(self.row_bytes).map(count);
        let mut open = 0_usize;
        for keys in keys.chunks((job_bytes / self.row_bytes).max(1)) {
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
            good &= results.iter().all(JobResult::success);
            open = open.saturating_sub(results.len());
        }
        Ok(good)
    }
}
