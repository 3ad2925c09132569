//! Which pages of row tables hold access times that are older than those in memory.

use std::collections::VecDeque;

use crate::eviction::ContainerId;

/// Entries of a row table in one page of 4 KiB.
pub(crate) const ROWS_PER_PAGE: u32 = 32;

/// How old a touch gets before its page is written. With the time to the writer's next look (18 s
/// at most) and that of writing it stays below the 30 seconds that a killed process may lose.
pub(crate) const WAIT_SECONDS: u32 = 10;

/// The pages of one file's table: a bit each, made with the first touch.
#[derive(Debug, Default)]
pub(crate) struct TouchedPages {
    bits: Vec<u64>,
}

impl TouchedPages {
    /// Marks the page of a row; says whether it was unmarked.
    fn mark(&mut self, page: u32) -> bool {
        let at = usize::try_from(page).unwrap_or(usize::MAX);
        if at / 64 >= self.bits.len() {
            self.bits.resize(at / 64 + 1, 0);
        }
        let bit = 1_u64 << (at % 64);
        self.bits.get_mut(at / 64).is_some_and(|word| {
            let new = *word & bit == 0;
            *word |= bit;
            new
        })
    }

    /// Unmarks a page; says whether it was marked.
    pub(crate) fn take(&mut self, page: u32) -> bool {
        let at = usize::try_from(page).unwrap_or(usize::MAX);
        let bit = 1_u64 << (at % 64);
        self.bits.get_mut(at / 64).is_some_and(|word| {
            let marked = *word & bit != 0;
            *word &= !bit;
            marked
        })
    }
}

/// Pages to be written, in the order of their first touch: at most one place per page of a table,
/// and as many again for files that were given back meanwhile.
#[derive(Debug, Default)]
pub(crate) struct TouchedQueue {
    pages: VecDeque<Place>,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    container: ContainerId,
    page: u32,
    /// When it was touched first, seconds since 1970.
    since: u32,
}

impl TouchedQueue {
    /// Takes note that a row's access time changed to `now`. `pages` are those of its file.
    pub(crate) fn touch(
        &mut self,
        container: ContainerId,
        pages: &mut TouchedPages,
        row: u32,
        now: u32,
    ) {
        let page = row / ROWS_PER_PAGE;
        if pages.mark(page) {
            self.pages.push_back(Place {
                container,
                page,
                since: now,
            });
        }
    }

    /// Takes the page that was touched first, of those not written since, if it is of a file that
    /// is `wanted`. It may be gone, or already taken: its file's [`TouchedPages::take`] says.
    pub(crate) fn pop_if(
        &mut self,
        wanted: impl Fn(ContainerId) -> bool,
    ) -> Option<(ContainerId, u32)> {
        let first = self.pages.pop_front_if(|place| wanted(place.container))?;
        Some((first.container, first.page))
    }

    /// Whether a page waits for longer than it may; also when the clock was turned back.
    pub(crate) fn is_due(&self, now: u32) -> bool {
        self.pages
            .front()
            .is_some_and(|place| now < place.since || now - place.since >= WAIT_SECONDS)
    }

    /// Number of pages to be written.
    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_queued_once_until_it_is_taken() {
        let (mut queue, mut pages) = (TouchedQueue::default(), TouchedPages::default());
        let file = ContainerId(3);
        for (row, now) in [(5, 10), (31, 11), (4096, 12), (0, 13), (5, 14)] {
            queue.touch(file, &mut pages, row, now);
        }
        assert_eq!(queue.len(), 2);
        assert_eq!(queue.pop_if(|id| id != file), None);
        assert_eq!(queue.pop_if(|id| id == file), Some((file, 0)));
        assert!(pages.take(0) && !pages.take(0) && !pages.take(9999));
        queue.touch(file, &mut pages, 1, 20);
        assert_eq!(queue.pop_if(|_| true), Some((file, 128)));
        assert_eq!(queue.pop_if(|_| true), Some((file, 0)));
        assert_eq!(queue.pop_if(|_| true), None);
    }

    #[test]
    fn a_page_is_due_once_its_first_touch_is_old_or_the_clock_went_back() {
        let (mut queue, mut pages) = (TouchedQueue::default(), TouchedPages::default());
        assert!(!queue.is_due(1000));
        queue.touch(ContainerId(0), &mut pages, 0, 100);
        queue.touch(ContainerId(0), &mut pages, 0, 110);
        assert!(!queue.is_due(100 + WAIT_SECONDS - 1));
        assert!(queue.is_due(100 + WAIT_SECONDS));
        assert!(queue.is_due(99));
    }
}
