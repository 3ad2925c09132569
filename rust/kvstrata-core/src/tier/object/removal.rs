//! Removals: hidden at once, deleted in the background.

use hashbrown::HashSet;
use object_store::ObjectStoreExt;

use crate::error::Result;
use crate::job::{JobKind, Outcome};
use crate::key::Key;
use crate::metrics::count;
use crate::notice::Level;
use crate::object::{Fact, Failure, FailureKind};
use crate::sys::sync::{Arc, lock};
use crate::tier::last_error::{LastError, tail};
use crate::tier::object::ObjectTier;
use crate::tier::object::deletions::{Deletion, Next};
use crate::tier::object::dispatch::Ended;
use crate::tier::object::state::Work;
use crate::tier::phase::Phase;

impl ObjectTier {
    /// Hides keys at once; stores of them under way end as dropped.
    pub(super) fn hide(self: &Arc<Self>, keys: &[Key]) -> Result<()> {
        let now = self.around.clock.now();
        let mut state = self.open_state()?;
        let place = state.place.clone();
        let mut left_out = 0_usize;
        for key in keys {
            let of = self.fingerprinter.of(key).half();
            self.verdicts.note(of, Fact::Absent, now);
            state.note_removed(of);
            let added = match &place {
                Some(place) => state.deletions.add(of, place, *key),
                None => state.deletions.add_early(of, *key),
            };
            if !added {
                left_out = left_out.saturating_add(1);
            }
        }
        if !state.writes.is_empty() {
            let gone: HashSet<Key> = keys.iter().copied().collect();
            let queued = state.take_queued(|work| {
                work.request.kind == JobKind::Store && gone.contains(&work.item.key)
            });
            self.settle_queued(&mut state, &queued, |_| Outcome::Dropped, "removed");
        }
        drop(state);
        if left_out > 0 {
            self.counters.deletions_left_out.add(count(left_out));
            self.around.notices.say(Level::Warning, "removal", || {
                format!("too many removed rows wait: {left_out} stay in the bucket")
            });
        }
        self.begin_deleting();
        Ok(())
    }

    /// Sees to it that objects in line are deleted.
    pub(super) fn begin_deleting(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        if state.phase == Phase::Stopping {
            return;
        }
        let more = state.deletions.begin_tasks();
        drop(state);
        for _ in 0..more {
            self.handle.spawn(self.shared().delete_some());
        }
    }

    /// Waits until the object of a key is not being deleted, so that what is stored next stays, and
    /// sees to it that it will not be. Says whether it was to be.
    pub(super) async fn until_deleted(&self, work: &Work) -> Ended<bool> {
        let of = work.item.fingerprint.half();
        let over = async {
            loop {
                let next = self.deleted.notified();
                {
                    let mut state = lock(&self.state);
                    if !state.deletions.is_under_way(of) {
                        return state.deletions.cancel(of);
                    }
                }
                next.await;
            }
        };
        self.until(work.request.deadline, over).await
    }

    async fn delete_some(self: Arc<Self>) {
        loop {
            let now = self.around.clock.now();
            let next = lock(&self.state).deletions.next(now);
            let deletion = match next {
                Next::Delete(deletion) => deletion,
                Next::At(time) => {
                    let pause = core::future::pending::<()>();
                    if let Ended::Stopped = self.until(time, pause).await {
                        return;
                    }
                    continue;
                }
                Next::Nothing => {
                    self.quiet.notify_all();
                    return;
                }
            };
            let Some(failure) = self.delete_one(&deletion).await else {
                return;
            };
            let now = self.around.clock.now();
            let gone = failure.is_none();
            {
                let mut state = lock(&self.state);
                if state.deletions.end(&deletion, gone, now) {
                    // A listing that began before may still name it.
                    self.verdicts.note(deletion.of, Fact::Absent, now);
                }
            }
            self.deleted.notify_waiters();
            if let Some(failure) = failure {
                self.say_not_deleted(&deletion, &failure);
            } else {
                self.begin_deleting();
            }
        }
    }

    /// What went wrong with a deletion; `None` when the tier stops.
    async fn delete_one(&self, deletion: &Deletion) -> Option<Option<Failure>> {
        let path = self.names.row(deletion.place.epoch, &deletion.key);
        let now = self.around.clock.now();
        let late = now.checked_add(self.options.deadline).unwrap_or(now);
        let delete = deletion.place.store.delete(&path);
        let failure = match self.until(late, delete).await {
            Ended::Done(Ok(())) => return Some(None),
            Ended::Done(Err(error)) => Failure::of(&error),
            Ended::Late => Failure::late(),
            Ended::Stopped => return None,
        };
        Some(Some(failure).filter(|failure| failure.kind != FailureKind::Missing))
    }

    /// Reports a deletion that failed. It says nothing of stores: no circuit opens for it.
    fn say_not_deleted(&self, deletion: &Deletion, failure: &Failure) {
        let path = self.names.row(deletion.place.epoch, &deletion.key);
        let name = tail(std::path::Path::new(path.as_ref()));
        self.counters.failed_deletions.add(1);
        self.around.metrics.errors.add(1);
        self.around.notices.say(Level::Warning, "deletion", || {
            format!("a removed row, {name}, is hidden and not deleted yet ({failure})")
        });
        self.health.remember(LastError {
            errno: failure.kind.name(),
            operation: "delete",
            path: name,
            text: failure.text.clone(),
            at: self.around.clock.now(),
        });
    }

    /// Says how many removed rows this process leaves in the bucket.
    pub(super) fn say_left(&self, rows: usize) {
        if rows > 0 {
            self.around.notices.say(Level::Warning, "removal", || {
                format!("{rows} removed rows could not be deleted: others may still find them")
            });
        }
    }
}
