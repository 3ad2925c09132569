//! The order of vLLM 0.33's `LRUCachePolicy` (`v1/kv_offload/cpu/policies/lru.py`), for use in its
//! place.
//!
//! It differs from [`Lru`](super::lru::Lru) while requests are open: their keys have the rank of
//! their request's first access and a place in it, so that rows which a request stores late do not
//! outlive the head of one that began after it. When a request ends, its keys are the latest.
//! An entry that may go takes some 50 bytes, any other 16; changes take logarithmic time.

use std::collections::BTreeSet;

/// Rank, places before the end of the request, number.
type Key = (u64, u32, u32);

#[derive(Clone, Copy, Debug)]
struct Entry {
    rank: u64,
    /// The larger, the nearer to the head; the largest for keys without a place.
    nearness: u32,
    free: bool,
}

/// The order; see the module. Entries are numbers that their owner gives.
#[derive(Debug, Default)]
pub struct Ranked {
    entries: Vec<Option<Entry>>,
    free: BTreeSet<Key>,
    rank: u64,
}

fn at(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

impl Ranked {
    /// An empty order.
    pub fn new() -> Self {
        Self::default()
    }

    /// The next rank: of a request that begins, or of an access that belongs to none.
    pub fn next_rank(&mut self) -> u64 {
        self.rank = self.rank.saturating_add(1);
        self.rank
    }

    fn entry(&self, number: u32) -> Option<Entry> {
        *self.entries.get(at(number))?
    }

    fn set(&mut self, number: u32, entry: Entry) {
        self.remove(number);
        if self.entries.len() <= at(number) {
            self.entries.resize(at(number).saturating_add(1), None);
        }
        if let Some(place) = self.entries.get_mut(at(number)) {
            *place = Some(entry);
        }
        if entry.free {
            self.free.insert((entry.rank, entry.nearness, number));
        }
    }

    /// Adds an entry: at a rank and a position in its request, or as the latest of all.
    pub fn insert(&mut self, number: u32, place: Option<(u64, u32)>, free: bool) {
        let (rank, position) = match place {
            Some(place) => place,
            None => (self.next_rank(), 0),
        };
        let nearness = u32::MAX.saturating_sub(position);
        self.set(
            number,
            Entry {
                rank,
                nearness,
                free,
            },
        );
    }

    /// Gives an entry a rank and a position, unless it has a later one.
    pub fn raise(&mut self, number: u32, rank: u64, position: u32) {
        let nearness = u32::MAX.saturating_sub(position);
        if let Some(entry) = self.entry(number)
            && (entry.rank, entry.nearness) < (rank, nearness)
        {
            let free = entry.free;
            self.set(
                number,
                Entry {
                    rank,
                    nearness,
                    free,
                },
            );
        }
    }

    /// Makes entries the latest ones, the first of them the very latest.
    pub fn renew(&mut self, head_first: &[u32]) {
        for number in head_first.iter().rev() {
            if let Some(entry) = self.entry(*number) {
                self.insert(*number, None, entry.free);
            }
        }
    }

    /// Says whether an entry may go.
    pub fn set_free(&mut self, number: u32, free: bool) {
        if let Some(entry) = self.entry(number) {
            self.set(number, Entry { free, ..entry });
        }
    }

    /// Forgets an entry.
    pub fn remove(&mut self, number: u32) {
        if let Some(entry) = self.entries.get_mut(at(number)).and_then(Option::take) {
            self.free.remove(&(entry.rank, entry.nearness, number));
        }
    }

    /// Takes out exactly `need` entries that may go and are not protected, coldest first; or none.
    pub fn evict(&mut self, need: usize, protected: impl Fn(u32) -> bool) -> Option<Vec<u32>> {
        let all = self.free.iter().map(|(_, _, number)| *number);
        let chosen: Vec<u32> = all
            .filter(|number| !protected(*number))
            .take(need)
            .collect();
        if chosen.len() < need {
            return None;
        }
        for number in &chosen {
            self.remove(*number);
        }
        Some(chosen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_rows_of_an_older_request_go_before_the_head_of_a_younger_one() {
        let mut order = Ranked::new();
        let (first, second) = (order.next_rank(), order.next_rank());
        order.insert(0, Some((first, 16)), true);
        order.insert(1, Some((second, 16)), true);
        order.insert(2, Some((first, 32)), true);
        assert_eq!(order.evict(3, |_| false), Some(vec![2, 0, 1]));
    }

    #[test]
    fn when_a_request_has_ended_its_keys_are_the_latest() {
        let mut order = Ranked::new();
        for number in 0..4 {
            order.insert(number, None, true);
        }
        order.renew(&[0, 1, 9]);
        assert_eq!(order.evict(5, |_| false), None);
        assert_eq!(order.evict(4, |_| false), Some(vec![2, 3, 1, 0]));
    }

    #[test]
    fn an_entry_in_use_or_protected_stays_and_keeps_its_place() {
        let mut order = Ranked::new();
        let rank = order.next_rank();
        for number in 0..4 {
            order.insert(number, Some((rank, number)), true);
        }
        order.set_free(3, false);
        assert_eq!(order.evict(2, |number| number == 2), Some(vec![1, 0]));
        order.set_free(3, true);
        order.raise(2, rank, 9);
        assert_eq!(order.evict(2, |_| false), Some(vec![3, 2]));
    }
}
