//! Removals: hidden at once, deleted in the background.

use hashbrown::HashSet;
use object_store::ObjectStoreExt;

use crate::error::Result;
use crate::io::Direction;
use crate::job::Outcome;
use crate::key::Key;
use crate::object::{Fact, Failure, FailureKind};
use crate::sys::sync::{Arc, lock};
use crate::tier::object::ObjectTier;
use crate::tier::object::dispatch::Ended;
use crate::tier::object::state::Work;
use crate::tier::state::Phase;

impl ObjectTier {
    /// Hides keys at once; stores of them under way end as dropped.
    pub(super) fn hide(self: &Arc<Self>, keys: &[Key]) -> Result<()> {
        let now = self.around.clock.now();
        let mut state = self.open_state()?;
        let Some(place) = state.place.clone() else {
            return Ok(());
        };
        for key in keys {
            let of = self.fingerprinter.of(key);
            self.verdicts.note(of.half(), Fact::Absent, now);
            if let Some(storing) = state.storing.get_mut(&of.half()) {
                storing.cancelled = true;
            }
            state.delete_later(&place, of, *key);
        }
        if !state.writes.is_empty() {
            let gone: HashSet<Key> = keys.iter().copied().collect();
            let queued = state.take_queued(|work| {
                work.request.kind == crate::job::JobKind::Store && gone.contains(&work.item.key)
            });
            self.settle_queued(&mut state, &queued, |_| Outcome::Dropped, "removed");
        }
        drop(state);
        self.begin_deleting();
        Ok(())
    }

    /// Sees to it that objects in line are deleted.
    pub(super) fn begin_deleting(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        if state.to_delete.is_empty() || state.deleting || state.phase == Phase::Stopping {
            return;
        }
        state.deleting = true;
        drop(state);
        self.handle.spawn(self.shared().delete_all());
    }

    /// Waits until the object of a key is not being deleted, so that what is stored next stays.
    pub(super) async fn until_deleted(&self, work: &Work) -> Ended<()> {
        let of = work.item.fingerprint.half();
        let over = async {
            loop {
                let next = self.deleted.notified();
                if lock(&self.state).being_deleted != Some(of) {
                    return;
                }
                next.await;
            }
        };
        self.until(work.request.deadline, over).await
    }

    async fn delete_all(self: Arc<Self>) {
        loop {
            let (place, key) = {
                let mut state = lock(&self.state);
                let next = state.to_delete.pop_first();
                state.being_deleted = next.as_ref().map(|(of, _)| *of);
                self.deleted.notify_waiters();
                let Some((_, next)) = next else {
                    state.deleting = false;
                    return;
                };
                next
            };
            let path = self.names.row(place.epoch, &key);
            let now = self.around.clock.now();
            let late = now.checked_add(self.options.deadline).unwrap_or(now);
            let failure = match self.until(late, place.store.delete(&path)).await {
                Ended::Done(Ok(())) => continue,
                Ended::Done(Err(error)) => Failure::of(&error),
                Ended::Late => Failure::late(),
                Ended::Stopped => return,
            };
            if failure.kind != FailureKind::Missing {
                self.server_failed(Direction::Write, &failure, "delete", path.as_ref());
            }
        }
    }
}
