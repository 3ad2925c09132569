//! Requests that the tier is told of. Nothing is evicted here, but which rows are stored may depend on
//! them.

use std::collections::HashSet;

use crate::error::Result;
use crate::eviction::Class;
use crate::eviction::admission::Admission;
use crate::eviction::request::{Arrival, Context, RequestId, Tag};
use crate::key::Key;
use crate::sys::sync::lock;
use crate::tier::object::ObjectTier;
use crate::tier::request::Item;

/// Most requests whose end is awaited; beyond it all count as ended.
const OPEN_MAX: usize = 1 << 16;

/// What is known of requests.
#[derive(Debug)]
pub(super) struct Told {
    admission: Admission,
    open: HashSet<String>,
    requests: u64,
}

impl Told {
    pub(super) fn new(admission: Admission) -> Self {
        Self {
            admission,
            open: HashSet::new(),
            requests: 0,
        }
    }
}

impl ObjectTier {
    /// See [`Tier::observe`](crate::tier::Tier::observe).
    pub(super) fn observe(&self, id: &str, keys: &[Key], context: Context) -> Result<()> {
        drop(self.open_state()?);
        let mut told = lock(&self.told);
        if told.admission.takes_all() || told.open.contains(id) {
            return Ok(());
        }
        if told.open.len() >= OPEN_MAX {
            told.open.clear();
        }
        told.open.insert(id.to_owned());
        told.requests = told.requests.wrapping_add(1);
        let now = self.around.clock.now();
        let since = now.saturating_duration_since(self.began);
        let milliseconds = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        told.admission.set_time(milliseconds);
        for (class, group) in (0_u16..).map(Class).zip(self.row_bytes.keys()) {
            let own = keys.iter().filter(|key| key.group() == *group);
            let tags: Vec<Tag> = own.map(|key| self.fingerprinter.of(key).tag()).collect();
            if tags.is_empty() {
                continue;
            }
            let arrival = Arrival {
                id: RequestId(told.requests),
                class,
                tags: &tags,
                context,
            };
            told.admission.observe(&arrival);
        }
        Ok(())
    }

    /// See [`Tier::finish`](crate::tier::Tier::finish).
    pub(super) fn finish(&self, id: &str) -> Result<()> {
        drop(self.open_state()?);
        lock(&self.told).open.remove(id);
        Ok(())
    }

    /// Which rows of a store are taken, by position.
    pub(super) fn admitted(&self, items: &[Item]) -> Vec<bool> {
        let mut told = lock(&self.told);
        if told.admission.takes_all() {
            return vec![true; items.len()];
        }
        let tags = items.iter().map(|item| item.fingerprint.tag());
        told.admission.offered(tags.clone());
        tags.map(|tag| told.admission.admits(tag, None)).collect()
    }
}
