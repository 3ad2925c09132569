//! The process that is killed: stores, loads, evicts, removes, and checks every byte it is handed.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvstrata_core::buffer::Arena;
use kvstrata_core::job::{JobResult, Outcome};
use kvstrata_core::key::Key;
use kvstrata_core::tier::{Seams, Tier};
use kvstrata_testkit::memory::leaked_arena;
use kvstrata_testkit::payload::payload;

use super::{
    KEYS, LEFTOVERS, Plan, WRONG_BYTES, WRONG_SPACE, allocated, below, everything, is_trial, key,
};

struct Child {
    plan: Plan,
    tier: Tier,
    arena: Arc<Arena>,
    chance: u64,
    jobs: u64,
}

fn fail(code: i32, why: &str) -> ! {
    println!("{why}");
    std::process::exit(code);
}

/// Runs until it is killed, or for `jobs` jobs and to a clean end if that is not zero.
pub fn run(root: &Path, plan: Plan, io_backend: &str, chance: u64, jobs: u64) {
    let arena = leaked_arena(2 * plan.slots * plan.slot_bytes(), 0).unwrap();
    let options = plan.options(root, io_backend);
    let tier = Tier::open_shared(options, Arc::clone(&arena), Seams::default()).unwrap();
    let mut child = Child {
        plan,
        tier,
        arena,
        chance,
        jobs: 0,
    };
    child.check_space(root);
    Child::check_leftovers(root);
    let stats = child.tier.stats().unwrap();
    println!(
        "open {} {} {}",
        stats["rows"], stats["junk"], stats["used_bytes"]
    );
    std::io::stdout().flush().unwrap();
    while jobs == 0 || child.jobs < jobs {
        child.step();
    }
    child.tier.drain().unwrap();
    child.check_space(root);
    child.tier.close(Duration::from_secs(30)).unwrap();
}

impl Child {
    /// What the tier says it uses is what its files take and, at most, one block more for every 340
    /// pages of a row file, which its extents may come to take; and no more than it may.
    fn check_space(&self, root: &Path) {
        let stats = self.tier.stats().unwrap();
        let used = stats["used_bytes"].as_u64().unwrap();
        let taken = allocated(root);
        let lengths = everything(root)
            .into_iter()
            .filter(|path| path.extension() == Some("rows".as_ref()))
            .map(|path| std::fs::metadata(path).unwrap().len());
        let extents: u64 = lengths
            .map(|length| 4096 * (length / 4096).div_ceil(340))
            .sum();
        if !(taken..=taken + extents).contains(&used) || used > self.plan.capacity {
            let capacity = self.plan.capacity;
            fail(
                WRONG_SPACE,
                &format!("{used} bytes counted, {taken} taken, {capacity} allowed"),
            );
        }
    }

    /// Nothing of any life before is left but what a reader could use.
    fn check_leftovers(root: &Path) {
        let all = everything(root);
        let unfinished = all
            .iter()
            .find(|path| path.extension() == Some("tmp".as_ref()));
        let leases = all.iter().filter(|path| path.ends_with("lock")).count();
        let trials = all.iter().find(|path| is_trial(path));
        if unfinished.is_some() || trials.is_some() || leases != 1 {
            fail(
                LEFTOVERS,
                &format!("{unfinished:?} {trials:?}, {leases} leases"),
            );
        }
    }

    /// Some neighbouring keys.
    fn numbers(&mut self) -> Vec<u64> {
        let first = below(&mut self.chance, KEYS);
        let slots = u64::try_from(self.plan.slots).unwrap();
        let count = 1 + below(&mut self.chance, slots);
        (first..first + count).map(|number| number % KEYS).collect()
    }

    fn offsets(&self, half: usize, count: usize) -> Vec<u64> {
        (0..count)
            .map(|slot| self.offset(half, slot))
            .map(|offset| u64::try_from(offset).unwrap())
            .collect()
    }

    fn offset(&self, half: usize, slot: usize) -> usize {
        (half * self.plan.slots + slot) * self.plan.slot_bytes()
    }

    /// A store and a load at once, sometimes a removal between.
    fn step(&mut self) {
        let (stored, loaded) = (self.numbers(), self.numbers());
        let keys = |numbers: &[u64]| {
            numbers
                .iter()
                .map(|number| key(*number))
                .collect::<Vec<Key>>()
        };
        for (slot, number) in stored.iter().enumerate() {
            let row = payload(key(*number).as_bytes(), self.plan.row_bytes_of(*number));
            assert!(self.arena.copy_in(self.offset(0, slot), &row));
        }
        let nothing = vec![0xEE; self.plan.slots * self.plan.slot_bytes()];
        assert!(self.arena.copy_in(self.offset(1, 0), &nothing));
        let (store, load) = (self.jobs + 1, self.jobs + 2);
        self.jobs += 2;
        let offsets = self.offsets(0, stored.len());
        self.tier.store(store, &keys(&stored), &offsets).unwrap();
        if below(&mut self.chance, 8) == 0 {
            self.tier.remove(&keys(&stored[..1])).unwrap();
        }
        let offsets = self.offsets(1, loaded.len());
        self.tier.load(load, &keys(&loaded), &offsets).unwrap();
        for result in self.results(2) {
            if result.job_id == load {
                self.check_rows(&loaded, &result.outcomes);
            }
        }
    }

    fn results(&self, count: usize) -> Vec<JobResult> {
        let mut results = Vec::new();
        while results.len() < count {
            results.extend(self.tier.wait(Duration::from_secs(30)).unwrap());
        }
        results
    }

    fn check_rows(&self, numbers: &[u64], outcomes: &[Outcome]) {
        for (slot, (number, outcome)) in numbers.iter().zip(outcomes).enumerate() {
            match outcome {
                Outcome::Ok => {
                    let row = payload(key(*number).as_bytes(), self.plan.row_bytes_of(*number));
                    let mut held = vec![0; row.len()];
                    assert!(self.arena.copy_out(self.offset(1, slot), &mut held));
                    if held != row {
                        fail(WRONG_BYTES, &format!("wrong bytes for key {number}"));
                    }
                }
                Outcome::Miss | Outcome::Corrupt => {}
                other => panic!("a load ended as {other:?}"),
            }
        }
    }
}
