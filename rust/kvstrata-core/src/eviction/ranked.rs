//! The order of vLLM 0.33's `LRUCachePolicy` (`v1/kv_offload/cpu/policies/lru.py`), for use in its
//! place.
//!
//! It differs from [`Lru`](super::lru::Lru) while requests are open: their keys have the rank of
//! their request's first access and a place in it, so that rows which a request stores late do not
//! outlive the head of one that began after it. When a request ends, its keys are the latest.
//!
//! An entry that moves leaves its old place behind, to be dropped when a search for victims comes
//! upon it or when most places are such: moving takes constant time but for keys that a request
//! brings out of order. 16 bytes per entry, and 12 to 36 for its places.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Nearness to the head of entries that have no place in a request.
const NEAREST: u32 = u32::MAX;
/// Places that are kept beyond two for each entry.
const SLACK: usize = 64;

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    rank: u64,
    /// The larger, the nearer to the head.
    nearness: u32,
    is_there: bool,
    /// How often it is kept from going.
    keeps: u16,
    /// In use when a search came upon it: it has no place until it may go.
    is_passed: bool,
}

/// Where an entry stands, or stood: lower ones go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    rank: u64,
    nearness: u32,
    number: u32,
}

/// The order; see the module. Entries are numbers that their owner gives.
#[derive(Debug, Default)]
pub struct Ranked {
    entries: Vec<Entry>,
    /// Entries without a place in a request, whose ranks only grow.
    queue: VecDeque<(u64, u32)>,
    /// By rank of a request: nearness and number, the nearest to the head first.
    requests: BTreeMap<u64, Vec<(u32, u32)>>,
    /// What a search passed and is to be found again.
    aside: BTreeSet<Place>,
    /// Places in all of them.
    places: usize,
    length: usize,
    free: usize,
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

    fn entry_mut(&mut self, number: u32) -> Option<&mut Entry> {
        let entry = self.entries.get_mut(at(number))?;
        entry.is_there.then_some(entry)
    }

    /// Adds an entry: at a rank and a position in its request, or as the latest of all.
    pub fn insert(&mut self, number: u32, place: Option<(u64, u32)>, free: bool) {
        self.remove(number);
        if self.entries.len() <= at(number) {
            let length = at(number).saturating_add(1);
            self.entries.resize(length, Entry::default());
        }
        if let Some(entry) = self.entries.get_mut(at(number)) {
            (entry.is_there, entry.keeps) = (true, u16::from(!free));
            self.length += 1;
            self.free += usize::from(free);
        }
        match place {
            Some((rank, position)) => self.put(number, rank, NEAREST.saturating_sub(position)),
            None => self.put_last(number),
        }
    }

    /// Makes an entry the latest of all.
    fn put_last(&mut self, number: u32) {
        let rank = self.rank.saturating_add(1);
        let Some(entry) = self.entry_mut(number) else {
            return;
        };
        (entry.rank, entry.nearness, entry.is_passed) = (rank, NEAREST, false);
        self.rank = rank;
        self.queue.push_back((rank, number));
        self.count_place();
    }

    /// Gives an entry a place in a request.
    fn put(&mut self, number: u32, rank: u64, nearness: u32) {
        let Some(entry) = self.entry_mut(number) else {
            return;
        };
        (entry.rank, entry.nearness, entry.is_passed) = (rank, nearness, false);
        let own = self.requests.entry(rank).or_default();
        let new = (nearness, number);
        match own.last() {
            Some(last) if *last < new => {
                let place = own.partition_point(|other| *other > new);
                own.insert(place, new);
            }
            _ => own.push(new),
        }
        self.count_place();
    }

    fn count_place(&mut self) {
        self.places += 1;
        if self.places > 2 * self.length + SLACK {
            self.drop_old_places();
        }
    }

    fn drop_old_places(&mut self) {
        let entries = &self.entries;
        let stands = |place: Place| stands(entries, place);
        self.queue
            .retain(|(rank, number)| stands(place(*rank, (NEAREST, *number))));
        self.requests.retain(|rank, own| {
            own.retain(|one| stands(place(*rank, *one)));
            !own.is_empty()
        });
        self.aside.retain(|place| stands(*place));
        let of_requests: usize = self.requests.values().map(Vec::len).sum();
        self.places = self.queue.len() + of_requests + self.aside.len();
    }

