//! The rows of one row file in memory: who uses each, which are free, which entries are stale.

use crate::eviction::EntryId;

/// What a row is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowUse {
    /// Free to be written.
    Free,
    /// Being written, or on its way to be free.
    Reserved,
    /// Holds the row of an index entry.
    Occupied(EntryId),
    /// Set aside after a device error.
    Retired,
}

const FREE: u32 = u32::MAX;
const RESERVED: u32 = u32::MAX - 1;
const RETIRED: u32 = u32::MAX - 2;

/// The uses of all rows of a file: 4 bytes and 1 bit a row.
#[derive(Debug)]
pub(crate) struct Rows {
    uses: Vec<u32>,
    /// Rows whose table entry on disk is not zero although they are not occupied.
    stale: Vec<u64>,
    free: u32,
    occupied: u32,
    reserved: u32,
    cursor: usize,
}

impl Rows {
    /// `count` free rows.
    pub(crate) fn new(count: u32) -> Self {
        let length = usize::try_from(count).unwrap_or(usize::MAX);
        Self {
            uses: vec![FREE; length],
            stale: vec![0; length.div_ceil(64)],
            free: count,
            occupied: 0,
            reserved: 0,
            cursor: 0,
        }
    }

    /// Number of free rows.
    pub(crate) const fn free(&self) -> u32 {
        self.free
    }

    /// Number of occupied rows.
    pub(crate) const fn occupied(&self) -> u32 {
        self.occupied
    }

    /// The use of a row; rows past the end count as retired.
    pub(crate) fn get(&self, row: u32) -> RowUse {
        match usize::try_from(row)
            .ok()
            .and_then(|at| self.uses.get(at))
            .copied()
        {
            Some(FREE) => RowUse::Free,
            Some(RESERVED) => RowUse::Reserved,
            Some(RETIRED) | None => RowUse::Retired,
            Some(entry) => RowUse::Occupied(EntryId(entry)),
        }
    }

    /// Sets the use of a row. A retired row stays retired.
    pub(crate) fn set(&mut self, row: u32, new: RowUse) {
        let Some(place) = usize::try_from(row)
            .ok()
            .and_then(|at| self.uses.get_mut(at))
        else {
            return;
        };
        if *place == RETIRED {
            return;
        }
        match *place {
            FREE => self.free = self.free.saturating_sub(1),
            RESERVED => self.reserved = self.reserved.saturating_sub(1),
            _ => self.occupied = self.occupied.saturating_sub(1),
        }
        *place = match new {
            RowUse::Free => {
                self.free = self.free.saturating_add(1);
                FREE
            }
            RowUse::Reserved => {
                self.reserved = self.reserved.saturating_add(1);
                RESERVED
            }
            RowUse::Occupied(entry) => {
                self.occupied = self.occupied.saturating_add(1);
                entry.0
            }
            RowUse::Retired => RETIRED,
        };
    }

    /// Reserves up to `most` free rows, side by side where possible, into `taken`.
    ///
    /// Goes on where the last call ended, so that rows of one job lie next to each other.
    pub(crate) fn take(&mut self, most: usize, taken: &mut Vec<u32>) {
        let (mut left, length) = (most, self.uses.len());
        let start = self.cursor;
        for step in 0..length {
            if left == 0 || self.free == 0 {
                break;
            }
            let at = (start.saturating_add(step))
                .checked_rem(length)
                .unwrap_or(0);
            if self.uses.get(at) == Some(&FREE) {
                let row = u32::try_from(at).unwrap_or(u32::MAX);
                self.set(row, RowUse::Reserved);
                taken.push(row);
                left = left.saturating_sub(1);
                self.cursor = at.saturating_add(1);
            }
        }
    }

    /// The entries of all occupied rows.
    pub(crate) fn occupants(&self) -> impl Iterator<Item = EntryId> + '_ {
        self.uses
            .iter()
            .filter(|entry| **entry < RETIRED)
            .map(|entry| EntryId(*entry))
    }

    /// Frees all occupied rows; their entries are still on disk.
    pub(crate) fn give_up(&mut self) {
        for row in 0..u32::try_from(self.uses.len()).unwrap_or(u32::MAX) {
            if matches!(self.get(row), RowUse::Occupied(_)) {
                self.set(row, RowUse::Free);
                self.set_stale(row, true);
            }
        }
    }

    /// Whether a row is being written or read out of the table.
    pub(crate) const fn any_reserved(&self) -> bool {
        self.reserved > 0
    }

    /// Whether no row is occupied or reserved.
    pub(crate) const fn is_unused(&self) -> bool {
        self.occupied == 0 && self.reserved == 0
    }

    /// Remembers whether the entry on disk must be cleared before the row is overwritten.
    pub(crate) fn set_stale(&mut self, row: u32, stale: bool) {
        let at = usize::try_from(row).unwrap_or(usize::MAX);
        if let Some(word) = self.stale.get_mut(at / 64) {
            let bit = 1_u64 << (at % 64);
            *word = if stale { *word | bit } else { *word & !bit };
        }
    }

    /// Whether the entry on disk must be cleared before the row is overwritten.
    pub(crate) fn is_stale(&self, row: u32) -> bool {
        let at = usize::try_from(row).unwrap_or(usize::MAX);
        self.stale
            .get(at / 64)
            .is_some_and(|word| word & (1 << (at % 64)) != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_taken_side_by_side_and_counted() {
        let mut rows = Rows::new(6);
        let mut taken = Vec::new();
        rows.take(4, &mut taken);
        assert_eq!(taken, [0, 1, 2, 3]);
        assert_eq!(rows.free(), 2);
        assert!(rows.any_reserved());
        rows.set(1, RowUse::Free);
        taken.clear();
        rows.take(9, &mut taken);
        assert_eq!(taken, [4, 5, 1]);
        assert_eq!(rows.free(), 0);
    }

    #[test]
    fn a_retired_row_is_never_given_out_again() {
        let mut rows = Rows::new(2);
        rows.set(0, RowUse::Retired);
        rows.set(0, RowUse::Free);
        let mut taken = Vec::new();
        rows.take(2, &mut taken);
        assert_eq!(taken, [1]);
        assert_eq!(rows.get(0), RowUse::Retired);
        assert_eq!(rows.get(7), RowUse::Retired);
    }

    #[test]
    fn occupants_and_stale_entries_are_remembered() {
        let mut rows = Rows::new(70);
        rows.set(69, RowUse::Occupied(EntryId(5)));
        rows.set_stale(69, true);
        assert!(rows.is_stale(69) && !rows.is_stale(68));
        rows.set_stale(69, false);
        assert!(!rows.is_stale(69));
        assert_eq!(rows.occupants().collect::<Vec<_>>(), [EntryId(5)]);
        assert_eq!(rows.occupied(), 1);
        rows.set(69, RowUse::Retired);
        assert_eq!(rows.occupied(), 0);
    }
}
