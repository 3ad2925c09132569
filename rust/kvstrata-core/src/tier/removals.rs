//! Keys removed while stores that were asked before are not planned yet: those must not bring them
//! back.

use std::collections::HashMap;

use crate::index::Fingerprint;

/// Most keys remembered; beyond that, all stores asked so far count as cancelled.
const KEYS_MAX: usize = 1 << 16;

/// Position of a store among all stores that were asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StoreNumber(u64);

/// For each key removed lately, the first store that was asked after its removal.
#[derive(Debug, Default)]
pub(crate) struct Removals {
    next: StoreNumber,
    by_key: HashMap<Fingerprint, StoreNumber>,
    every_key: StoreNumber,
}

impl Removals {
    /// The number of a store that is asked now.
    pub(crate) const fn ask(&mut self) -> StoreNumber {
        let number = self.next;
        self.next = StoreNumber(number.0.saturating_add(1));
        number
    }

    /// Takes note that a key is removed: stores asked so far no longer bring it.
    pub(crate) fn remove(&mut self, key: Fingerprint) {
        if self.by_key.len() >= KEYS_MAX {
            self.by_key.clear();
            self.every_key = self.next;
        }
        self.by_key.insert(key, self.next);
    }

    /// Whether a key was removed after this store was asked.
    pub(crate) fn cancel(&self, key: Fingerprint, store: StoreNumber) -> bool {
        store < self.every_key || self.by_key.get(&key).is_some_and(|after| store < *after)
    }

    /// Forgets all: no store is left that is not planned.
    pub(crate) fn clear(&mut self) {
        self.by_key.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Fingerprinter;
    use crate::key::Key;

    fn key(number: usize) -> Fingerprint {
        let mut bytes = [0; 36];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        Fingerprinter::new([1; 16]).of(&Key::new(&bytes).unwrap())
    }

    #[test]
    fn a_removal_cancels_the_stores_before_it_only() {
        let mut removals = Removals::default();
        let before = removals.ask();
        removals.remove(key(1));
        let after = removals.ask();
        assert!(removals.cancel(key(1), before));
        assert!(!removals.cancel(key(1), after));
        assert!(!removals.cancel(key(2), before));
        removals.clear();
        assert!(!removals.cancel(key(1), before));
    }

    #[test]
    fn more_removals_than_are_remembered_cancel_every_earlier_store() {
        let mut removals = Removals::default();
        let before = removals.ask();
        (0..=KEYS_MAX).for_each(|number| removals.remove(key(number)));
        assert!(removals.by_key.len() <= KEYS_MAX);
        assert!((0..KEYS_MAX).all(|number| removals.cancel(key(number), before)));
        assert!(!removals.cancel(key(0), removals.next));
    }
}