    /// Gives an entry a rank and a position, unless it has a later one.
    pub fn raise(&mut self, number: u32, rank: u64, position: u32) {
        let nearness = NEAREST.saturating_sub(position);
        if let Some(entry) = self.entry_mut(number)
            && (entry.rank, entry.nearness) < (rank, nearness)
        {
            self.put(number, rank, nearness);
        }
    }

    /// Makes entries the latest ones, the first of them the very latest.
    pub fn renew(&mut self, head_first: &[u32]) {
        for number in head_first.iter().rev() {
            self.put_last(*number);
        }
    }

    /// Keeps an entry from going, until it is let go as often.
    pub fn keep(&mut self, number: u32) {
        if let Some(entry) = self.entry_mut(number) {
            entry.keeps = entry.keeps.saturating_add(1);
            let is_first = entry.keeps == 1;
            self.free -= usize::from(is_first);
        }
    }

    /// Lets an entry go that was kept.
    pub fn let_go(&mut self, number: u32) {
        let Some(entry) = self.entry_mut(number) else {
            return;
        };
        if entry.keeps != 1 {
            entry.keeps = entry.keeps.saturating_sub(1);
            return;
        }
        entry.keeps = 0;
        let back = core::mem::take(&mut entry.is_passed);
        let place = place(entry.rank, (entry.nearness, number));
        self.free += 1;
        if back {
            self.put_aside(place);
        }
    }

    fn put_aside(&mut self, place: Place) {
        self.places += usize::from(self.aside.insert(place));
    }

    /// Forgets an entry.
    pub fn remove(&mut self, number: u32) {
        if let Some(entry) = self.entry_mut(number) {
            let was_free = entry.keeps == 0;
            *entry = Entry::default();
            self.length -= 1;
            self.free -= usize::from(was_free);
        }
    }

    /// Takes the lowest place out, which may be one that is left behind.
    fn pop(&mut self) -> Option<Place> {
        let queue = self.queue.front();
        let queue = queue.map(|(rank, number)| place(*rank, (NEAREST, *number)));
        let request = self.requests.first_key_value();
        let request = request.and_then(|(rank, own)| own.last().map(|one| place(*rank, *one)));
        let aside = self.aside.first().copied();
        let lowest = [queue, request, aside].into_iter().flatten().min()?;
        if queue == Some(lowest) {
            self.queue.pop_front();
        } else if aside == Some(lowest) {
            self.aside.pop_first();
        } else if let Some(mut own) = self.requests.first_entry() {
            own.get_mut().pop();
            if own.get().is_empty() {
                own.remove();
            }
        }
        self.places -= 1;
        Some(lowest)
    }

    /// Takes out exactly `need` entries that may go and are not protected, coldest first; or none.
    pub fn evict(&mut self, need: usize, protected: impl Fn(u32) -> bool) -> Option<Vec<u32>> {
        if need > self.free {
            return None;
        }
        let (mut chosen, mut stay) = (Vec::with_capacity(need), Vec::new());
        while chosen.len() < need
            && let Some(place) = self.pop()
        {
            if !stands(&self.entries, place) {
                continue;
            }
            let Some(entry) = self.entry_mut(place.number) else {
                continue;
            };
            if entry.keeps > 0 {
                entry.is_passed = true;
            } else if protected(place.number) {
                stay.push(place);
            } else {
                // Not found again at another of its places.
                entry.is_there = false;
                chosen.push(place);
            }
        }
        for place in stay {
            self.put_aside(place);
        }
        if chosen.len() < need {
            for place in chosen {
                if let Some(entry) = self.entries.get_mut(at(place.number)) {
                    entry.is_there = true;
                }
                self.put_aside(place);
            }
            return None;
        }
        self.length -= need;
        self.free -= need;
        Some(chosen.into_iter().map(|place| place.number).collect())
    }
}

const fn place(rank: u64, (nearness, number): (u32, u32)) -> Place {
    Place {
        rank,
        nearness,
        number,
    }
}

