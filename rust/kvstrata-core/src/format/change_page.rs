//! The second page of a row file: a counter per region of the row table, so that a reader of
//! another process re-reads only what changed.

use super::geometry::{CHANGE_PAGE_OFFSET, PAGE_BYTES, REGIONS_MAX};

/// Bytes of the change page.
pub const CHANGE_PAGE_BYTES: usize = 4096;
/// Bytes before the first counter; zero, reserved.
pub const CHANGE_PAGE_HEADER_BYTES: usize = 64;
/// Bytes of a counter.
pub const COUNTER_BYTES: usize = 8;

/// [`REGIONS_MAX`] as an array length.
const COUNTERS: usize = 500;

const _: () = assert!(REGIONS_MAX == 500 && COUNTERS == 500);
const _: () = assert!(CHANGE_PAGE_HEADER_BYTES + COUNTERS * COUNTER_BYTES <= CHANGE_PAGE_BYTES);
const _: () = assert!(CHANGE_PAGE_OFFSET == PAGE_BYTES);

/// The counters of a file. Regions are those of [`super::Geometry::region_of`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangePage {
    counters: [u64; COUNTERS],
}

impl Default for ChangePage {
    fn default() -> Self {
        Self {
            counters: [0; COUNTERS],
        }
    }
}

impl ChangePage {
    /// The page's bytes.
    pub fn encode(&self) -> [u8; CHANGE_PAGE_BYTES] {
        let mut page = [0; CHANGE_PAGE_BYTES];
        let area = page.iter_mut().skip(CHANGE_PAGE_HEADER_BYTES);
        let bytes = self
            .counters
            .iter()
            .flat_map(|counter| counter.to_le_bytes());
        for (target, byte) in area.zip(bytes) {
            *target = byte;
        }
        page
    }

    /// Reads the counters. Any bytes are some counters: they carry no meaning but being different
    /// from what they were.
    pub fn decode(page: &[u8; CHANGE_PAGE_BYTES]) -> Self {
        let mut own = Self::default();
        let area = page.get(CHANGE_PAGE_HEADER_BYTES..).unwrap_or(&[]);
        let (chunks, _) = area.as_chunks::<COUNTER_BYTES>();
        for (counter, chunk) in own.counters.iter_mut().zip(chunks) {
            *counter = u64::from_le_bytes(*chunk);
        }
        own
    }

    /// The counter of `region`; 0 for a region that does not exist.
    pub fn counter(&self, region: u32) -> u64 {
        usize::try_from(region)
            .ok()
            .and_then(|at| self.counters.get(at))
            .copied()
            .unwrap_or(0)
    }

    /// Counts a change in `region` and returns the new counter and its offset in the file in
    /// bytes; `None` for a region that does not exist.
    pub fn raise(&mut self, region: u32) -> Option<(u64, u64)> {
        let counter = self.counters.get_mut(usize::try_from(region).ok()?)?;
        *counter = counter.wrapping_add(1);
        Some((*counter, counter_offset(region)))
    }
}

/// Offset in the file, in bytes, of the counter of `region`.
pub const fn counter_offset(region: u32) -> u64 {
    #[expect(
        clippy::as_conversions,
        reason = "widening constants and a u32 loses nothing"
    )]
    let offset = CHANGE_PAGE_HEADER_BYTES as u64 + region as u64 * COUNTER_BYTES as u64;
    CHANGE_PAGE_OFFSET + offset
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_raised_counter_is_found_at_its_offset() {
        let mut page = ChangePage::default();
        let _ = page.raise(499);
        let (counter, offset) = page.raise(499).unwrap();
        assert_eq!(counter, 2);
        let bytes = page.encode();
        let at = usize::try_from(offset - CHANGE_PAGE_OFFSET).unwrap();
        assert_eq!(bytes[at..at + 8], 2u64.to_le_bytes());
        assert_eq!(ChangePage::decode(&bytes), page);
        assert_eq!(page.counter(498), 0);
        assert!(page.raise(500).is_none());
    }
}
