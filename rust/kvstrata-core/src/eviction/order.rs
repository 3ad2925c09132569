//! Entries from the coldest to the warmest, in chunks that are tied to each other.
//!
//! An entry knows its place, a slot of a chunk. Leaving it empties the slot and moves nothing else,
//! so an entry costs no look at those beside it, as the neighbours in a list would; the numbers of
//! entries that come after each other lie side by side, so a walk over the cold end asks for them
//! well before it looks at them. An entry can be put next to any other: the colder ones of a full
//! chunk go to one of their own then. Chunks without entries are given back, and when more than half
//! of all slots are empty, a pair of neighbours becomes one at a time.

use crate::chunked::Chunked;
use crate::sys::prefetch::prefetch;

/// No chunk, no entry, no place.
const NONE: u32 = u32::MAX;
/// Entries of a chunk: it is two lines of the processor's caches.
const SLOTS: u32 = 28;
/// Bits of a place that are its slot's.
const SLOT_BITS: u32 = 5;
/// Chunks that are in one piece of memory, as a power of two.
const CHUNK_BITS: u32 = 16;
/// Chunks that are no reason to look for empty slots.
const SPARE_CHUNKS: usize = 8;
const _: () = assert!(SLOTS < 1 << SLOT_BITS && size_of::<Chunk>() == 128);

/// Where an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(u32);

impl Place {
    /// That of an entry in no order.
    pub(super) const NOWHERE: Self = Self(NONE);

    const fn new(chunk: u32, slot: u32) -> Self {
        Self(chunk << SLOT_BITS | slot)
    }

    /// As a number, for who keeps it among others.
    pub(super) const fn number(self) -> u32 {
        self.0
    }

    /// The place of such a number.
    pub(super) const fn of(number: u32) -> Self {
        Self(number)
    }

    const fn chunk(self) -> u32 {
        self.0 >> SLOT_BITS
    }

    const fn slot(self) -> u32 {
        self.0 & ((1 << SLOT_BITS) - 1)
    }
}

/// Who keeps the place of each entry.
pub(super) trait Entries {
    /// An entry has another place now.
    fn moved(&mut self, number: u32, place: Place);
}

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Chunk {
    /// Numbers of entries, coldest first; `NONE` where a slot is empty.
    numbers: [u32; at(SLOTS)],
    colder: u32,
    warmer: u32,
    /// Slots that are not empty.
    used: u32,
}

const EMPTY: Chunk = Chunk {
    numbers: [NONE; at(SLOTS)],
    colder: NONE,
    warmer: NONE,
    used: 0,
};

#[expect(clippy::as_conversions, reason = "small; From is not const")]
const fn at(slot: u32) -> usize {
    slot as usize
}

impl Chunk {
    fn get(&self, slot: u32) -> u32 {
        self.numbers.get(at(slot)).copied().unwrap_or(NONE)
    }

    fn set(&mut self, slot: u32, number: u32) {
        if let Some(place) = self.numbers.get_mut(at(slot)) {
            *place = number;
        }
    }
}

/// One order, in [`Chunks`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    coldest: u32,
    warmest: u32,
    /// Slots of the warmest chunk that were filled.
    filled: u32,
    length: usize,
    chunks: usize,
    /// Where a walk is: this chunk is not given back.
    walked: u32,
    /// The chunk that may become one with its warmer neighbour next.
    tidied: u32,
}

impl Default for Order {
    fn default() -> Self {
        Self {
            coldest: NONE,
            warmest: NONE,
            filled: SLOTS,
            length: 0,
            chunks: 0,
            walked: NONE,
            tidied: NONE,
        }
    }
}

impl Order {
    /// Number of entries.
    pub(super) const fn len(&self) -> usize {
        self.length
    }
}

/// A walk over an order, from the cold end on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Walk {
    chunk: u32,
    slot: u32,
}

impl Walk {
    /// One that has not come upon anything.
    pub(super) const fn new() -> Self {
        Self {
            chunk: NONE,
            slot: 0,
        }
    }
}

/// The chunks of some orders; see the module.
#[derive(Debug, Default)]
pub(super) struct Chunks {
    all: Chunked<Chunk, CHUNK_BITS>,
    free: Vec<u32>,
}

impl Chunks {
    /// Fetches a place that will be left soon.
    pub(super) fn prefetch(&self, place: Place) {
        if let Some(chunk) = self.all.get(place.chunk()) {
            prefetch(chunk.numbers.get(at(place.slot())));
            prefetch(Some(&chunk.used));
        }
    }

