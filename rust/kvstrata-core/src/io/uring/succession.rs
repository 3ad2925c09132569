//! What becomes of operations when the kernel takes no more calls of a ring that it gave.

use hashbrown::HashSet;

use super::driver::Driver;
use super::flight::Flight;
use crate::io::work::Executed;
use crate::io::{Engine, Failure, Operation};
use crate::sys::sync::Arc;

impl Driver {
    /// Hands all operations that the kernel does not have, and those that are still to come, to
    /// `heir`, or fails them where there is none; whether the kernel has none. It may still write to
    /// the memory of those it has: with them the ring is leaked, and they stay under way.
    pub(super) fn hand_over(mut self, heir: Option<Arc<dyn Engine>>) -> bool {
        let untaken: HashSet<u64> = self.ring.untaken().into_iter().collect();
        let is_ours =
            |(token, flight): &(&u64, &Flight)| flight.lent.is_none() || untaken.contains(*token);
        let ours = self.flights.iter().filter(is_ours);
        let mut tokens: Vec<u64> = ours.map(|(token, _)| *token).collect();
        tokens.sort_unstable();
        let flights = tokens.iter().filter_map(|token| self.flights.remove(token));
        let operations: Vec<Operation> = flights.map(|flight| flight.operation).collect();
        self.deliver_all();
        self.pass_on(operations, heir);
        let is_empty = self.flights.is_empty();
        if !is_empty {
            core::mem::forget(self);
        }
        is_empty
    }

    fn pass_on(&self, mut operations: Vec<Operation>, heir: Option<Arc<dyn Engine>>) {
        let intake = &self.shared.intake;
        let mut state = intake.lock();
        for operation in &operations {
            state.queue.end(operation.id);
        }
        if let Some(heir) = heir {
            operations.extend(state.queue.take_waiting());
            state.successor = Some(Arc::clone(&heir));
            drop(state);
            heir.submit(operations);
            return;
        }
        drop(state);
        // What waits is failed by the refuser.
        intake.poison();
        for operation in operations {
            intake.complete(operation, Executed::refused(Failure::Poisoned));
        }
    }
}
