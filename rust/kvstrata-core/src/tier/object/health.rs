//! A server that keeps failing is left alone, and tried again by itself.

use core::time::Duration;

use object_store::ObjectStoreExt;

use crate::io::Direction;
use crate::notice::Level;
use crate::object::{Failure, FailureKind};
use crate::sys::sync::{Arc, lock};
use crate::tier::circuit::Trial;
use crate::tier::last_error::LastError;
use crate::tier::object::dispatch::Ended;
use crate::tier::object::{ObjectTier, Place};

const fn plural(direction: Direction) -> &'static str {
    match direction {
        Direction::Read => "reads",
        Direction::Write => "writes",
    }
}

impl ObjectTier {
    /// Notes a failed request: it is the last error from here on, and the circuit may open. Not to
    /// be called with the state's lock held.
    pub(super) fn server_failed(
        &self,
        direction: Direction,
        failure: &Failure,
        operation: &'static str,
        name: &str,
    ) {
        let now = self.around.clock.now();
        let error = LastError {
            errno: failure.kind.name(),
            operation,
            path: name.to_owned(),
            text: failure.text.clone(),
            at: now,
        };
        let denied_read = direction == Direction::Read && failure.kind == FailureKind::Denied;
        let of_server = failure.kind.is_of_server() && !denied_read;
        let Some(pause) = self.health.fail(direction, of_server, error) else {
            return;
        };
        self.around.metrics.circuit_openings.add(1);
        let subject = match direction {
            Direction::Read => "reads given up",
            Direction::Write => "writes given up",
        };
        self.around.notices.say(Level::Error, subject, || {
            format!(
                "{} keep failing and are given up ({operation}: {failure}); the first trial is in \
                 {pause:?}",
                plural(direction)
            )
        });
        self.circuit.notify_one();
    }

    /// Tries the server again when it is time; runs until the tier stops.
    pub(super) async fn try_again(self: Arc<Self>) {
        loop {
            let wake = self.circuit.notified();
            let Some(due) = self.health.due() else {
                let far = self.around.clock.now() + Duration::from_hours(1);
                if let Ended::Stopped = self.until(far, wake).await {
                    return;
                }
                continue;
            };
            if let Ended::Stopped = self.until(due, core::future::pending::<()>()).await {
                return;
            }
            for direction in [Direction::Read, Direction::Write] {
                self.one_trial(direction).await;
            }
        }
    }

    async fn one_trial(&self, direction: Direction) {
        let now = self.around.clock.now();
        let late = now.checked_add(self.options.deadline).unwrap_or(now);
        let begun = self
            .health
            .with(|circuits| circuits.of(direction).begin_trial(now, late));
        if !begun {
            return;
        }
        let place = lock(&self.state).place.clone();
        let failure = match place {
            Some(place) => match self.until(late, self.trial(direction, &place)).await {
                Ended::Done(result) => result.err(),
                Ended::Late => Some(Failure::late()),
                Ended::Stopped => return,
            },
            None => None,
        };
        let now = self.around.clock.now();
        let success = failure.is_none_or(|failure| !failure.kind.is_of_server());
        let ended = self
            .health
            .with(|circuits| circuits.of(direction).end_trial(now, success));
        if let Trial::Closed(since) = ended {
            let subject = match direction {
                Direction::Read => "reads taken up",
                Direction::Write => "writes taken up",
            };
            let lasted = now.saturating_duration_since(since);
            self.around.notices.say(Level::Info, subject, || {
                let what = plural(direction);
                format!("{what} work again after {:.1} s", lasted.as_secs_f64())
            });
        }
    }

    /// One small request of a direction.
    async fn trial(&self, direction: Direction, place: &Place) -> Result<(), Failure> {
        match direction {
            Direction::Read => match place.store.head(&self.names.manifest()).await {
                Ok(_) => Ok(()),
                Err(error) => Err(Failure::of(&error)),
            },
            Direction::Write => self.probes.try_out(&place.store).await.map(drop),
        }
    }
}