    /// Puts an entry at the warm end; returns its place.
    pub(super) fn push_warmest(&mut self, order: &mut Order, number: u32) -> Place {
        if order.filled >= SLOTS {
            let before = order.warmest;
            let added = self.add(order, before, NONE);
            order.warmest = added;
            order.filled = 0;
            self.give_back_empty(order, before);
        }
        let (chunk, slot) = (order.warmest, order.filled);
        order.filled += 1;
        self.fill(order, chunk, slot, number)
    }

    /// Puts an entry just colder than another one of the same order; returns its place. No walk is
    /// under way.
    pub(super) fn insert_colder_than(
        &mut self,
        order: &mut Order,
        warmer: Place,
        number: u32,
        entries: &mut impl Entries,
    ) -> Place {
        let (chunk, slot) = (warmer.chunk(), warmer.slot());
        let Some(own) = self.all.get(chunk).copied() else {
            return self.push_warmest(order, number);
        };
        if slot > 0 {
            if own.get(slot - 1) != NONE {
                self.split(order, chunk, slot, entries);
            }
            return self.fill(order, chunk, slot - 1, number);
        }
        let last = SLOTS - 1;
        let before = self.all.get(own.colder);
        let has_room = before.is_some_and(|before| before.get(last) == NONE);
        let before = if has_room {
            own.colder
        } else {
            self.add(order, own.colder, chunk)
        };
        self.fill(order, before, last, number)
    }

    /// Puts an entry in the place of another one.
    pub(super) fn replace(&mut self, place: Place, number: u32) {
        if let Some(chunk) = self.all.get_mut(place.chunk()) {
            chunk.set(place.slot(), number);
        }
    }

    /// Takes the entry at a place out.
    pub(super) fn remove(&mut self, order: &mut Order, place: Place) {
        let number = place.chunk();
        let Some(chunk) = self.all.get_mut(number) else {
            return;
        };
        chunk.set(place.slot(), NONE);
        chunk.used = chunk.used.saturating_sub(1);
        order.length = order.length.saturating_sub(1);
        if chunk.used == 0 {
            self.give_back_empty(order, number);
        }
    }

    /// Looks for empty slots if there are too many, which takes constant time. No walk is under way.
    pub(super) fn tidy(&mut self, order: &mut Order, entries: &mut impl Entries) {
        let spare = order.chunks.saturating_sub(SPARE_CHUNKS);
        if spare * at(SLOTS) > 2 * order.length {
            self.merge_next(order, entries);
        }
    }

    /// The next entry that a walk comes upon; `ask` is called with entries that come later. What it has come upon may be taken out; what is pushed
    /// meanwhile is come upon in the end. [`Chunks::end`] follows, before anything else.
    pub(super) fn next(
        &mut self,
        order: &mut Order,
        walk: &mut Walk,
        ask: &impl Fn(u32),
    ) -> Option<u32> {
        if walk.chunk == NONE {
            self.look_ahead(order.coldest, ask);
            self.enter(order, walk, order.coldest, ask);
        }
        loop {
            let chunk = self.all.get(walk.chunk)?;
            let is_warmest = walk.chunk == order.warmest;
            let end = if is_warmest { order.filled } else { SLOTS };
            while walk.slot < end {
                let number = chunk.get(walk.slot);
                walk.slot += 1;
                if number != NONE {
                    return Some(number);
                }
            }
            if is_warmest {
                return None;
            }
            let next = chunk.warmer;
            self.enter(order, walk, next, ask);
        }
    }

    /// Ends all walks over an order.
    pub(super) fn end(&mut self, order: &mut Order) {
        let walked = core::mem::replace(&mut order.walked, NONE);
        self.give_back_empty(order, walked);
    }

    /// Bytes of memory held.
    pub(super) fn memory_bytes(&self) -> usize {
        self.all.memory_bytes() + self.free.capacity() * size_of::<u32>()
    }

    /// Comes to a chunk, and asks for the entries of the next one and for the chunk after that.
    fn enter(&mut self, order: &mut Order, walk: &mut Walk, chunk: u32, ask: &impl Fn(u32)) {
        let before = core::mem::replace(walk, Walk { chunk, slot: 0 }).chunk;
        order.walked = chunk;
        self.give_back_empty(order, before);
        let next = self.all.get(chunk).map_or(NONE, |chunk| chunk.warmer);
        self.look_ahead(next, ask);
        let then = self.all.get(next).map_or(NONE, |chunk| chunk.warmer);
        if let Some(chunk) = self.all.get(then) {
            prefetch(chunk.numbers.first());
            prefetch(Some(&chunk.used));
        }
    }

    /// Asks for the entries of a chunk.
    fn look_ahead(&self, chunk: u32, ask: &impl Fn(u32)) {
        if let Some(chunk) = self.all.get(chunk) {
            for number in chunk.numbers.into_iter().filter(|number| *number != NONE) {
                ask(number);
            }
        }
    }

