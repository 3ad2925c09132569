//! Listings of the whole namespace in the background: a page of a thousand names costs no more
//! than the question for one key.

use core::time::Duration;
use std::time::Instant;

use futures_util::StreamExt;
use futures_util::future::join_all;
use object_store::path::Path;

use crate::io::Direction;
use crate::metrics::count;
use crate::object::names::{FAN_OUTS, parse_row};
use crate::object::{Fact, Failure, HEADER_BYTES};
use crate::sys::sync::{Arc, lock};
use crate::tier::object::dispatch::Ended;
use crate::tier::object::{ObjectTier, Place};

/// Names of a page, as servers cut them.
const PAGE_NAMES: usize = 1000;
/// Names that are read one page after the other; with more the rest is read in parts side by side.
const ALONE_NAMES: usize = 4 * PAGE_NAMES;
/// Parts that are read side by side.
const PARTS: u32 = 8;
/// Names that are noted at once.
const BATCH_NAMES: usize = 256;
/// Listings take at most one part in so many of all time.
const REST: u32 = 20;

/// How a part of a listing ended.
enum Part {
    /// All of it was read.
    Whole,
    /// It was cut here, in this fan-out.
    Cut(u32),
    /// It failed, or the tier stops, or there are too many names.
    Failed,
}

impl ObjectTier {
    /// Lists again and again while anybody looks keys up; runs until the tier stops.
    pub(super) async fn list_all(self: Arc<Self>) {
        loop {
            let begun = self.around.clock.now();
            let place = {
                let mut state = lock(&self.state);
                let wanted = state.looked_up && !self.health.refuses(Direction::Read);
                let place = state.serving().filter(|_| wanted).map(Arc::clone);
                // Until the bucket is in use it stays wanted.
                state.looked_up &= place.is_none();
                place
            };
            let pause = if let Some(place) = place {
                let listed = self.survive(self.list_place(&place, begun)).await;
                if listed == Some(true) {
                    self.note_listed(&place, begun);
                }
                let took = self.around.clock.now().saturating_duration_since(begun);
                let pause = took.saturating_mul(REST);
                pause.max(self.options.limits.list_every)
            } else {
                Duration::from_secs(1)
            };
            let until = self.around.clock.now().checked_add(pause).unwrap_or(begun);
            // Lookups after a long silence are answered by HEAD, and begin the next listing.
            let wake = async {
                if pause.as_secs() <= 1 {
                    self.list.notified().await;
                } else {
                    core::future::pending::<()>().await;
                }
            };
            if let Ended::Stopped = self.until(until, wake).await {
                return;
            }
        }
    }

    fn note_listed(&self, place: &Place, begun: Instant) {
        self.counters.complete_listings.add(1);
        let mut state = lock(&self.state);
        if state.place.as_ref().map(|place| place.epoch) == Some(place.epoch) {
            state.listed_at = Some(begun);
        }
    }

    /// Reads all names of the place's epoch; says whether it reached the end.
    async fn list_place(&self, place: &Arc<Place>, begun: Instant) -> bool {
        let first = self.list_part(place, 0, FAN_OUTS, ALONE_NAMES, begun).await;
        let from = match first {
            Part::Whole => return true,
            Part::Failed => return false,
            Part::Cut(fan_out) => fan_out,
        };
        let names_max = self
            .options
            .limits
            .list_pages_max
            .saturating_mul(PAGE_NAMES);
        let per_part = names_max / usize::try_from(PARTS).unwrap_or(1);
        let each = FAN_OUTS.saturating_sub(from).div_ceil(PARTS).max(1);
        let parts = (0..PARTS).map(|part| {
            let start = from.saturating_add(part.saturating_mul(each)).min(FAN_OUTS);
            let end = start.saturating_add(each).min(FAN_OUTS);
            self.list_part(place, start, end, per_part, begun)
        });
        let ended = join_all(parts).await;
        ended.iter().all(|part| matches!(part, Part::Whole))
    }

    /// Reads the names in the fan-outs from `start` to before `end`, `names_max` at most.
    async fn list_part(
        &self,
        place: &Arc<Place>,
        start: u32,
        end: u32,
        names_max: usize,
        begun: Instant,
    ) -> Part {
        if start >= end {
            return Part::Whole;
        }
        let rows = self.names.rows_of(place.epoch);
        let stream = if start == 0 {
            place.store.list(Some(&rows))
        } else {
            let after = self.names.before_fan_out(place.epoch, start);
            place.store.list_with_offset(Some(&rows), &after)
        };
        // As many as are there already, so that the lock is taken for many at once.
        let mut batches = stream.ready_chunks(BATCH_NAMES);
        let mut names = 0_usize;
        loop {
            let now = self.around.clock.now();
            let late = now.checked_add(self.options.deadline).unwrap_or(now);
            let batch = match self.until(late, batches.next()).await {
                Ended::Done(Some(batch)) => batch,
                Ended::Done(None) => return Part::Whole,
                Ended::Late => return self.list_failed(&Failure::late(), &rows),
                Ended::Stopped => return Part::Failed,
            };
            let (mut found, mut fan_out, mut past) =
                (Vec::with_capacity(batch.len()), start, false);
            for meta in batch {
                let meta = match meta {
                    Ok(meta) => meta,
                    Err(error) => return self.list_failed(&Failure::of(&error), &rows),
                };
                names = names.saturating_add(1);
                let Some((own, key)) = parse_row(meta.location.as_ref()) else {
                    continue;
                };
                past = own >= end;
                if past {
                    break;
                }
                fan_out = own;
                let bytes = self.row_bytes.get(&key.group());
                let whole = bytes.map(|bytes| count(*bytes).saturating_add(count(HEADER_BYTES)));
                if whole == Some(meta.size) {
                    found.push(self.fingerprinter.of(&key).half());
                }
            }
            self.note_names(place, &found, begun);
            if past {
                return Part::Whole;
            }
            if names >= names_max {
                return Part::Cut(fan_out);
            }
        }
    }

    fn list_failed(&self, failure: &Failure, rows: &Path) -> Part {
        self.server_failed(Direction::Read, failure, "list", rows.as_ref());
        Part::Failed
    }

    fn note_names(&self, place: &Place, found: &[u64], begun: Instant) {
        self.counters.listed_names.add(count(found.len()));
        let now = self.around.clock.now();
        let state = lock(&self.state);
        // After a reset the names of the old epoch say nothing.
        if state.place.as_ref().map(|place| place.epoch) == Some(place.epoch) && !state.reset_failed
        {
            let found_for = self.options.limits.found_for;
            let shown = |of: &&u64| !state.hides(**of, now, found_for);
            for of in found.iter().filter(shown) {
                self.verdicts.answer(*of, Fact::Listed, begun, now);
            }
        }
    }
}
