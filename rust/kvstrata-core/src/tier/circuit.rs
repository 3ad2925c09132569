//! When a device that keeps failing is left alone, and when it is tried again: a state machine
//! without threads, files or a clock of its own.
//!
//! The pattern is Nygard's circuit breaker (*Release It!*): closed while all is well, open for a
//! while after failures in a row, then half-open, when one trial decides.

use core::time::Duration;
use std::time::Instant;

/// When a circuit opens, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CircuitLimits {
    /// Failures in a row that open it, 1 at least.
    pub failures_max: u32,
    /// Time to the first trial; doubled after each one that fails.
    pub pause_first: Duration,
    /// Longest time between two trials.
    pub pause_max: Duration,
}

impl Default for CircuitLimits {
    /// Five failures: one bad place does not open it, and a dead mount costs five deadlines at
    /// most. A second to the first trial, a minute between later ones: an operator who repaired
    /// the disk sees it used again within that minute.
    fn default() -> Self {
        Self {
            failures_max: 5,
            pause_first: Duration::from_secs(1),
            pause_max: Duration::from_mins(1),
        }
    }
}

/// What a circuit lets through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Position {
    /// Everything.
    Closed,
    /// Nothing; a trial is due at this time.
    Open(Instant),
    /// One trial, which is overdue at this time; `None` once the engine was told so.
    HalfOpen(Option<Instant>),
}

/// What the end of a trial did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trial {
    /// It closed the circuit, which had been open since this time.
    Closed(Instant),
    /// The circuit is open again.
    Reopened,
    /// There was no trial under way.
    Ignored,
}

/// The circuit of one direction.
#[derive(Debug)]
pub(crate) struct Circuit {
    limits: CircuitLimits,
    position: Position,
    failures: u32,
    /// How long it stays open the next time.
    pause: Duration,
    opened_at: Option<Instant>,
}

impl Circuit {
    /// A closed circuit.
    pub(crate) const fn new(limits: CircuitLimits) -> Self {
        Self {
            limits,
            position: Position::Closed,
            failures: 0,
            pause: limits.pause_first,
            opened_at: None,
        }
    }

    /// Whether operations are refused.
    pub(crate) const fn refuses(&self) -> bool {
        !matches!(self.position, Position::Closed)
    }

    /// Whether a success would change anything.
    pub(crate) fn is_untroubled(&self) -> bool {
        !self.refuses() && self.failures == 0 && self.pause == self.limits.pause_first
    }

