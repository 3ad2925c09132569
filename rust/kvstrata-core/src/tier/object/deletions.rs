//! Removed rows whose objects are not deleted yet: hidden until they are.

use core::time::Duration;
use std::collections::BTreeMap;
use std::time::Instant;

use hashbrown::HashMap;

use crate::key::Key;
use crate::sys::sync::Arc;
use crate::tier::object::Place;

/// Most objects that wait to be deleted: 16 MiB of them.
const WAITING_MAX: usize = 1 << 17;
/// Deletions at a time; after one failed, one.
const AT_A_TIME: usize = 16;
/// Pause after a deletion failed; doubled with each further one.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_mins(1);

/// An object that is to be deleted.
#[derive(Clone, Debug)]
pub(super) struct Deletion {
    pub(super) of: u64,
    pub(super) place: Arc<Place>,
    pub(super) key: Key,
    /// Its place in line; tells it from an earlier deletion of the same key.
    turn: u64,
}

#[derive(Debug)]
struct Entry {
    deletion: Deletion,
    under_way: bool,
    /// What is being deleted may have been written again meanwhile.
    again: bool,
}

/// What whoever deletes does next.
#[derive(Debug)]
pub(super) enum Next {
    /// Delete this one.
    Delete(Deletion),
    /// Ask again at this time: one has failed.
    At(Instant),
    /// End: there is nothing to do, or others do it.
    Nothing,
}

/// Everything that is to be deleted, by the halves of the keys' fingerprints.
#[derive(Debug, Default)]
pub(super) struct Deletions {
    all: HashMap<u64, Entry>,
    line: BTreeMap<u64, u64>,
    /// Removed before the bucket was in use, which is when the names of their objects are known.
    early: HashMap<u64, Key>,
    turns: u64,
    /// Those who delete.
    tasks: usize,
    /// Deletions that failed since one succeeded.
    failures: u32,
    /// None is tried before this time.
    resume_at: Option<Instant>,
}

impl Deletions {
    /// Puts an object in line. False where too many wait: it stays in the bucket.
    pub(super) fn add(&mut self, of: u64, place: &Arc<Place>, key: Key) -> bool {
        if let Some(entry) = self.all.get_mut(&of) {
            // After a reset it is another object.
            entry.deletion.place = Arc::clone(place);
            entry.again = entry.under_way;
            return true;
        }
        if self.len() >= WAITING_MAX {
            return false;
        }
        let turn = self.next_turn();
        let deletion = Deletion {
            of,
            place: Arc::clone(place),
            key,
            turn,
        };
        self.all.insert(
            of,
            Entry {
                deletion,
                under_way: false,
                again: false,
            },
        );
        self.line.insert(turn, of);
        true
    }

    /// Notes a key for the time when the bucket is in use. False where too many wait.
    pub(super) fn add_early(&mut self, of: u64, key: Key) -> bool {
        if self.len() >= WAITING_MAX && !self.early.contains_key(&of) {
            return false;
        }
        self.early.insert(of, key);
        true
    }

    /// Puts in line what was removed before the bucket was in use; says which keys those are.
    pub(super) fn take_up(&mut self, place: &Arc<Place>) -> Vec<u64> {
        let early = core::mem::take(&mut self.early);
        let added = early
            .into_iter()
            .filter(|(of, key)| self.add(*of, place, *key));
        added.map(|(of, _)| of).collect()
    }

    const fn next_turn(&mut self) -> u64 {
        self.turns = self.turns.wrapping_add(1);
        self.turns
    }

    /// Whether a key was removed and its object may still be there.
    pub(super) fn hides(&self, of: u64) -> bool {
        !self.all.is_empty() && self.all.contains_key(&of)
    }

    /// Whether the object of a key is being deleted now.
    pub(super) fn is_under_way(&self, of: u64) -> bool {
        self.all.get(&of).is_some_and(|entry| entry.under_way)
    }

    /// The key is stored again: its object is not deleted, if it has not been yet. Says whether it
    /// was to be.
    pub(super) fn cancel(&mut self, of: u64) -> bool {
        let Some(entry) = self.all.remove(&of) else {
            return false;
        };
        self.line.remove(&entry.deletion.turn);
        true
    }

    /// Forgets everything: the rows are of an epoch that is over.
    pub(super) fn clear(&mut self) {
        self.all.clear();
        self.line.clear();
        self.early.clear();
    }

