//! Whether a tier can be used: it is ready, its root cannot be used yet, or it is closed.

use core::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::job::{JobId, JobKind};
use crate::key::Key;
use crate::sys::sync::{Arc, Mutex, lock};
use crate::tier::disk::DiskTier;
use crate::tier::pending::Pending;
use crate::tier::phase::closed;
use crate::tier::served::Served;

/// The tier behind the one that its user sees, as far as there is one.
#[derive(Debug)]
pub(super) struct Availability(Mutex<Now>);

#[derive(Debug)]
enum Now {
    /// The root is in use.
    Ready(Arc<dyn Served>),
    /// The root could not be used yet; a thread tries again and again.
    Pending(Arc<Pending>),
    /// Closed: `Some` while the kernel still owns arena bytes.
    Closed(Option<Arc<dyn Served>>),
}

/// What a call finds.
pub(super) enum Found {
    Ready(Arc<dyn Served>),
    Pending,
}

impl Availability {
    /// A tier that is open.
    pub(super) fn ready(tier: Arc<dyn Served>) -> Self {
        Self(Mutex::new(Now::Ready(tier)))
    }

    /// A tier whose root cannot be used yet.
    pub(super) fn pending(pending: Arc<Pending>) -> Self {
        Self(Mutex::new(Now::Pending(pending)))
    }

    /// The tier, if its root is in use by now.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`].
    pub(super) fn find(&self) -> Result<Found> {
        let mut now = lock(&self.0);
        if let Now::Pending(pending) = &*now {
            let Some(tier) = pending.take() else {
                return Ok(Found::Pending);
            };
            *now = Now::Ready(tier);
        }
        match &*now {
            Now::Ready(tier) => Ok(Found::Ready(Arc::clone(tier))),
            Now::Pending(_) | Now::Closed(_) => Err(closed()),
        }
    }

    /// The attempts to open a root that could not be used when a call looked; `None` where it can
    /// be meanwhile, or the tier is closed.
    pub(super) fn attempts(&self) -> Option<Arc<Pending>> {
        match &*lock(&self.0) {
            Now::Pending(pending) => Some(Arc::clone(pending)),
            Now::Ready(_) | Now::Closed(_) => None,
        }
    }

    /// Begins a job of a tier whose root could not be used when the call looked.
    ///
    /// # Errors
    /// As the open tier's.
    pub(super) fn begin_late(
        &self,
        job_id: JobId,
        kind: JobKind,
        keys: &[Key],
        offsets: &[u64],
    ) -> Result<()> {
        match &*lock(&self.0) {
            Now::Pending(pending) => pending.refuse(job_id, kind, keys, offsets),
            Now::Ready(tier) => match kind {
                JobKind::Store => tier.store(job_id, keys, offsets),
                JobKind::Load => tier.load(job_id, keys, offsets),
            },
            Now::Closed(_) => Err(closed()),
        }
    }

    /// Closes what is open. After success it does nothing; after `Busy` it tries again.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] while the kernel still owns arena bytes.
    pub(super) fn close(&self, timeout: Duration) -> Result<()> {
        let tier = {
            let mut now = lock(&self.0);
            let tier = match core::mem::replace(&mut *now, Now::Closed(None)) {
                Now::Ready(tier) => Some(tier),
                Now::Pending(pending) => pending.stop().map(served),
                Now::Closed(stuck) => stuck,
            };
            *now = Now::Closed(tier.clone());
            tier
        };
        let Some(tier) = tier else {
            return Ok(());
        };
        let closed = tier.close(timeout);
        if closed.as_ref().map_err(Error::kind) != Err(ErrorKind::Busy) {
            *lock(&self.0) = Now::Closed(None);
        }
        closed
    }
}

/// A disk tier as any tier.
fn served(tier: Arc<DiskTier>) -> Arc<dyn Served> {
    tier
}