    /// The word of the statistics.
    pub(crate) const fn as_str(&self) -> &'static str {
        match self.position {
            Position::Closed => "closed",
            Position::Open(_) => "open",
            Position::HalfOpen(_) => "half-open",
        }
    }

    /// Counts a failure; `Some`, with the time to the first trial, when it opened the circuit.
    /// What fails while it is open was begun before, and changes nothing.
    pub(crate) fn fail(&mut self, now: Instant) -> Option<Duration> {
        if self.refuses() {
            return None;
        }
        self.failures = self.failures.saturating_add(1);
        if self.failures < self.limits.failures_max {
            return None;
        }
        self.opened_at = Some(now);
        Some(self.open(now))
    }

    /// Counts a success: failures are counted from nothing again. An open circuit stays open, for
    /// what succeeds then was begun before.
    pub(crate) const fn succeed(&mut self) {
        if !self.refuses() {
            self.failures = 0;
            self.pause = self.limits.pause_first;
        }
    }

    fn open(&mut self, now: Instant) -> Duration {
        let pause = self.pause;
        self.failures = 0;
        self.position = Position::Open(now.checked_add(pause).unwrap_or(now));
        self.pause = pause.saturating_mul(2).min(self.limits.pause_max);
        pause
    }

    /// When somebody is to look at it again.
    pub(crate) const fn due(&self) -> Option<Instant> {
        match self.position {
            Position::Closed => None,
            Position::Open(at) => Some(at),
            Position::HalfOpen(late) => late,
        }
    }

    /// Whether a trial is to begin now: if so, it is under way from here on and overdue at `late`.
    pub(crate) fn begin_trial(&mut self, now: Instant, late: Instant) -> bool {
        let due = matches!(self.position, Position::Open(at) if at <= now);
        if due {
            self.position = Position::HalfOpen(Some(late));
        }
        due
    }

    /// Notes that the trial is overdue, once. It stays the only one until it ends, however late.
    pub(crate) fn note_late(&mut self, now: Instant) {
        if matches!(self.position, Position::HalfOpen(Some(late)) if late <= now) {
            self.position = Position::HalfOpen(None);
        }
    }

    /// Ends the trial. After one that succeeded the pause stays as long as it was until something
    /// real succeeds: a trial can be luckier than the rest.
    pub(crate) fn end_trial(&mut self, now: Instant, success: bool) -> Trial {
        if !matches!(self.position, Position::HalfOpen(_)) {
            return Trial::Ignored;
        }
        if success {
            self.position = Position::Closed;
            return Trial::Closed(self.opened_at.take().unwrap_or(now));
        }
        self.open(now);
        Trial::Reopened
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::clock::{Clock, SystemClock};

    const SECOND: Duration = Duration::from_secs(1);

    fn limits(failures_max: u32) -> CircuitLimits {
        CircuitLimits {
            failures_max,
            pause_first: SECOND,
            pause_max: SECOND * 5,
        }
    }

    fn opened(now: Instant) -> Circuit {
        let mut circuit = Circuit::new(limits(1));
        assert_eq!(circuit.fail(now), Some(SECOND));
        circuit
    }

    #[test]
    fn it_opens_after_exactly_so_many_failures_in_a_row() {
        let now = SystemClock.now();
        let mut circuit = Circuit::new(limits(3));
        for _ in 0..2 {
            assert_eq!(circuit.fail(now), None);
            assert_eq!(circuit.fail(now), None);
            assert!(!circuit.refuses());
            circuit.succeed();
        }
        assert_eq!(circuit.fail(now), None);
        assert_eq!(circuit.fail(now), None);
        assert_eq!(circuit.fail(now), Some(SECOND));
        assert!(circuit.refuses());
        assert_eq!(circuit.fail(now), None);
        assert_eq!(circuit.due(), Some(now + SECOND));
    }

    #[test]
    fn one_trial_is_under_way_at_a_time_and_only_when_due() {
        let now = SystemClock.now();
        let mut circuit = opened(now);
        let late = now + 2 * SECOND;
        assert!(!circuit.begin_trial(now + SECOND / 2, late));
        assert!(circuit.begin_trial(now + SECOND, late));
        assert!(!circuit.begin_trial(now + SECOND, late));
        assert_eq!(circuit.as_str(), "half-open");
        assert_eq!(circuit.due(), Some(late));
        circuit.note_late(now + SECOND);
        assert_eq!(circuit.due(), Some(late));
        // One that is stuck asks for nothing more and lets no other begin.
        circuit.note_late(late);
        assert_eq!(circuit.due(), None);
        assert!(!circuit.begin_trial(late + 100 * SECOND, late + 200 * SECOND));
        assert!(circuit.refuses());
        assert_eq!(circuit.end_trial(late, true), Trial::Closed(now));
        assert!(!circuit.refuses());
        assert_eq!(circuit.end_trial(late, true), Trial::Ignored);
    }

    #[test]
    fn pauses_double_up_to_the_longest_until_something_real_succeeds() {
        let mut now = SystemClock.now();
        let mut circuit = opened(now);
        for pause in [2, 4, 5, 5] {
            now = circuit.due().unwrap();
            assert!(circuit.begin_trial(now, now + SECOND));
            assert_eq!(circuit.end_trial(now, false), Trial::Reopened);
            assert_eq!(circuit.due(), Some(now + pause * SECOND));
        }
        now = circuit.due().unwrap();
        assert!(circuit.begin_trial(now, now + SECOND));
        assert!(matches!(circuit.end_trial(now, true), Trial::Closed(_)));
        assert!(!circuit.is_untroubled());
        assert_eq!(circuit.fail(now), Some(5 * SECOND));
        now = circuit.due().unwrap();
        assert!(circuit.begin_trial(now, now + SECOND));
        circuit.end_trial(now, true);
        circuit.succeed();
        assert!(circuit.is_untroubled());
        assert_eq!(circuit.fail(now), Some(SECOND));
    }

    #[test]
    fn what_was_begun_before_it_opened_closes_nothing() {
        let now = SystemClock.now();
        let mut circuit = opened(now);
        circuit.succeed();
        assert!(circuit.refuses());
        assert!(circuit.begin_trial(now + SECOND, now + SECOND));
        circuit.succeed();
        assert_eq!(circuit.as_str(), "half-open");
    }
}
