//! Operations that wait until another thread has looked at their file.

use std::time::Instant;

use super::driver::Driver;
use super::errands;
use crate::io::Failure;
use crate::sys::fs::{Direct, File};
use crate::sys::sync::Arc;

impl Driver {
    /// Takes what other threads found out of files.
    pub(super) fn take_looks(&mut self) {
        let looks = core::mem::take(&mut self.shared.intake.lock().own.looked);
        for looked in looks {
            let tokens = self.looked_at.remove(&looked.key).unwrap_or_default();
            for token in tokens.into_iter().rev() {
                if let Some(flight) = self.flights.get_mut(&token) {
                    flight.looked = Some(looked.opened.clone());
                    self.ready.push_front(token);
                }
            }
            self.release(looked.opened.ok().map(|(file, _)| file));
        }
    }

    /// Has another thread look at the operation's file; false when too many are looked at.
    pub(super) fn look(&mut self, token: u64, direct: Direct) -> bool {
        let Some(flight) = self.flights.get(&token) else {
            return true;
        };
        let file = &flight.operation.file;
        let key = errands::key(file, direct);
        if let Some(tokens) = self.looked_at.get_mut(&key) {
            tokens.push(token);
            return true;
        }
        if self.open.len() + self.looked_at.len() >= self.shared.files_max {
            return false;
        }
        self.looked_at.insert(key, vec![token]);
        self.shared.errands.open(&self.shared, file, direct);
        true
    }

    /// Ends what waits for a look at its file and is too late.
    pub(super) fn end_late_looks(&mut self, now: Instant) {
        let flights = &self.flights;
        let is_late = |token: &u64| {
            let flight = flights.get(token);
            flight.is_none_or(|flight| flight.operation.deadline <= now)
        };
        let mut late = Vec::new();
        for tokens in self.looked_at.values_mut() {
            late.extend(tokens.extract_if(.., |token| is_late(token)));
        }
        for token in late {
            self.end(token, Some(Failure::TimedOut));
        }
    }

    /// Lets go of a file, which may have to be closed.
    pub(super) fn release(&self, file: Option<Arc<File>>) {
        if let Some(file) = file
            && self.shared.may_hang
        {
            self.shared.errands.close(&self.shared, file);
        }
    }
}
