//! Keys that were evicted lately, by fingerprint.
//!
//! A key is in one bucket, which is one line of the processor's caches: every operation waits for
//! memory once at most, and operations on other keys need not wait for it. The latest key of a bucket
//! stands first, and pushes the earliest one out. What is too long ago is not taken out. Two keys with one fingerprint are taken for each
//! other, once in some thousands; a full bucket forgets its earliest key before its time.

use super::request::Tag;
use crate::sys::pages;
use crate::sys::prefetch::prefetch;

/// Keys of a bucket.
const SLOTS: usize = 8;
/// Of these, so many are in use on average when as many keys are kept as there may be.
const USED_SLOTS: usize = 4;

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    fingerprint: u32,
    /// Which key in order it was; 0 for none.
    number: u32,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Bucket([Slot; SLOTS]);

const _: () = assert!(size_of::<Bucket>() == 64);

impl Bucket {
    /// Takes a fingerprint out; the others move up, so that the free slots are the last ones.
    fn take(&mut self, fingerprint: u32) {
        let mut kept = [Slot::default(); SLOTS];
        let others = self.0.iter().filter(|slot| slot.fingerprint != fingerprint);
        for (place, slot) in kept.iter_mut().zip(others) {
            *place = *slot;
        }
        self.0 = kept;
    }
}

/// The keys; 16 bytes each, and up to 32 while they become more.
#[derive(Debug, Default)]
pub(super) struct Recent {
    /// A power of two of them.
    buckets: Vec<Bucket>,
    latest: u32,
    /// Keys that count, from the latest on.
    most: u32,
}

impl Slot {
    /// How many keys came after it; more than there can be for none. Without a jump.
    fn age(self, latest: u32) -> u32 {
        let none = u32::from(self.number == 0).wrapping_neg();
        latest.wrapping_sub(self.number) | none
    }
}

const fn fingerprint(tag: Tag) -> u32 {
    #[expect(
        clippy::as_conversions,
        clippy::cast_possible_truncation,
        reason = "half of it will do"
    )]
    let low = tag.0 as u32;
    low
}

impl Recent {
    /// Keeps so many keys from now on.
    pub(super) fn keep(&mut self, most: usize) {
        self.most = u32::try_from(most).unwrap_or(u32::MAX / 2);
        let wanted = most.div_ceil(USED_SLOTS).next_power_of_two();
        if wanted <= self.buckets.len() {
            return;
        }
        let before = core::mem::replace(&mut self.buckets, pages::with_capacity(wanted));
        self.buckets.resize(wanted, Bucket::default());
        // The earliest first, so that the latest stands first again.
        let all = before
            .into_iter()
            .flat_map(|bucket| bucket.0.into_iter().rev());
        for slot in all.filter(|slot| slot.number != 0) {
            self.put(slot);
        }
    }

    fn bucket(&self, fingerprint: u32) -> usize {
        let mask = self.buckets.len().saturating_sub(1);
        usize::try_from(fingerprint).unwrap_or(0) & mask
    }

    fn put(&mut self, slot: Slot) {
        let at = self.bucket(slot.fingerprint);
        if let Some(bucket) = self.buckets.get_mut(at) {
            bucket.0.copy_within(..SLOTS - 1, 1);
            bucket.0[0] = slot;
        }
    }

    /// Fetches the place of a key: it will be looked for soon.
    pub(super) fn prefetch(&self, tag: Tag) {
        prefetch(self.buckets.get(self.bucket(fingerprint(tag))));
    }

    /// Adds a key as the latest one.
    pub(super) fn insert(&mut self, tag: Tag) {
        self.latest = self.latest.wrapping_add(1).max(1);
        self.put(Slot {
            fingerprint: fingerprint(tag),
            number: self.latest,
        });
    }

    /// Whether a key is there.
    pub(super) fn has(&self, tag: Tag) -> bool {
        let fingerprint = fingerprint(tag);
        let is_it =
            |slot: &Slot| (slot.fingerprint == fingerprint) & (slot.age(self.latest) < self.most);
        let bucket = self.buckets.get(self.bucket(fingerprint));
        // All are looked at, so that there is nothing to guess.
        bucket.is_some_and(|bucket| {
            bucket
                .0
                .iter()
                .fold(false, |found, slot| found | is_it(slot))
        })
    }

    /// Takes a key out; false if it is not there.
    pub(super) fn remove(&mut self, tag: Tag) -> bool {
        let found = self.has(tag);
        if found {
            let own = fingerprint(tag);
            let at = self.bucket(own);
            if let Some(bucket) = self.buckets.get_mut(at) {
                bucket.take(own);
            }
        }
        found
    }

    /// Bytes of memory held.
    pub(super) const fn memory_bytes(&self) -> usize {
        self.buckets.capacity() * size_of::<Bucket>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag(number: u64) -> Tag {
        Tag(number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    #[test]
    fn the_latest_keys_are_there_and_earlier_ones_are_not() {
        let mut recent = Recent::default();
        recent.keep(1000);
        (0..5000).for_each(|number| recent.insert(tag(number)));
        let there = (4000..5000).filter(|number| recent.has(tag(*number)));
        assert!(there.count() > 950);
        assert!(!(0..4000).any(|number| recent.has(tag(number))));
    }

    #[test]
    fn a_key_that_was_taken_out_is_not_there() {
        let mut recent = Recent::default();
        recent.keep(10);
        recent.insert(tag(1));
        recent.insert(tag(1));
        assert!(recent.remove(tag(1)));
        assert!(!recent.has(tag(1)) && !recent.remove(tag(1)));
    }

    #[test]
    fn keys_stay_when_more_are_to_be_kept() {
        let mut recent = Recent::default();
        recent.keep(8);
        (0..8).for_each(|number| recent.insert(tag(number)));
        recent.keep(10_000);
        assert!((0..8).all(|number| recent.has(tag(number))));
    }

    #[test]
    fn nothing_is_there_before_anything_is_kept() {
        let mut recent = Recent::default();
        recent.insert(tag(1));
        assert!(!recent.has(tag(1)) && !recent.remove(tag(1)));
    }
}