/// Whether an entry stands at a place, and was not passed there.
fn stands(entries: &[Entry], place: Place) -> bool {
    entries.get(at(place.number)).is_some_and(|entry| {
        entry.is_there
            && !entry.is_passed
            && (entry.rank, entry.nearness) == (place.rank, place.nearness)
    })
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
        order.keep(3);
        assert_eq!(order.evict(2, |number| number == 2), Some(vec![1, 0]));
        order.let_go(3);
        order.raise(2, rank, 9);
        assert_eq!(order.evict(2, |_| false), Some(vec![3, 2]));
    }

    /// The same order as one sorted list of those that are there: rank, nearness, number, keeps.
    #[derive(Default)]
    struct Plain {
        entries: Vec<(u64, u32, u32, u16)>,
        rank: u64,
    }

    impl Plain {
        fn of(&mut self, number: u32) -> Option<&mut (u64, u32, u32, u16)> {
            self.entries.iter_mut().find(|entry| entry.2 == number)
        }

        fn insert(&mut self, number: u32, place: Option<(u64, u32)>, keeps: u16) {
            self.entries.retain(|entry| entry.2 != number);
            let (rank, position) = place.unwrap_or_else(|| {
                self.rank += 1;
                (self.rank, 0)
            });
            self.entries.push((rank, NEAREST - position, number, keeps));
        }

        fn renew(&mut self, head_first: &[u32]) {
            for number in head_first.iter().rev() {
                if let Some(entry) = self.of(*number).copied() {
                    self.insert(*number, None, entry.3);
                }
            }
        }

        fn raise(&mut self, number: u32, rank: u64, position: u32) {
            let later = (rank, NEAREST - position);
            if let Some(entry) = self.of(number)
                && (entry.0, entry.1) < later
            {
                (entry.0, entry.1) = later;
            }
        }

        fn evict(&mut self, need: usize, protected: impl Fn(u32) -> bool) -> Option<Vec<u32>> {
            self.entries.sort_unstable();
            let may_go = self.entries.iter().filter(|entry| entry.3 == 0);
            let chosen: Vec<u32> = may_go
                .map(|entry| entry.2)
                .filter(|number| !protected(*number))
                .take(need)
                .collect();
            if chosen.len() < need {
                return None;
            }
            self.entries.retain(|entry| !chosen.contains(&entry.2));
            Some(chosen)
        }
    }

    #[test]
    fn the_order_is_that_of_a_sorted_list_whatever_comes() {
        let (mut order, mut plain) = (Ranked::new(), Plain::default());
        let mut random = 1_u64;
        let mut draw = |below: u32| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            u32::try_from((random >> 33) % u64::from(below)).unwrap()
        };
        let mut ranks = vec![0];
        let mut evicted = 0;
        for step in 0..200_000 {
            let (number, position) = (draw(60), draw(12));
            let rank = ranks[usize::try_from(draw(u32::try_from(ranks.len()).unwrap())).unwrap()];
            match draw(16) {
                0 => {
                    plain.rank += 1;
                    assert_eq!(order.next_rank(), plain.rank);
                    ranks.push(plain.rank);
                    if ranks.len() > 6 {
                        ranks.remove(0);
                    }
                }
                1..=4 => {
                    let place = (draw(3) > 0).then_some((rank, position));
                    let keeps = u16::from(draw(2) == 0);
                    order.insert(number, place, keeps == 0);
                    plain.insert(number, place, keeps);
                }
                5..=6 => {
                    order.raise(number, rank, position);
                    plain.raise(number, rank, position);
                }
                7..=8 => {
                    let some: Vec<u32> = (0..draw(8)).map(|_| draw(60)).collect();
                    order.renew(&some);
                    plain.renew(&some);
                }
                9 => {
                    order.keep(number);
                    plain.of(number).into_iter().for_each(|entry| entry.3 += 1);
                }
                10..=12 => {
                    order.let_go(number);
                    let own = plain.of(number).into_iter();
                    own.for_each(|entry| entry.3 = entry.3.saturating_sub(1));
                }
                13 => {
                    order.remove(number);
                    plain.entries.retain(|entry| entry.2 != number);
                }
                _ => {
                    let (need, from) = (usize::try_from(draw(6)).unwrap(), draw(90));
                    let protected = |number: u32| (from..from + 10).contains(&number);
                    let victims = order.evict(need, protected);
                    assert_eq!(victims, plain.evict(need, protected), "step {step}");
                    evicted += victims.map_or(0, |victims| victims.len());
                }
            }
            assert!(order.places <= 2 * order.length + SLACK + 60);
        }
        assert!(evicted > 10_000);
    }
}
