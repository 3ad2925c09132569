//! Numbers by tag: a hash table whose operations each wait for memory once as a rule.
//!
//! A number is in the bucket of its tag, or in one of those behind it where that is full; a bucket
//! is one line of the processor's caches and counts what had no room in it. Nothing is left behind
//! by what is taken out.
//!
//! Growing is spread over the insertions that follow: no operation takes a time that grows with what
//! is there. The buckets are moved in their order, the last one first, from the end of one table to
//! the end of another: at no time there is much more than one of them.
//!
//! The owner keeps the tags: it is asked whether a number is the one in question.

use super::request::Tag;
use crate::sys::bytes;
use crate::sys::pages;
use crate::sys::prefetch::prefetch;

/// Numbers of a bucket.
const SLOTS: usize = 12;
/// Numbers of a bucket on average at which the table grows: few buckets are full then.
const USED_SLOTS: usize = 7;
/// The part by which it grows.
const GROWTH: usize = 12;
/// Buckets that are moved at each insertion until all are.
const MOVED_TOGETHER: usize = 4;
/// Buckets behind the last home that have room, as a part of all: nothing but what had no room
/// before is there.
const SPARE_SHARE: usize = 64;
const SPARE_MIN: usize = 8;
/// Buckets of a large page.
const PAGE_BUCKETS: usize = 1 << 15;

/// What had no room in a bucket is counted above its prints.
const MISSED: u128 = 1 << (8 * SLOTS);

/// 12 slots.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Bucket {
    /// A byte for each slot, 0 where it is free; above them, how many numbers had no room here.
    prints: u128,
    numbers: [u32; SLOTS],
}

const _: () = assert!(size_of::<Bucket>() == 64);

/// Slots of a bucket, a bit each.
struct Matches(u32);

impl Iterator for Matches {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let bit = self.0.trailing_zeros();
        self.0 &= self.0.wrapping_sub(1);
        (bit < u32::BITS).then(|| usize::try_from(bit).unwrap_or(SLOTS))
    }
}

impl Bucket {
    /// The slots with a print.
    fn matches(&self, print: u8) -> Matches {
        Matches(bytes::equal(self.prints, print) & ((1 << SLOTS) - 1))
    }

    const fn has_missed(&self) -> bool {
        self.prints >= MISSED
    }

    fn put(&mut self, print: u8, number: u32) -> bool {
        let Some(slot) = self.matches(0).next() else {
            self.prints = self.prints.saturating_add(MISSED);
            return false;
        };
        self.prints |= u128::from(print) << (8 * slot);
        if let Some(place) = self.numbers.get_mut(slot) {
            *place = number;
        }
        true
    }

    fn clear(&mut self, slot: usize) {
        self.prints &= !(0xff << (8 * slot));
    }
}