    fn fill(&mut self, order: &mut Order, chunk: u32, slot: u32, number: u32) -> Place {
        if let Some(own) = self.all.get_mut(chunk) {
            own.set(slot, number);
            own.used += 1;
        }
        order.length += 1;
        Place::new(chunk, slot)
    }

    /// Makes a chunk between two others.
    fn add(&mut self, order: &mut Order, colder: u32, warmer: u32) -> u32 {
        let chunk = Chunk {
            colder,
            warmer,
            ..EMPTY
        };
        let number = if let Some(number) = self.free.pop() {
            if let Some(place) = self.all.get_mut(number) {
                *place = chunk;
            }
            number
        } else {
            let number = u32::try_from(self.all.len()).unwrap_or(NONE);
            self.all.push(chunk);
            number
        };
        order.chunks += 1;
        self.tie(order, colder, number);
        self.tie(order, number, warmer);
        number
    }

    /// Makes two chunks neighbours, or one of them an end.
    fn tie(&mut self, order: &mut Order, colder: u32, warmer: u32) {
        match self.all.get_mut(colder) {
            Some(chunk) => chunk.warmer = warmer,
            None => order.coldest = warmer,
        }
        match self.all.get_mut(warmer) {
            Some(chunk) => chunk.colder = colder,
            None => order.warmest = colder,
        }
    }

    /// Gives a chunk back that has no entries, unless it is in use.
    fn give_back_empty(&mut self, order: &mut Order, number: u32) {
        let Some(chunk) = self.all.get(number).copied() else {
            return;
        };
        if chunk.used > 0 || number == order.warmest || number == order.walked {
            return;
        }
        if order.tidied == number {
            order.tidied = chunk.warmer;
        }
        order.chunks -= 1;
        self.tie(order, chunk.colder, chunk.warmer);
        self.free.push(number);
    }

    /// Moves the entries of a chunk before a slot to a chunk of their own.
    fn split(&mut self, order: &mut Order, chunk: u32, end: u32, entries: &mut impl Entries) {
        let Some(own) = self.all.get(chunk).copied() else {
            return;
        };
        let added = self.add(order, own.colder, chunk);
        let mut moved = 0;
        for slot in 0..end {
            let number = own.get(slot);
            if number != NONE {
                entries.moved(number, Place::new(added, slot));
                moved += 1;
            }
        }
        if let Some(added) = self.all.get_mut(added) {
            for slot in 0..end {
                added.set(slot, own.get(slot));
            }
            added.used = moved;
        }
        if let Some(own) = self.all.get_mut(chunk) {
            for slot in 0..end {
                own.set(slot, NONE);
            }
            own.used -= moved;
        }
    }

    /// Makes a chunk and its warmer neighbour one, if their entries fit in one.
    fn merge_next(&mut self, order: &mut Order, entries: &mut impl Entries) {
        if order.tidied == NONE {
            order.tidied = order.coldest;
        }
        let number = order.tidied;
        let Some(mut chunk) = self.all.get(number).copied() else {
            return;
        };
        let Some(next) = self.all.get(chunk.warmer).copied() else {
            order.tidied = NONE;
            return;
        };
        if chunk.warmer == order.warmest || chunk.used + next.used > SLOTS {
            order.tidied = chunk.warmer;
            return;
        }
        let both = chunk.numbers.into_iter().chain(next.numbers);
        chunk.numbers = EMPTY.numbers;
        for (slot, entry) in (0..).zip(both.filter(|number| *number != NONE)) {
            chunk.set(slot, entry);
            entries.moved(entry, Place::new(number, slot));
        }
        chunk.used += next.used;
        let emptied = chunk.warmer;
        if let Some(place) = self.all.get_mut(number) {
            *place = chunk;
        }
        if let Some(next) = self.all.get_mut(emptied) {
            next.used = 0;
        }
        self.give_back_empty(order, emptied);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The place of each entry.
    #[derive(Debug)]
    struct Places(Vec<Place>);

    impl Entries for Places {
        fn moved(&mut self, number: u32, place: Place) {
            self.0[at(number)] = place;
        }
    }

    /// An order beside a plain list of the same entries.
    struct Checked {
        chunks: Chunks,
        order: Order,
        places: Places,
        plain: Vec<u32>,
    }

    impl Checked {
        fn new(all: u32) -> Self {
            Self {
                chunks: Chunks::default(),
                order: Order::default(),
                places: Places(vec![Place::NOWHERE; at(all)]),
                plain: Vec::new(),
            }
        }

        fn take(&mut self, number: u32) -> bool {
            let before = self.plain.len();
            self.plain.retain(|other| *other != number);
            let was_there = self.plain.len() < before;
            if was_there {
                self.chunks
                    .remove(&mut self.order, self.places.0[at(number)]);
            }
            was_there
        }

        fn access(&mut self, number: u32) {
            self.take(number);
            self.plain.push(number);
            self.places.0[at(number)] = self.chunks.push_warmest(&mut self.order, number);
            self.chunks.tidy(&mut self.order, &mut self.places);
        }

        fn put_behind(&mut self, number: u32, warmer: u32) {
            self.take(number);
            let Some(before) = self.plain.iter().position(|other| *other == warmer) else {
                return self.access(number);
            };
            self.plain.insert(before, number);
            self.places.0[at(number)] = self.chunks.insert_colder_than(
                &mut self.order,
                self.places.0[at(warmer)],
                number,
                &mut self.places,
            );
            self.chunks.tidy(&mut self.order, &mut self.places);
        }

        /// Walks over so many, of which `goes` says which go and which are made the warmest.
        fn walk(&mut self, count: usize, mut goes: impl FnMut(u32) -> (bool, bool)) {
            let mut walk = Walk::new();
            let expected = self.plain.clone();
            let mut expected = expected.iter();
            let mut renewed = Vec::new();
            for _ in 0..count {
                let found = self.chunks.next(&mut self.order, &mut walk, &|_| {});
                let next = expected.next().copied().or_else(|| {
                    let first = !renewed.is_empty();
                    first.then(|| renewed.remove(0))
                });
                assert_eq!(found, next);
                let Some(number) = found else { break };
                let (goes, is_renewed) = goes(number);
                if goes || is_renewed {
                    self.take(number);
                }
                if is_renewed && !goes {
                    self.plain.push(number);
                    renewed.push(number);
                    self.places.0[at(number)] = self.chunks.push_warmest(&mut self.order, number);
                }
            }
            self.chunks.end(&mut self.order);
            assert_eq!(self.order.len(), self.plain.len());
        }
    }

    /// Draws numbers below a bound.
    fn draws() -> impl FnMut(u32) -> u32 {
        let mut random = 1_u64;
        move |below| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            u32::try_from((random >> 33) % u64::from(below)).unwrap()
        }
    }

