//! An eviction policy as a cache policy of vLLM's managers uses one: by key.

use std::time::Instant;

use kvstrata_core::error::ErrorKind;
use kvstrata_core::eviction::ranked::Ranked;
use kvstrata_core::eviction::request::{EndedKey, Tag};
use kvstrata_core::eviction::{Class, ContainerId, EntryId, EvictionPolicy, Placement, create};
use kvstrata_core::sys::clock::{Clock as _, SystemClock};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{exception, raised};

const PLACEMENT: Placement = Placement {
    class: Class(0),
    container: ContainerId(0),
};

/// Keys by the numbers of their chunks, and back.
struct Keys {
    capacity: usize,
    numbers: Py<PyDict>,
    by_number: Vec<Option<Py<PyAny>>>,
}

impl Keys {
    fn new(py: Python<'_>, capacity: usize) -> Self {
        Self {
            capacity,
            numbers: PyDict::new(py).unbind(),
            by_number: Vec::new(),
        }
    }

    fn insert(&mut self, key: &Bound<'_, PyAny>, number: u32) -> PyResult<()> {
        let at = place_of(number);
        let taken = self.by_number.get(at).is_some_and(Option::is_some);
        if taken || at >= self.capacity {
            let text = format!("chunk {number} is not free");
            return Err(exception(key.py(), ErrorKind::Argument, text));
        }
        if self.by_number.len() <= at {
            self.by_number.resize_with(at + 1, || None);
        }
        self.numbers.bind(key.py()).set_item(key, number)?;
        if let Some(place) = self.by_number.get_mut(at) {
            *place = Some(key.clone().unbind());
        }
        Ok(())
    }

    fn number(&self, key: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
        let found = self.numbers.bind(key.py()).get_item(key)?;
        found.map(|number| number.extract()).transpose()
    }

    fn numbers(&self, keys: &[Bound<'_, PyAny>]) -> PyResult<Vec<u32>> {
        let mut found = Vec::with_capacity(keys.len());
        for key in keys {
            found.extend(self.number(key)?);
        }
        Ok(found)
    }

    fn is_in(&self, number: u32, set: &Bound<'_, PyAny>) -> bool {
        let key = self.by_number.get(place_of(number));
        // What cannot be told is.
        key.and_then(Option::as_ref)
            .is_none_or(|key| set.contains(key).unwrap_or(true))
    }

    fn forget(&mut self, py: Python<'_>, number: u32) -> PyResult<Option<Py<PyAny>>> {
        let place = self.by_number.get_mut(place_of(number));
        let key = place.and_then(Option::take);
        if let Some(key) = &key {
            self.numbers.bind(py).del_item(key)?;
        }
        Ok(key)
    }

    fn forget_all(&mut self, py: Python<'_>, numbers: Vec<u32>) -> PyResult<Vec<Py<PyAny>>> {
        let mut keys = Vec::with_capacity(numbers.len());
        for number in numbers {
            keys.extend(self.forget(py, number)?);
        }
        Ok(keys)
    }
}

/// The order of vLLM's LRU, in its place.
///
/// Keys are known by the number of their chunk, which must be different for each key that is
/// there.
#[pyclass(module = "kvstrata")]
pub(crate) struct LruOrder {
    keys: Keys,
    order: Ranked,
}

#[pymethods]
impl LruOrder {
    /// An empty order for so many chunks.
    #[new]
    fn new(py: Python<'_>, capacity: usize) -> Self {
        Self {
            keys: Keys::new(py, capacity),
            order: Ranked::new(),
        }
    }

    /// The next rank, of a request that begins.
    fn next_rank(&mut self) -> u64 {
        self.order.next_rank()
    }

    /// Adds a key; ``free`` says whether it may go.
    ///
    /// With a position in its request it has the request's rank, without one it is the latest of
    /// all.
    #[pyo3(signature = (key, number, free, rank=0, position=None))]
    fn insert(
        &mut self,
        key: &Bound<'_, PyAny>,
        number: u32,
        free: bool,
        rank: u64,
        position: Option<u32>,
    ) -> PyResult<()> {
        self.keys.insert(key, number)?;
        let place = position.map(|position| (rank, position));
        self.order.insert(number, place, free);
        Ok(())
    }

    /// Gives a key the rank of a request, unless it has a later one.
    fn raise_to(&mut self, key: &Bound<'_, PyAny>, rank: u64, position: u32) -> PyResult<()> {
        if let Some(number) = self.keys.number(key)? {
            self.order.raise(number, rank, position);
        }
        Ok(())
    }

    /// Makes keys, in token order, the latest ones; those that are not there are passed.
    fn touch(&mut self, keys: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        let found = self.keys.numbers(&keys)?;
        self.order.renew(&found);
        Ok(())
    }

    /// Forgets a key.
    fn remove(&mut self, key: &Bound<'_, PyAny>) -> PyResult<()> {
        if let Some(number) = self.keys.number(key)? {
            self.order.remove(number);
            self.keys.forget(key.py(), number)?;
        }
        Ok(())
    }

    /// Lets a key go from now on.
    fn free(&mut self, key: &Bound<'_, PyAny>) -> PyResult<()> {
        if let Some(number) = self.keys.number(key)? {
            self.order.set_free(number, true);
        }
        Ok(())
    }

    /// Keeps a key until it is freed.
    fn keep(&mut self, key: &Bound<'_, PyAny>) -> PyResult<()> {
        if let Some(number) = self.keys.number(key)? {
            self.order.set_free(number, false);
        }
        Ok(())
    }

