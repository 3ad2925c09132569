//! A table from fingerprints to small entries: a lookup reads one cache line, rarely two.

/// Places of a line: as many as fill a cache line together with the mark at its end.
const PLACES: usize = 5;
/// Lines of the smallest table that holds anything.
const LINES_MIN: usize = 4;

/// Neighbouring places. An entry of zero means that its place is free; places are filled in order.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
struct Line {
    keys: [u64; PLACES],
    entries: [u32; PLACES],
    /// Not zero: a key that belongs here found no place and is further on.
    overflowed: u32,
}

impl Line {
    /// The entry of a key; zero where it has none here. Without branches, so that many lines can be
    /// on their way from memory at a time.
    fn get(&self, key: u64) -> u32 {
        let pairs = self.keys.iter().zip(&self.entries);
        pairs.fold(0, |found, (own, entry)| {
            found | if *own == key { *entry } else { 0 }
        })
    }

    /// The place of a key, which is the first free one where it has none here.
    fn place(&mut self, key: u64) -> Option<(&mut u64, &mut u32)> {
        let mut pairs = self.keys.iter_mut().zip(&mut self.entries);
        pairs.find(|(own, entry)| **entry == 0 || **own == key)
    }
}

/// Entries, none of them zero, by fingerprints, whose lowest bits must be as good as random.
#[derive(Debug, Default)]
pub(super) struct VerdictTable {
    /// A power of two of them, or none.
    lines: Vec<Line>,
    entries: usize,
}

impl VerdictTable {
    pub(super) const fn len(&self) -> usize {
        self.entries
    }

    /// The line after so many others from where a key belongs.
    fn line_of(&self, key: u64, step: usize) -> usize {
        let mask = self.lines.len().wrapping_sub(1);
        // What is cut off is above the mask.
        let [low, high, ..] = key.to_le_bytes();
        usize::from(u16::from_le_bytes([low, high])).wrapping_add(step) & mask
    }

    /// The entry of a key; zero where there is none.
    pub(super) fn get(&self, key: u64) -> u32 {
        for step in 0..self.lines.len() {
            let Some(line) = self.lines.get(self.line_of(key, step)) else {
                break;
            };
            let found = line.get(key);
            if found != 0 || line.overflowed == 0 {
                return found;
            }
        }
        0
    }

    /// Gives a key an entry, which must not be zero, in place of the one that it has.
    pub(super) fn set(&mut self, key: u64, entry: u32) {
        // At seven eighths one key in ten is not in its own line.
        let places = self.lines.len().saturating_mul(PLACES);
        if self.entries.saturating_add(1) > places / 8 * 7 {
            let lines = self.lines.len().saturating_mul(2).max(LINES_MIN);
            self.rebuild(lines, |_| true);
        }
        for step in 0..self.lines.len() {
            let at = self.line_of(key, step);
            let Some(line) = self.lines.get_mut(at) else {
                return;
            };
            if let Some((own, place)) = line.place(key) {
                self.entries = self.entries.saturating_add(usize::from(*place == 0));
                (*own, *place) = (key, entry);
                return;
            }
            line.overflowed = 1;
        }
    }

    /// All entries.
    pub(super) fn entries(&self) -> impl Iterator<Item = u32> {
        let all = self.lines.iter().flat_map(|line| line.entries);
        all.filter(|entry| *entry != 0)
    }

    /// Forgets the entries that are not to be kept.
    pub(super) fn retain(&mut self, keep: impl FnMut(u32) -> bool) {
        self.rebuild(self.lines.len(), keep);
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    fn rebuild(&mut self, lines: usize, mut keep: impl FnMut(u32) -> bool) {
        let old = core::mem::replace(&mut self.lines, vec![Line::default(); lines]);
        self.entries = 0;
        for line in &old {
            for (key, entry) in line.keys.iter().zip(&line.entries) {
                if *entry != 0 && keep(*entry) {
                    self.set(*key, *entry);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_line_is_a_cache_line() {
        assert_eq!((size_of::<Line>(), align_of::<Line>()), (64, 64));
    }

    #[test]
    fn a_table_of_keys_that_all_belong_to_one_line_loses_none() {
        let mut table = VerdictTable::default();
        for number in 0..200_u32 {
            table.set(u64::from(number) << 32, number + 1);
        }
        assert_eq!(table.len(), 200);
        for number in 0..200_u32 {
            assert_eq!(table.get(u64::from(number) << 32), number + 1);
        }
        assert_eq!(table.get(200 << 32), 0);
        table.retain(|entry| entry > 150);
        assert_eq!(table.len(), 50);
        assert_eq!((table.get(149 << 32), table.get(150 << 32)), (0, 151));
    }

    proptest! {
        #[test]
        fn it_answers_as_a_map_does(
            sets in prop::collection::vec((0..400_u64, 1..100_u32), 0..600),
            spread in prop::sample::select(vec![1_u64, 1 << 13, 0x9E37_79B9_7F4A_7C15]),
            kept_from in 0..100_u32,
        ) {
            let (mut table, mut map) = (VerdictTable::default(), BTreeMap::new());
            for (number, entry) in sets {
                let key = number.wrapping_mul(spread);
                table.set(key, entry);
                map.insert(key, entry);
            }
            for _ in 0..2 {
                prop_assert_eq!(table.len(), map.len());
                prop_assert_eq!(table.entries().count(), map.len());
                for number in 0..400_u64 {
                    let key = number.wrapping_mul(spread);
                    prop_assert_eq!(table.get(key), map.get(&key).copied().unwrap_or(0));
                }
                table.retain(|entry| entry >= kept_from);
                map.retain(|_, entry| *entry >= kept_from);
            }
            table.clear();
            prop_assert_eq!((table.len(), table.get(0)), (0, 0));
        }
    }
}
