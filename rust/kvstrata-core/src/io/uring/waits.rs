//! What the ring's thread does at a later time.

use std::time::Instant;

/// Calls to be made again after a pause, and answers that a test holds back.
#[derive(Debug, Default)]
pub(super) struct Waits {
    paused: Vec<(Instant, u64)>,
    withheld: Vec<(Instant, u64, i32)>,
}

impl Waits {
    /// The operation goes on at `due`.
    pub(super) fn pause(&mut self, due: Instant, token: u64) {
        self.paused.push((due, token));
    }

    /// The kernel's answer to the operation's call counts from `due` on; None: never.
    pub(super) fn withhold(&mut self, due: Option<Instant>, token: u64, answer: i32) {
        if let Some(due) = due {
            self.withheld.push((due, token, answer));
        }
    }

    /// Forgets all pauses.
    pub(super) fn end_pauses(&mut self) {
        self.paused.clear();
    }

    /// The operations whose pause is over.
    pub(super) fn rested(&mut self, now: Instant) -> Vec<u64> {
        let over = self.paused.extract_if(.., |(due, _)| *due <= now);
        over.map(|(_, token)| token).collect()
    }

    /// The answers whose time has come.
    pub(super) fn released(&mut self, now: Instant) -> Vec<(u64, i32)> {
        let over = self.withheld.extract_if(.., |(due, ..)| *due <= now);
        over.map(|(_, token, answer)| (token, answer)).collect()
    }

    /// When there is something to do.
    pub(super) fn next(&self) -> Option<Instant> {
        let paused = self.paused.iter().map(|(due, _)| *due);
        let withheld = self.withheld.iter().map(|(due, ..)| *due);
        paused.chain(withheld).min()
    }
}
