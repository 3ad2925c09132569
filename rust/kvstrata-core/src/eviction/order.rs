//! Entries from the coldest to the warmest, in a log: the latest place of an entry counts.
//!
//! An access writes at the end and leaves the entry's earlier place behind, *stale*: there are no
//! neighbours to mend, and a walk over the cold end reads places that lie side by side. 8 bytes a
//! place. Stale places go when a walk meets them, and a few at a time when more than half of all
//! are stale: there are not many more than two places for each entry.
//!
//! Entries are asked for well before they are looked at, and whether a place is stale is told
//! without a jump: no walk waits for memory one by one.

use std::collections::VecDeque;

/// Places of a piece of the log.
const PIECE: usize = 256;
/// Pieces that are looked through when one is full, and too many places are stale.
const SWEPT_PIECES: usize = 4;
/// Stale places that are no reason to look.
const SLACK: usize = 4096;
/// Places that are looked through at a time.
const TOGETHER: usize = 32;
/// Entries that are asked for before the first of them is looked at.
const AHEAD: usize = 16;

/// A place in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Whose it is.
    pub(super) number: u32,
    /// Different for each place of the entry.
    pub(super) stamp: u32,
}

/// The entries that have places.
pub(super) trait Entries {
    /// Whether a place is the latest one of an entry.
    fn is_current(&self, place: Place) -> bool;

    /// Fetches an entry: it will be looked at soon.
    fn prefetch(&self, place: Place);
}

type Piece = Vec<Place>;

/// The log; see the module. What is stale only its owner knows.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// The coldest places, the coldest last; the last `fresh` of them are not stale.
    first: Piece,
    fresh: usize,
    /// What was looked through since all of it was last.
    swept: VecDeque<Piece>,
    rest: VecDeque<Piece>,
    /// The warmest places.
    last: Piece,
    places: usize,
    spare: Piece,
}

/// Drops the stale places of a piece from `from` on.
fn retain(piece: &mut Piece, from: usize, entries: &impl Entries) {
    let mut kept = from;
    for place in piece.iter().skip(from).take(AHEAD) {
        entries.prefetch(*place);
    }
    for at in from..piece.len() {
        if let Some(place) = piece.get(at + AHEAD) {
            entries.prefetch(*place);
        }
        if let Some(place) = piece.get(at).copied()
            && let Some(free) = piece.get_mut(kept)
        {
            *free = place;
            kept += usize::from(entries.is_current(place));
        }
    }
    piece.truncate(kept);
}

impl Order {
    /// Puts an entry at the warm end, as one of `length`.
    pub(super) fn push(&mut self, place: Place, length: usize, entries: &impl Entries) {
        self.places += 1;
        self.last.push(place);
        if self.last.len() >= PIECE {
            self.cut(length, entries);
        }
    }

    /// Begins a new piece.
    fn cut(&mut self, length: usize, entries: &impl Entries) {
        let mut next = core::mem::take(&mut self.spare);
        next.reserve_exact(PIECE);
        self.rest
            .push_back(core::mem::replace(&mut self.last, next));
        if self.places > 2 * length + SLACK {
            for _ in 0..SWEPT_PIECES {
                self.sweep(entries);
            }
        }
    }

    /// Takes the coldest entry out. Since the last one none was pushed, renewed or forgotten that
    /// is not the coldest itself; otherwise [`Order::look_again`] comes before.
    pub(super) fn pop(&mut self, entries: &impl Entries) -> Option<Place> {
        while self.fresh == 0 {
            if self.first.is_empty() && !self.refill() {
                return None;
            }
            let before = self.first.len();
            let from = before.saturating_sub(TOGETHER);
            retain(&mut self.first, from, entries);
            for place in self.first.iter().take(from).rev().take(TOGETHER) {
                entries.prefetch(*place);
            }
            self.places -= before - self.first.len();
            self.fresh = self.first.len() - from;
        }
        self.fresh -= 1;
        self.places -= 1;
        self.first.pop()
    }

    /// Entries were accessed or forgotten: what was not stale may be now.
    pub(super) const fn look_again(&mut self) {
        self.fresh = 0;
    }

    /// Puts an entry back that was taken out: it is the coldest again.
    pub(super) fn put_back(&mut self, place: Place) {
        self.places += 1;
        self.first.push(place);
        self.fresh += 1;
    }