    /// Takes out exactly ``count`` keys that may go and are not protected, coldest first.
    ///
    /// Where there are fewer, none is taken out, and it returns ``None``.
    fn evict(
        &mut self,
        py: Python<'_>,
        count: usize,
        protected: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Vec<Py<PyAny>>>> {
        let keys = &self.keys;
        let stays = |number| keys.is_in(number, protected);
        let Some(victims) = self.order.evict(count, stays) else {
            return Ok(None);
        };
        self.keys.forget_all(py, victims).map(Some)
    }
}

/// The order in which chunks go.
///
/// Keys are known by the number of their chunk, which must be different for each key that is
/// there.
#[pyclass(module = "kvstrata")]
pub(crate) struct CacheOrder {
    policy: Box<dyn EvictionPolicy>,
    keys: Keys,
    /// Inserted and not told to the policy yet: a batch comes head first, and its tail is to be
    /// the oldest.
    inserted: Vec<(u32, Tag, bool)>,
    start: Instant,
}

fn tag(key: &Bound<'_, PyAny>) -> PyResult<Tag> {
    // Python's hash of bytes is keyed by the process, and kept in the object.
    let hash = key.hash()?.to_ne_bytes();
    Ok(Tag(u64::from_ne_bytes(hash)))
}

fn place_of(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

fn make(py: Python<'_>, name: &str, capacity: usize) -> PyResult<Box<dyn EvictionPolicy>> {
    let mut policy = create(name).map_err(|error| raised(py, &error))?;
    policy.set_capacity(capacity);
    Ok(policy)
}

#[pymethods]
impl CacheOrder {
    /// An empty order for so many chunks.
    ///
    /// Raises ``ConfigError`` for a policy that is not known.
    #[new]
    fn new(py: Python<'_>, policy: String, capacity: usize) -> PyResult<Self> {
        Ok(Self {
            policy: make(py, &policy, capacity)?,
            keys: Keys::new(py, capacity),
            inserted: Vec::new(),
            start: SystemClock.now(),
        })
    }

    /// Adds a key; ``free`` says whether it may go.
    ///
    /// Of keys added in a row with ``tail_first`` the last is the oldest.
    fn insert(
        &mut self,
        key: &Bound<'_, PyAny>,
        number: u32,
        free: bool,
        tail_first: bool,
    ) -> PyResult<()> {
        self.keys.insert(key, number)?;
        if !tail_first {
            self.flush();
        }
        self.inserted.push((number, tag(key)?, free));
        if !tail_first {
            self.flush();
        }
        Ok(())
    }

    /// Forgets a key.
    fn remove(&mut self, key: &Bound<'_, PyAny>) -> PyResult<()> {
        self.flush();
        if let Some(number) = self.keys.number(key)? {
            self.policy.remove(EntryId(number));
            self.keys.forget(key.py(), number)?;
        }
        Ok(())
    }

    /// Lets a key go from now on.
    fn free(&mut self, key: &Bound<'_, PyAny>) -> PyResult<()> {
        self.flush();
        if let Some(number) = self.keys.number(key)? {
            self.policy.unpin(EntryId(number));
        }
        Ok(())
    }

    /// Keeps a key until it is freed.
    fn keep(&mut self, key: &Bound<'_, PyAny>) -> PyResult<()> {
        self.flush();
        if let Some(number) = self.keys.number(key)? {
            self.policy.pin(EntryId(number));
        }
        Ok(())
    }

    /// Counts an access to keys in token order; those that are not there are passed.
    fn touch(&mut self, keys: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        self.flush();
        self.set_time();
        let found = self.keys.numbers(&keys)?;
        let found: Vec<EntryId> = found.into_iter().map(EntryId).collect();
        self.policy.access_request(&found);
        Ok(())
    }

    /// Says that keys, in token order, are not there and are about to be inserted.
    fn miss(&mut self, keys: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        self.flush();
        let tags = keys.iter().map(tag).collect::<PyResult<Vec<Tag>>>()?;
        self.policy.missed(&tags);
        Ok(())
    }

    /// Says that a request has ended that had these keys, in token order.
    ///
    /// It stored some of them and used others.
    fn end(
        &mut self,
        keys: Vec<Bound<'_, PyAny>>,
        stored: &Bound<'_, PyAny>,
        used: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.flush();
        self.set_time();
        let mut ended = Vec::with_capacity(keys.len());
        for key in &keys {
            ended.push(EndedKey {
                tag: tag(key)?,
                entry: self.keys.number(key)?.map(EntryId),
                stored: stored.contains(key)?,
                used: used.contains(key)?,
            });
        }
        self.policy.ended(PLACEMENT.class, &ended);
        Ok(())
    }

    /// Takes out exactly ``count`` keys that may go and are not protected, coldest first.
    ///
    /// Where there are fewer, none is taken out, and it returns ``None``.
    fn evict(
        &mut self,
        py: Python<'_>,
        count: usize,
        protected: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Vec<Py<PyAny>>>> {
        self.flush();
        self.set_time();
        let keys = &self.keys;
        let stays = |entry: EntryId| keys.is_in(entry.0, protected);
        let mut victims = Vec::with_capacity(count);
        if !self
            .policy
            .evict(count, PLACEMENT.class, &stays, &mut victims)
        {
            return Ok(None);
        }
        let victims = victims.into_iter().map(|victim| victim.0).collect();
        self.keys.forget_all(py, victims).map(Some)
    }

    /// Bytes of memory of the policy.
    fn memory_bytes(&self) -> usize {
        self.policy.memory_bytes()
    }
}

impl CacheOrder {
    fn flush(&mut self) {
        for (number, tag, free) in self.inserted.drain(..).rev() {
            self.policy.insert(EntryId(number), tag, PLACEMENT);
            if !free {
                self.policy.pin(EntryId(number));
            }
        }
    }

    fn set_time(&mut self) {
        let since = SystemClock.now().saturating_duration_since(self.start);
        let milliseconds = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        self.policy.set_time(milliseconds);
    }
}
