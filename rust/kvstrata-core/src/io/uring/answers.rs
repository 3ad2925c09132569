//! What the kernel answers, and what a test makes of it.

use std::os::fd::AsRawFd;

use super::driver::Driver;
use super::flight::Step;

impl Driver {
    /// Takes the kernel's answers.
    pub(super) fn reap(&mut self) {
        self.ring.reap(&mut self.answers);
        if self.shared.alter.is_some() {
            let now = self.shared.intake.clock().now();
            for (token, answer) in self.waits.released(now) {
                self.answer(token, answer);
            }
        }
        while let Some((token, truth)) = self.answers.pop_front() {
            if let Some(answer) = self.altered(token, truth) {
                self.answer(token, answer);
            }
        }
    }

    /// What a test makes of an answer; None when it is held back.
    fn altered(&mut self, token: u64, truth: i32) -> Option<i32> {
        let (Some(alter), Some(flight)) = (&self.shared.alter, self.flights.get(&token)) else {
            return Some(truth);
        };
        let answer = alter(&flight.operation, truth);
        if answer.after.is_zero() {
            return Some(answer.result);
        }
        let due = self.shared.intake.clock().now().checked_add(answer.after);
        self.waits.withhold(due, token, answer.result);
        None
    }

    /// Takes the answer to a call.
    fn answer(&mut self, token: u64, answer: i32) {
        let Some(flight) = self.flights.get_mut(&token) else {
            return;
        };
        if let Some(file) = &flight.lent {
            let fd = file.as_raw_fd();
            match self.open.get_mut(&fd) {
                Some(calls) if *calls > 1 => *calls -= 1,
                _ => drop(self.open.remove(&fd)),
            }
        }
        self.cancelled -= usize::from(flight.cancelled);
        let (step, file) = flight.answer(answer);
        self.release(file);
        match step {
            Step::Call(file) => {
                self.release(Some(file));
                self.ready.push_back(token);
            }
            Step::Look(_) => self.ready.push_back(token),
            Step::Pause(retry) => self.pause(token, retry),
            Step::End => self.end(token, None),
        }
    }
}