    /// How many are to be deleted.
    pub(super) fn len(&self) -> usize {
        self.all.len().saturating_add(self.early.len())
    }

    /// Whether nothing is gained by waiting: all are deleted, or the server refuses to.
    pub(super) fn is_quiet(&self) -> bool {
        self.all.is_empty() || self.failures > 0
    }

    /// How many more are to begin to delete; they count from now on.
    pub(super) fn begin_tasks(&mut self) -> usize {
        let most = if self.failures > 0 { 1 } else { AT_A_TIME };
        let more = most.saturating_sub(self.tasks).min(self.line.len());
        self.tasks = self.tasks.saturating_add(more);
        more
    }

    /// What one who deletes does next; after [`Next::Nothing`] they no longer count.
    pub(super) fn next(&mut self, now: Instant) -> Next {
        if self.line.is_empty() || (self.failures > 0 && self.tasks > 1) {
            self.tasks = self.tasks.saturating_sub(1);
            return Next::Nothing;
        }
        if let Some(at) = self.resume_at.filter(|at| *at > now) {
            return Next::At(at);
        }
        while let Some((_, of)) = self.line.pop_first() {
            if let Some(entry) = self.all.get_mut(&of) {
                entry.under_way = true;
                return Next::Delete(entry.deletion.clone());
            }
        }
        self.tasks = self.tasks.saturating_sub(1);
        Next::Nothing
    }

    /// Notes how a deletion ended. One that failed is tried again after the others, and its key
    /// stays hidden until then. Says whether it is hidden no longer.
    pub(super) fn end(&mut self, deletion: &Deletion, gone: bool, now: Instant) -> bool {
        if gone {
            self.failures = 0;
            self.resume_at = None;
        } else {
            let pause = PAUSE_FIRST.saturating_mul(1 << self.failures.min(6));
            self.failures = self.failures.saturating_add(1);
            self.resume_at = now.checked_add(pause.min(PAUSE_MAX));
        }
        let turn = self.next_turn();
        let Some(entry) = self.all.get_mut(&deletion.of) else {
            return false;
        };
        if entry.deletion.turn != deletion.turn {
            return false;
        }
        if gone && !entry.again {
            self.all.remove(&deletion.of);
            return true;
        }
        entry.under_way = false;
        entry.again = false;
        entry.deletion.turn = turn;
        self.line.insert(turn, deletion.of);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::connect::Style;
    use crate::object::memory_store;
    use crate::object::names::Epoch;
    use crate::sys::clock::{Clock, SystemClock};

    fn place(number: u32) -> Arc<Place> {
        Arc::new(Place {
            store: memory_store(),
            epoch: Epoch { number, suffix: 1 },
            conditional_put: true,
            style: Style::Path,
        })
    }

    fn next(deletions: &mut Deletions) -> Deletion {
        match deletions.next(SystemClock.now()) {
            Next::Delete(deletion) => deletion,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_key_that_is_removed_again_after_a_reset_is_deleted_where_it_is_now() {
        let key = Key::new(&[7; 36]).unwrap();
        let mut deletions = Deletions::default();
        assert!(deletions.add(1, &place(1), key));
        assert_eq!(deletions.begin_tasks(), 1);
        let old = next(&mut deletions);
        assert!(deletions.add(1, &place(2), key));
        assert!(!deletions.end(&old, true, SystemClock.now()));
        assert!(deletions.hides(1));
        let new = next(&mut deletions);
        assert_eq!((old.place.epoch.number, new.place.epoch.number), (1, 2));
        assert!(deletions.end(&new, true, SystemClock.now()));
        assert!(!deletions.hides(1));
    }

    #[test]
    fn what_is_removed_early_is_in_line_once_there_is_a_place_and_not_after_a_reset() {
        let key = Key::new(&[7; 36]).unwrap();
        let mut deletions = Deletions::default();
        assert!(deletions.add_early(1, key));
        assert_eq!((deletions.len(), deletions.begin_tasks()), (1, 0));
        assert_eq!(deletions.take_up(&place(1)), [1]);
        assert_eq!((deletions.len(), deletions.begin_tasks()), (1, 1));
        assert!(deletions.add_early(2, key));
        deletions.clear();
        assert!(deletions.take_up(&place(2)).is_empty());
    }
}
