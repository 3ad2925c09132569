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
            entry.again = entry.under_way;
            return true;
        }
        if self.all.len() >= WAITING_MAX {
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
    }

    /// How many are to be deleted.
    pub(super) fn len(&self) -> usize {
        self.all.len()
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
    /// stays hidden until then.
    pub(super) fn end(&mut self, deletion: &Deletion, gone: bool, now: Instant) {
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
            return;
        };
        if entry.deletion.turn != deletion.turn {
            return;
        }
        if gone && !entry.again {
            self.all.remove(&deletion.of);
            return;
        }
        entry.under_way = false;
        entry.again = false;
        entry.deletion.turn = turn;
        self.line.insert(turn, deletion.of);
    }
}