/// Spreads tags that are like each other.
const fn mixed(tag: Tag) -> u64 {
    tag.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Never 0, and of other bits than those that choose the bucket.
fn print_of(tag: Tag) -> u8 {
    u8::try_from(mixed(tag) >> 24 & 0xff).unwrap_or(1).max(1)
}

/// Buckets in the order of what their tags are mixed to, or in the opposite one.
#[derive(Debug, Default)]
struct Buckets {
    /// As far as anything was put there.
    all: Vec<Bucket>,
    /// Buckets in which tags are at home.
    homes: usize,
    /// What turns the order round, or 0.
    turned: u64,
}

impl Buckets {
    /// Empty ones.
    fn new(homes: usize, turned: u64) -> Self {
        let spare = homes / SPARE_SHARE + SPARE_MIN;
        Self {
            all: pages::with_capacity(homes + spare),
            homes,
            turned,
        }
    }

    const fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    fn home(&self, tag: Tag) -> usize {
        #[expect(
            clippy::as_conversions,
            reason = "widened, and below the number of buckets"
        )]
        let home = ((((mixed(tag) ^ self.turned) >> 32) * self.homes as u64) >> 32) as usize;
        home
    }

    /// Whether the home of a tag is there.
    fn has_home(&self, tag: Tag) -> bool {
        !self.is_empty() && self.home(tag) < self.all.len()
    }

    /// The numbers of the buckets in which a tag can be.
    fn path(&self, tag: Tag) -> core::ops::Range<usize> {
        self.home(tag)..self.all.len()
    }

    fn find(&self, tag: Tag, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let print = print_of(tag);
        for at in self.path(tag) {
            let bucket = self.all.get(at)?;
            for slot in bucket.matches(print) {
                let number = bucket.numbers.get(slot).copied();
                if number.is_some_and(&is_it) {
                    return number;
                }
            }
            if !bucket.has_missed() {
                return None;
            }
        }
        None
    }

    fn put(&mut self, tag: Tag, number: u32) {
        for at in self.home(tag).. {
            if self.all.len() <= at {
                self.all.resize(at + 1, Bucket::default());
            }
            let bucket = self.all.get_mut(at);
            if bucket.is_none_or(|bucket| bucket.put(print_of(tag), number)) {
                return;
            }
        }
    }

    fn remove(&mut self, tag: Tag, number: u32) -> bool {
        let print = print_of(tag);
        let found = self.path(tag).find_map(|at| {
            let bucket = self.all.get(at)?;
            let is_it = |slot: &usize| bucket.numbers.get(*slot) == Some(&number);
            match bucket.matches(print).find(is_it) {
                Some(slot) => Some(Some((at, slot))),
                None if bucket.has_missed() => None,
                None => Some(None),
            }
        });
        let Some((found, slot)) = found.flatten() else {
            return false;
        };
        for at in self.path(tag) {
            let Some(bucket) = self.all.get_mut(at) else {
                break;
            };
            if at == found {
                bucket.clear(slot);
                break;
            }
            bucket.prints -= MISSED;
        }
        true
    }
}

/// The table; see the module.
#[derive(Debug, Default)]
pub(super) struct ByTag {
    buckets: Buckets,
    /// The table before it grew, as far as it was not moved yet.
    before: Buckets,
    length: usize,
}

impl ByTag {
    /// Number of numbers.
    pub(super) const fn len(&self) -> usize {
        self.length
    }

    /// Where a tag is, but for what had no room where it should be.
    fn place_of(&self, tag: Tag) -> &Buckets {
        if self.before.has_home(tag) {
            &self.before
        } else {
            &self.buckets
        }
    }

    /// The number of a tag.
    pub(super) fn find(&self, tag: Tag, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        if self.before.has_home(tag) {
            let found = self.before.find(tag, &is_it);
            if found.is_some() {
                return found;
            }
        }
        self.buckets.find(tag, is_it)
    }

    /// Whether a tag has no number, where its place alone tells.
    #[inline]
    pub(super) fn is_new(&self, tag: Tag) -> bool {
        let bucket = self.buckets.all.get(self.buckets.home(tag));
        let is_new = bucket.is_none_or(|bucket| {
            !bucket.has_missed() && bucket.matches(print_of(tag)).next().is_none()
        });
        is_new && self.before.is_empty()
    }

    /// Adds a number, whose tag has none. `ask` is called with numbers whose tags are asked for by a
    /// later call.
    pub(super) fn insert(
        &mut self,
        tag: Tag,
        number: u32,
        tag_of: impl Fn(u32) -> Tag,
        ask: impl Fn(u32),
    ) {
        if !self.before.is_empty() {
            for _ in 0..MOVED_TOGETHER {
                self.move_on(&tag_of);
            }
            let next = self.before.all.iter().rev().take(MOVED_TOGETHER);
            next.flat_map(|next| next.numbers).for_each(ask);
        } else if self.length >= self.buckets.homes * USED_SLOTS {
            let before = self.buckets.homes;
            let next = Buckets::new(before + before / GROWTH + 1, !self.buckets.turned);
            self.before = core::mem::replace(&mut self.buckets, next);
        }
        self.length += 1;
        if self.before.has_home(tag) {
            self.before.put(tag, number);
        } else {
            self.buckets.put(tag, number);
        }
    }

    /// Moves the numbers of the last bucket. What it counts is no loss: what had no room in it was
    /// behind it, and so was moved before.
    fn move_on(&mut self, tag_of: impl Fn(u32) -> Tag) {
        let Some(bucket) = self.before.all.pop() else {
            return;
        };
        let mut used = [true; SLOTS];
        for slot in bucket.matches(0) {
            used.get_mut(slot)
                .into_iter()
                .for_each(|used| *used = false);
        }
        for (number, _) in bucket
            .numbers
            .into_iter()
            .zip(used)
            .filter(|(_, used)| *used)
        {
            self.buckets.put(tag_of(number), number);
        }
        if self.before.is_empty() {
            self.before = Buckets::default();
        } else if self.before.all.len().is_multiple_of(PAGE_BUCKETS) {
            pages::give_back(&mut self.before.all);
        }
    }

