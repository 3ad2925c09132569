//! The rows of one request and one class, in the order of its prompt.

use super::Handle;
use crate::eviction::EntryId;

/// Rows that a path may have before it is looked through for those that are gone.
const ROWS_MIN: usize = 64;

/// A row of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    /// The token of the prompt that its chunk ends with.
    pub(super) end: u64,
    pub(super) handle: Handle,
}

/// The rows; see the module. Some may be gone, but no more than there are others, or a few.
#[derive(Debug, Default)]
pub(super) struct Path {
    rows: Vec<Row>,
    /// Rows that were there when it was looked through last.
    there: usize,
}

impl Path {
    pub(super) fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Adds rows, given in the order of the prompt; whether any was not known. Takes time proportional
    /// to them and to what is known behind the first of them.
    pub(super) fn merge(&mut self, rows: &[Row]) -> bool {
        let Some(first) = rows.first() else {
            return false;
        };
        let from = self.rows.partition_point(|row| row.end < first.end);
        let mut behind = self.rows.split_off(from).into_iter().peekable();
        let mut is_new = false;
        for row in rows {
            while let Some(known) = behind.next_if(|known| known.end <= row.end) {
                self.rows.push(known);
            }
            let mut same = self.rows.iter().rev().take_while(|one| one.end == row.end);
            if same.all(|one| one.handle != row.handle) {
                self.rows.push(*row);
                is_new = true;
            }
        }
        self.rows.extend(behind);
        is_new
    }

    /// Forgets rows that are gone, once there are as many as others.
    pub(super) fn tidy(&mut self, is_there: impl Fn(Handle) -> bool) {
        if self.rows.len() > self.there.saturating_mul(2).max(ROWS_MIN) {
            self.rows.retain(|row| is_there(row.handle));
            self.there = self.rows.len();
        }
    }

    /// For each of these tokens, in their order, the last row that ends with it or before and is
    /// there. Every row is looked at once at most, and those at the end that are gone once for all.
    pub(super) fn before(
        &mut self,
        ends: &[u64],
        there: impl Fn(Handle) -> Option<EntryId>,
    ) -> Vec<Option<EntryId>> {
        while let Some(last) = self.rows.pop() {
            if there(last.handle).is_some() {
                self.rows.push(last);
                break;
            }
        }
        let mut rest = self.rows.as_slice();
        let mut latest = None;
        let find = |end: &u64| {
            let (until, behind) = rest.split_at(rest.partition_point(|row| row.end <= *end));
            rest = behind;
            let found = until.iter().rev().find_map(|row| there(row.handle));
            latest = found.or(latest);
            latest
        };
        ends.iter().map(find).collect()
    }
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;

    use super::*;

    fn rows(ends: impl IntoIterator<Item = u64>) -> Vec<Row> {
        let row = |end| Row {
            end,
            handle: Handle(end),
        };
        ends.into_iter().map(row).collect()
    }

    #[test]
    fn rows_are_merged_in_the_order_of_the_prompt_and_known_ones_are_not_new() {
        let mut path = Path::default();
        assert!(path.merge(&rows([5, 6, 9])));
        assert!(path.merge(&rows([1, 5, 7, 12])));
        assert!(!path.merge(&rows([1, 1, 9])));
        assert_eq!(path.rows(), rows([1, 5, 6, 7, 9, 12]));
        // Another row of the same end stands behind those that are there.
        let twin = Row {
            end: 6,
            handle: Handle(60),
        };
        assert!(path.merge(&[twin]) && !path.merge(&[twin]));
        assert_eq!(path.rows()[2..4], [rows([6])[0], twin]);
    }

    #[test]
    fn the_row_before_a_token_is_the_last_one_that_is_there() {
        let mut path = Path::default();
        path.merge(&rows([2, 4, 6, 8, 10]));
        let there = |handle: Handle| {
            let number = u32::try_from(handle.0).unwrap();
            number.is_multiple_of(4).then_some(EntryId(number))
        };
        let found = path.before(&[1, 3, 6, 7, 8, 11], there);
        let numbers: Vec<Option<u32>> = found.iter().map(|id| id.map(|id| id.0)).collect();
        assert_eq!(numbers, [None, None, Some(4), Some(4), Some(8), Some(8)]);
        assert_eq!(path.rows(), rows([2, 4, 6, 8]), "10 is gone for good");
    }

    #[test]
    fn a_request_longer_than_what_stays_of_it_costs_what_it_adds() {
        // Of 32 stores of 500 rows only the first 2,000 rows stay: the tail goes first.
        let looks = Cell::new(0_u64);
        let there = |handle: Handle| {
            looks.set(looks.get() + 1);
            (handle.0 <= 2_000).then_some(EntryId(0))
        };
        let mut path = Path::default();
        for store in 0..32_u64 {
            let added = rows(store * 500 + 1..=store * 500 + 500);
            let ends: Vec<u64> = added.iter().map(|row| row.end).collect();
            path.before(&ends, there);
            path.merge(&added);
            path.tidy(|handle| there(handle).is_some());
            assert!(path.rows().len() <= 2_500, "{}", path.rows().len());
        }
        assert!(looks.get() < 3 * 16_000, "{}", looks.get());
    }

    #[test]
    fn rows_that_go_in_the_middle_are_forgotten_too() {
        let mut path = Path::default();
        for end in 1..10_000 {
            path.merge(&rows([end]));
            path.tidy(|handle| handle.0 % 100 == 0 || handle.0 == end);
            assert!(path.rows().len() <= 202, "{}", path.rows().len());
        }
    }
}
