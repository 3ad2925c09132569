//! Lookups: answered from what is believed; what is not known is asked for in the background.

use std::time::Instant;

use crate::error::Result;
use crate::io::Direction;
use crate::key::Key;
use crate::metrics::count;
use crate::object::{Fact, FailureKind, transfer};
use crate::sys::sync::{Arc, lock};
use crate::tier::object::dispatch::Ended;
use crate::tier::object::state::{Asked, State};
use crate::tier::object::{ObjectTier, Place};

impl ObjectTier {
    /// Answers for each key whether a row is there; `None`: not known yet. Never waits.
    pub(super) fn look_up(self: &Arc<Self>, keys: &[Key]) -> Result<Vec<Option<bool>>> {
        let of: Vec<u64> = keys
            .iter()
            .map(|key| self.fingerprinter.of(key).half())
            .collect();
        let now = self.around.clock.now();
        let refused = self.health.refuses(Direction::Read);
        let facts = self.verdicts.look(&of, now);
        let mut state = self.open_state()?;
        let metrics = &self.around.metrics;
        metrics.lookups.add(count(keys.len()));
        if refused || state.serving().is_none() {
            if refused {
                metrics.circuit_missed_lookups.add(count(keys.len()));
            }
            return Ok(vec![Some(false); keys.len()]);
        }
        let first = !state.looked_up;
        state.looked_up = true;
        // A key that a listing of everything has not seen was not there when it began.
        let all_listed = state
            .listed_at
            .is_some_and(|at| now.saturating_duration_since(at) < self.options.limits.absent_for);
        let found_for = self.options.limits.found_for;
        let (mut hits, mut unknown, mut late) = (0_usize, 0_usize, 0_usize);
        let mut found = Vec::with_capacity(keys.len());
        for ((key, of), fact) in keys.iter().zip(&of).zip(facts) {
            found.push(match fact {
                Some(Fact::Absent) => Some(false),
                Some(Fact::Listed | Fact::Verified) => {
                    hits = hits.saturating_add(1);
                    Some(true)
                }
                None if all_listed || state.hides(*of, now, found_for) => Some(false),
                None if self.has_asked_long(&mut state, key, *of, now) => {
                    late = late.saturating_add(1);
                    Some(false)
                }
                None => {
                    unknown = unknown.saturating_add(1);
                    None
                }
            });
        }
        let asking = !state.to_ask.is_empty();
        drop(state);
        metrics.lookup_hits.add(count(hits));
        self.counters.late_lookups.add(count(late));
        self.counters.unknown_lookups.add(count(unknown));
        if first {
            self.list.notify_one();
        }
        if asking {
            self.pump();
        }
        Ok(found)
    }

    /// Whether the answer for a key of which nothing is known is not to be waited for any longer;
    /// where nobody has asked for it yet, someone is going to.
    fn has_asked_long(&self, state: &mut State, key: &Key, of: u64, now: Instant) -> bool {
        let limits = &self.options.limits;
        if let Some(asked) = state.asked.get(&of) {
            return now.saturating_duration_since(asked.since) >= limits.lookup_wait;
        }
        if state.asked.len() >= limits.asked_max {
            return true;
        }
        let asked = Asked {
            key: *key,
            since: now,
            under_way: false,
        };
        state.asked.insert(of, asked);
        state.to_ask.push_back(of);
        false
    }

    /// Asks the server for one key.
    pub(super) async fn ask(self: Arc<Self>, of: u64, key: Key, place: Arc<Place>) {
        let asked = self.around.clock.now();
        let row_bytes = self.row_bytes.get(&key.group()).copied();
        let known = self.verdicts.of(of, asked);
        if let Some(row_bytes) = row_bytes.filter(|_| known.is_none()) {
            let path = self.names.row(place.epoch, &key);
            let deadline = asked.checked_add(self.options.deadline).unwrap_or(asked);
            self.counters.head_requests.add(1);
            let head = transfer::is_there(&place.store, &path, row_bytes);
            let answer = match self.until(deadline, head).await {
                Ended::Done(answer) => answer,
                Ended::Late => Err(crate::object::Failure::late()),
                Ended::Stopped => return,
            };
            let fact = match answer {
                Ok(there) => {
                    self.health.succeed(Direction::Read);
                    if there { Fact::Listed } else { Fact::Absent }
                }
                Err(failure) => {
                    if failure.kind == FailureKind::Denied {
                        self.counters.denied_reads.add(1);
                    }
                    self.server_failed(Direction::Read, &failure, "head", path.as_ref());
                    Fact::Absent
                }
            };
            let state = lock(&self.state);
            let current = state.place.as_ref().map(|place| place.epoch) == Some(place.epoch);
            if current && !state.reset_failed {
                let now = self.around.clock.now();
                let hidden = state.hides(of, now, self.options.limits.found_for);
                let fact = if hidden { Fact::Absent } else { fact };
                self.verdicts.answer(of, fact, asked, now);
            }
        } else if row_bytes.is_none() {
            self.verdicts.answer(of, Fact::Absent, asked, asked);
        }
        let mut state = lock(&self.state);
        state.asked.remove(&of);
        state.questions = state.questions.saturating_sub(1);
        drop(state);
        self.pump();
    }
}