    /// Takes a number out; false if it is not there.
    pub(super) fn remove(&mut self, tag: Tag, number: u32) -> bool {
        let found = self.before.remove(tag, number) || self.buckets.remove(tag, number);
        self.length -= usize::from(found);
        found
    }

    /// Fetches the place of a tag: it will be looked for soon.
    pub(super) fn prefetch(&self, tag: Tag) {
        let place = self.place_of(tag);
        prefetch(place.all.get(place.home(tag)));
    }

    /// The number that a tag has, as far as its place alone tells: another one in some hundreds. Where
    /// that is not the whole of its place, the rest is fetched.
    pub(super) fn guess(&self, tag: Tag) -> Option<u32> {
        let place = self.place_of(tag);
        let home = place.home(tag);
        let bucket = place.all.get(home)?;
        let Some(slot) = bucket.matches(print_of(tag)).next() else {
            if bucket.has_missed() {
                prefetch(place.all.get(home + 1));
            }
            return None;
        };
        bucket.numbers.get(slot).copied()
    }

    /// Bytes of memory held, without what was never used and what was given back.
    pub(super) const fn memory_bytes(&self) -> usize {
        (self.buckets.all.len() + self.before.all.len()) * size_of::<Bucket>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tags that all begin in a few buckets, or are spread.
    fn tag(number: u32, spread: bool) -> Tag {
        let mixed = u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Tag(if spread {
            mixed ^ (mixed >> 29)
        } else {
            (mixed << 32) | u64::from(number % 3)
        })
    }

    #[test]
    fn what_was_put_in_is_found_until_it_is_taken_out() {
        for (count, spread) in [(20_000, true), (300, false)] {
            let mut numbers = ByTag::default();
            let of = |number| tag(number, spread);
            for number in 0..count {
                numbers.insert(of(number), number, of, |_| {});
                let half = number / 2;
                assert_eq!(
                    numbers.find(of(half), |found| of(found) == of(half)),
                    Some(half)
                );
            }
            for number in (0..count).filter(|number| number % 3 == 0) {
                assert!(numbers.remove(of(number), number));
                assert!(!numbers.remove(of(number), number));
            }
            for number in 0..count + 50 {
                let there = number % 3 != 0 && number < count;
                let found = numbers.find(of(number), |found| of(found) == of(number));
                assert_eq!(found, there.then_some(number), "{number}");
            }
            for number in (0..count).filter(|number| number % 3 == 0) {
                numbers.insert(of(number), number, of, |_| {});
            }
            let all = (0..count).all(|n| numbers.find(of(n), |found| found == n) == Some(n));
            assert!(all && numbers.len() == usize::try_from(count).unwrap());
        }
    }

    #[test]
    fn a_table_that_numbers_come_and_go_in_grows_no_more() {
        let mut numbers = ByTag::default();
        let of = |number| tag(number, true);
        (0..1000).for_each(|number| numbers.insert(of(number), number, of, |_| {}));
        let before = numbers.memory_bytes();
        for number in 1000..100_000 {
            assert!(numbers.remove(of(number - 1000), number - 1000));
            numbers.insert(of(number), number, of, |_| {});
        }
        assert!(numbers.memory_bytes() <= 2 * before);
    }

    #[test]
    fn a_table_that_grows_holds_little_more_than_what_is_in_it() {
        let mut numbers = ByTag::default();
        let of = |number| tag(number, true);
        for number in 0..500_000 {
            numbers.insert(of(number), number, of, |_| {});
            let most = numbers.len() * 10 + 20 * size_of::<Bucket>();
            assert!(numbers.memory_bytes() <= most, "{number}");
        }
    }

    #[test]
    fn nothing_is_found_in_an_empty_table() {
        let mut numbers = ByTag::default();
        assert_eq!(numbers.find(Tag(7), |_| true), None);
        assert!(!numbers.remove(Tag(7), 1));
    }
}