    /// Makes the next piece the first; false if there is none.
    fn refill(&mut self) -> bool {
        let next = self.swept.pop_front().or_else(|| self.rest.pop_front());
        let next = next.unwrap_or_else(|| core::mem::take(&mut self.last));
        self.spare = core::mem::replace(&mut self.first, next);
        self.first.reverse();
        !self.first.is_empty()
    }

    /// Drops the stale places of one piece.
    fn sweep(&mut self, entries: &impl Entries) {
        if self.rest.is_empty() {
            core::mem::swap(&mut self.swept, &mut self.rest);
        }
        let Some(mut piece) = self.rest.pop_front() else {
            return;
        };
        let before = piece.len();
        retain(&mut piece, 0, entries);
        self.places -= before - piece.len();
        match self.swept.back_mut() {
            Some(back) if back.len() + piece.len() <= PIECE => back.append(&mut piece),
            // A piece of nothing would be taken for the end.
            _ if piece.is_empty() => {}
            _ => self.swept.push_back(piece),
        }
    }

    /// Bytes of memory held.
    pub(super) fn memory_bytes(&self) -> usize {
        let pieces = self.swept.iter().chain(&self.rest);
        let pieces = pieces.chain([&self.first, &self.last, &self.spare]);
        let bytes = |piece: &Piece| piece.capacity() * size_of::<Place>() + size_of::<Piece>();
        pieces.map(bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The stamp of each entry's latest place.
    #[derive(Debug)]
    struct Latest(Vec<u32>);

    impl Entries for Latest {
        fn is_current(&self, place: Place) -> bool {
            let at = usize::try_from(place.number).unwrap();
            self.0[at] == place.stamp
        }

        fn prefetch(&self, _place: Place) {}
    }

    /// An order beside a plain list of the same entries.
    struct Checked {
        order: Order,
        latest: Latest,
        plain: Vec<u32>,
        stamp: u32,
    }

    impl Checked {
        fn access(&mut self, number: u32) {
            self.stamp += 1;
            self.latest.0[usize::try_from(number).unwrap()] = self.stamp;
            self.plain.retain(|other| *other != number);
            self.plain.push(number);
            let stamp = self.stamp;
            self.order
                .push(Place { number, stamp }, self.plain.len(), &self.latest);
        }

        /// Takes out so many, and puts all back but the first `gone`.
        fn walk(&mut self, count: usize, gone: usize) {
            self.order.look_again();
            let places: Vec<Place> = (0..count)
                .map_while(|_| self.order.pop(&self.latest))
                .collect();
            let found: Vec<u32> = places.iter().map(|place| place.number).collect();
            let expected: Vec<u32> = self.plain.iter().take(count).copied().collect();
            assert_eq!(found, expected);
            let gone = gone.min(found.len());
            for place in places.iter().skip(gone).rev() {
                self.order.put_back(*place);
            }
            for place in places.iter().take(gone) {
                self.latest.0[usize::try_from(place.number).unwrap()] = 0;
            }
            self.plain.drain(..gone);
        }
    }

    fn empty(all: u32) -> Checked {
        Checked {
            order: Order::default(),
            latest: Latest(vec![0; usize::try_from(all).unwrap()]),
            plain: Vec::new(),
            stamp: 0,
        }
    }

    #[test]
    fn a_piece_of_stale_places_does_not_hide_what_is_behind_it() {
        let mut checked = empty(100);
        (0..100).for_each(|number| checked.access(number));
        for round in 0..20_000 {
            // The cold ones are put back before all pieces.
            checked.walk(50, 0);
            checked.access(90 + round % 10);
        }
        checked.walk(100, 0);
    }

    #[test]
    fn entries_come_in_the_order_of_their_last_access_however_many_places_are_stale() {
        let all = 2000_u32;
        let mut checked = empty(all);
        let mut random = 1_u64;
        let mut draw = |below: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            u32::try_from((random >> 33) % below).unwrap()
        };
        for step in 0..200_000 {
            // Few entries are accessed often, so that places become stale.
            let among = if draw(4) == 0 { u64::from(all) } else { 20 };
            checked.access(draw(among));
            if step % 64 == 0 {
                let count = usize::try_from(draw(40)).unwrap();
                checked.walk(count, count / 3);
            }
            if step % 60_000 == 59_999 {
                checked.walk(5000, usize::try_from(draw(1000)).unwrap());
            }
        }
        let places = checked.plain.len() * 3 + 2 * SLACK;
        assert!(checked.order.memory_bytes() < places * 16, "few are stale");
    }
}