    #[test]
    fn entries_come_in_their_order_whatever_was_put_between_them_and_taken_out() {
        let all = 2000;
        let mut checked = Checked::new(all);
        let mut draw = draws();
        for step in 0..60_000 {
            let among = if draw(4) == 0 { all } else { 40 };
            let number = draw(among);
            match draw(8) {
                0..=2 => checked.access(number),
                // Some in a row behind one, as a request stores them.
                3 => {
                    let warmer = draw(all);
                    let mut behind = warmer;
                    for more in 0..draw(60) {
                        let number = (warmer + 1 + more) % all;
                        checked.put_behind(number, behind);
                        behind = number;
                    }
                }
                4..=5 => checked.put_behind(number, draw(all)),
                _ => {
                    checked.take(number);
                }
            }
            if step % 64 == 0 {
                let (count, kept, renewed) = (draw(90), draw(5) + 1, draw(5) + 1);
                checked.walk(at(count), |number| {
                    (number % kept != 0, number % renewed == 0)
                });
            }
            if step % 5_000 == 0 {
                checked.walk(at(2 * all), |number| (number % 7 == 0, false));
            }
        }
    }

    #[test]
    fn few_slots_are_empty_however_many_entries_leave() {
        let all = 60_000;
        let mut checked = Checked::new(all);
        (0..all).for_each(|number| {
            checked.places.0[at(number)] = checked.chunks.push_warmest(&mut checked.order, number);
        });
        // One of each chunk stays.
        let stay = |number: &u32| number % SLOTS == 5;
        for number in (0..all).filter(|number| !stay(number)) {
            let place = checked.places.0[at(number)];
            checked.chunks.remove(&mut checked.order, place);
        }
        checked.plain = (0..all).filter(stay).collect();
        for round in 0..4 {
            for number in (0..all)
                .filter(stay)
                .filter(|number| number % 3 == round % 3)
            {
                let place = checked.places.0[at(number)];
                checked.chunks.remove(&mut checked.order, place);
                let place = checked.chunks.push_warmest(&mut checked.order, number);
                checked.places.0[at(number)] = place;
                checked.chunks.tidy(&mut checked.order, &mut checked.places);
                checked.chunks.tidy(&mut checked.order, &mut checked.places);
            }
        }
        let slots = checked.order.chunks * at(SLOTS);
        assert!(slots <= 2 * checked.order.len() + (SPARE_CHUNKS + 1) * at(SLOTS));
    }

    #[test]
    fn an_empty_order_has_nothing_to_come_upon() {
        let mut checked = Checked::new(1);
        checked.walk(3, |_| (false, false));
        checked.access(0);
        checked.take(0);
        checked.walk(3, |_| (false, false));
        checked.access(0);
        checked.walk(3, |_| (true, false));
    }
}
