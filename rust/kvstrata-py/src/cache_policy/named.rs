//! The order of the policy of some name.

use std::time::Instant;

use kvstrata_core::eviction::request::{EndedKey, Tag};
use kvstrata_core::eviction::{Class, ContainerId, EntryId, EvictionPolicy, Placement, create};
use kvstrata_core::sys::clock::{Clock as _, SystemClock};
use pyo3::prelude::*;

use super::keys::{Keys, Use, Uses, bound, is_free, tag};
use crate::arguments::{self as named, Deferred, Flag, Objects, Size, Text};
use crate::error::raised;

const PLACEMENT: Placement = Placement {
    class: Class(0),
    container: ContainerId(0),
};

/// The order in which chunks go.
///
/// Of keys that are inserted in a row with ``tail_first`` the last is the oldest. ``chunks``: what
/// is there, by key. ``kept`` and ``freed``: append a key that is to stay from now on, and one that
/// may go again, as often as it was kept.
#[pyclass(module = "kvstrata")]
pub(crate) struct CacheOrder {
    policy: Box<dyn EvictionPolicy>,
    keys: Keys,
    uses: Uses,
    tail_first: bool,
    /// Inserted and not told to the policy yet: a batch comes head first, and its tail is to be
    /// the oldest.
    inserted: Vec<(u32, Tag, bool)>,
    start: Instant,
}

#[pymethods]
impl CacheOrder {
    /// An empty order for so many chunks.
    ///
    /// Raises ``ConfigError`` for a policy that is not known.
    #[new]
    fn new(
        py: Python<'_>,
        policy: Deferred<Text<named::Policy>>,
        capacity: Deferred<Size<named::Blocks>>,
        tail_first: Deferred<Flag<named::TailFirst>>,
    ) -> PyResult<Self> {
        let (capacity, tail_first) = (capacity.value()?, tail_first.value()?);
        let mut policy = create(&policy.value()?).map_err(|error| raised(py, &error))?;
        policy.set_capacity(capacity);
        Ok(Self {
            policy,
            keys: Keys::new(py, capacity),
            uses: Uses::new(py),
            tail_first,
            inserted: Vec::new(),
            start: SystemClock.now(),
        })
    }

    #[getter]
    fn chunks(&self, py: Python<'_>) -> Py<PyAny> {
        self.keys.chunks(py)
    }

    #[getter]
    fn kept(&self, py: Python<'_>) -> Py<PyAny> {
        self.uses.kept(py)
    }

    #[getter]
    fn freed(&self, py: Python<'_>) -> Py<PyAny> {
        self.uses.freed(py)
    }

    /// Adds a key with its chunk. Of the request nothing is used.
    #[pyo3(signature = (key, chunk, req_context=None))]
    fn insert(
        &mut self,
        key: &Bound<'_, PyAny>,
        chunk: &Bound<'_, PyAny>,
        req_context: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _ = req_context;
        if !self.uses.is_empty(key.py()) {
            // Of keys in the row before, too: the policy has to know them first.
            self.flush(key.py())?;
        }
        let free = is_free(chunk)?;
        let (number, tag) = self.keys.insert(key, chunk)?;
        if self.tail_first {
            self.inserted.push((number, tag, free));
        } else {
            self.tell(number, tag, free);
        }
        Ok(())
    }

    /// Forgets a key.
    ///
    /// Raises ``KeyError`` if it is not there.
    fn remove(&mut self, key: &Bound<'_, PyAny>) -> PyResult<()> {
        self.flush(key.py())?;
        let number = self.keys.require(key)?;
        self.policy.remove(EntryId(number));
        self.keys.forget(key.py(), number)?;
        Ok(())
    }

    /// Counts an access to keys in token order; those that are not there are passed.
    fn touch(&mut self, py: Python<'_>, keys: Deferred<Objects<named::AllKeys>>) -> PyResult<()> {
        let keys = bound(py, keys)?;
        self.flush(py)?;
        self.set_time();
        let found = self.keys.numbers(&keys)?;
        let found: Vec<EntryId> = found.into_iter().map(EntryId).collect();
        self.policy.access_request(&found);
        Ok(())
    }

    /// Says that keys, in token order, are not there and are about to be inserted.
    fn miss(&mut self, py: Python<'_>, keys: Deferred<Objects<named::AllKeys>>) -> PyResult<()> {
        let keys = bound(py, keys)?;
        self.flush(py)?;
        let tags = keys.iter().map(tag).collect::<PyResult<Vec<Tag>>>()?;
        self.policy.missed(&tags);
        Ok(())
    }

    /// Says that a request has ended that had these keys, in token order.
    ///
    /// It stored some of them and used others.
    fn end(
        &mut self,
        keys: Deferred<Objects<named::AllKeys>>,
        stored: &Bound<'_, PyAny>,
        used: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let keys = bound(used.py(), keys)?;
        self.flush(used.py())?;
        self.set_time();
        let any_stored = stored.len()? > 0;
        let any_used = used.len()? > 0;
        let mut ended = Vec::with_capacity(keys.len());
        for key in &keys {
            let (own, used) = (tag(key)?, any_used && used.contains(key)?);
            ended.push(EndedKey {
                tag: own,
                entry: self.keys.find(key, own).map(EntryId),
                stored: any_stored && !used && stored.contains(key)?,
                used,
            });
        }
        self.policy.ended(PLACEMENT.class, &ended);
        Ok(())
    }

    /// Takes out exactly ``n`` keys that may go and are not protected, coldest first.
    ///
    /// They are returned with their chunks. Where there are fewer, none is taken out, and it
    /// returns ``None``.
    fn evict<'py>(
        &mut self,
        py: Python<'py>,
        n: Deferred<Size<named::Victims>>,
        protected: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
        let n = n.value()?;
        self.flush(py)?;
        self.set_time();
        let keys = &self.keys;
        let stays = |entry: EntryId| keys.is_in(entry.0, protected);
        let mut victims = Vec::with_capacity(n.min(self.keys.len()));
        if !self.policy.evict(n, PLACEMENT.class, &stays, &mut victims) {
            return Ok(None);
        }
        let victims = victims.into_iter().map(|victim| victim.0);
        self.keys.evicted(py, victims).map(Some)
    }

    /// Bytes of memory of the policy.
    fn memory_bytes(&self) -> usize {
        self.policy.memory_bytes()
    }
}

impl CacheOrder {
    fn tell(&mut self, number: u32, tag: Tag, free: bool) {
        self.policy.insert(EntryId(number), tag, PLACEMENT);
        if !free {
            self.policy.pin(EntryId(number));
        }
    }

    /// Tells the policy what it was not told yet.
    fn flush(&mut self, py: Python<'_>) -> PyResult<()> {
        if !self.inserted.is_empty() {
            let inserted = core::mem::take(&mut self.inserted);
            for (number, tag, free) in inserted.into_iter().rev() {
                self.tell(number, tag, free);
            }
        }
        self.take_uses(py)
    }

    fn take_uses(&mut self, py: Python<'_>) -> PyResult<()> {
        let policy = &mut self.policy;
        self.uses.take(py, &self.keys, |what, number| match what {
            Use::Kept => policy.pin(EntryId(number)),
            Use::Freed => policy.unpin(EntryId(number)),
        })
    }

    fn set_time(&mut self) {
        let since = SystemClock.now().saturating_duration_since(self.start);
        let milliseconds = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        self.policy.set_time(milliseconds);
    }
}
