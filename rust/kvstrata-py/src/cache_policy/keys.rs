//! The keys that a cache policy has, with their chunks.

use hashbrown::HashTable;
use kvstrata_core::error::ErrorKind;
use kvstrata_core::eviction::request::Tag;
use pyo3::exceptions::PyKeyError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::arguments::{self as named, Deferred, Objects};
use crate::error::exception;

/// A key that is there, or was.
struct Slot {
    tag: Tag,
    key: Option<Py<PyAny>>,
}

/// Numbers of keys, and their chunks.
pub(super) struct Keys {
    capacity: usize,
    /// What vLLM asks for a chunk.
    chunks: Py<PyDict>,
    numbers: HashTable<u32>,
    slots: Vec<Slot>,
    free: Vec<u32>,
}

/// Keys that are to be kept and let go, as vLLM has named them since they were looked at last.
///
/// It names thousands in a row, one by one: to append to a list costs it least.
pub(super) struct Uses {
    kept: Py<PyList>,
    freed: Py<PyList>,
}

/// What has become of a key.
#[derive(Clone, Copy, Debug)]
pub(super) enum Use {
    /// It is to stay.
    Kept,
    /// It may go again.
    Freed,
}

impl Uses {
    pub(super) fn new(py: Python<'_>) -> Self {
        Self {
            kept: PyList::empty(py).unbind(),
            freed: PyList::empty(py).unbind(),
        }
    }

    pub(super) fn kept(&self, py: Python<'_>) -> Py<PyAny> {
        self.kept.clone_ref(py).into_any()
    }

    pub(super) fn freed(&self, py: Python<'_>) -> Py<PyAny> {
        self.freed.clone_ref(py).into_any()
    }

    pub(super) fn is_empty(&self, py: Python<'_>) -> bool {
        self.kept.bind(py).is_empty() && self.freed.bind(py).is_empty()
    }

    /// Calls `each` with the numbers of the keys, those kept first, and forgets them. Both count, so
    /// which of the two was named first makes no difference.
    pub(super) fn take(
        &self,
        py: Python<'_>,
        keys: &Keys,
        mut each: impl FnMut(Use, u32),
    ) -> PyResult<()> {
        let (kept, freed) = (self.kept.bind(py), self.freed.bind(py));
        // Loads that began and ended since then have changed nothing.
        let pairs = kept.iter().zip(freed.iter());
        let same = pairs.take_while(|(one, other)| one.is(other)).count();
        drain(kept, same, keys, &mut |number| each(Use::Kept, number))?;
        drain(freed, same, keys, &mut |number| each(Use::Freed, number))
    }
}

fn drain(
    list: &Bound<'_, PyList>,
    from: usize,
    keys: &Keys,
    each: &mut dyn FnMut(u32),
) -> PyResult<()> {
    if list.is_empty() {
        return Ok(());
    }
    for key in list.iter().skip(from) {
        if let Some(number) = keys.number(&key)? {
            each(number);
        }
    }
    list.del_slice(0, list.len())
}

/// The objects of a call's keys.
///
/// # Errors
/// `ArgumentError` for what is no sequence.
pub(super) fn bound(
    py: Python<'_>,
    keys: Deferred<Objects<named::AllKeys>>,
) -> PyResult<Vec<Bound<'_, PyAny>>> {
    let keys = keys.value()?.into_iter();
    Ok(keys.map(|key| key.into_bound(py)).collect())
}

/// Python's hash of bytes is keyed by the process, and kept in the object.
pub(super) fn tag(key: &Bound<'_, PyAny>) -> PyResult<Tag> {
    let hash = key.hash()?.to_ne_bytes();
    Ok(Tag(u64::from_ne_bytes(hash)))
}

/// Whether nothing uses a chunk.
pub(super) fn is_free(chunk: &Bound<'_, PyAny>) -> PyResult<bool> {
    let uses = chunk.getattr(intern!(chunk.py(), "ref_cnt"))?;
    Ok(uses.extract::<i64>()? == 0)
}

fn place_of(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// Spreads what Python's hash of other types than bytes leaves together.
const fn spread(tag: Tag) -> u64 {
    tag.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Keys {
    pub(super) fn new(py: Python<'_>, capacity: usize) -> Self {
        Self {
            capacity,
            chunks: PyDict::new(py).unbind(),
            numbers: HashTable::new(),
            slots: Vec::new(),
            free: Vec::new(),
        }
    }

    /// Keys that are there.
    pub(super) fn len(&self) -> usize {
        self.numbers.len()
    }

    /// The chunks by key.
    pub(super) fn chunks(&self, py: Python<'_>) -> Py<PyAny> {
        self.chunks.clone_ref(py).into_any()
    }

    /// Adds a key, or gives one that is there another chunk; returns its number.
    pub(super) fn insert(
        &mut self,
        key: &Bound<'_, PyAny>,
        chunk: &Bound<'_, PyAny>,
    ) -> PyResult<(u32, Tag)> {
        let own = tag(key)?;
        if let Some(number) = self.find(key, own) {
            self.chunks.bind(key.py()).set_item(key, chunk)?;
            return Ok((number, own));
        }
        if self.free.is_empty() && self.slots.len() >= self.capacity {
            let text = format!("more keys than the {} chunks of this cache", self.capacity);
            return Err(exception(key.py(), ErrorKind::Argument, text));
        }
        self.chunks.bind(key.py()).set_item(key, chunk)?;
        let slot = Slot {
            tag: own,
            key: Some(key.clone().unbind()),
        };
        let number = if let Some(number) = self.free.pop() {
            if let Some(place) = self.slots.get_mut(place_of(number)) {
                *place = slot;
            }
            number
        } else {
            self.slots.push(slot);
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        };
        let slots = &self.slots;
        let of = |number: &u32| slots.get(place_of(*number)).map_or(0, |at| spread(at.tag));
        self.numbers.insert_unique(spread(own), number, of);
        Ok((number, own))
    }

    /// The number of a key with this tag, if it is there.
    pub(super) fn find(&self, key: &Bound<'_, PyAny>, own: Tag) -> Option<u32> {
        let is_it = |number: &u32| {
            let slot = self.slots.get(place_of(*number));
            let slot = slot.filter(|slot| slot.tag == own);
            let other = slot.and_then(|slot| slot.key.as_ref());
            other.is_some_and(|other| other.is(key) || key.eq(other).unwrap_or(false))
        };
        self.numbers.find(spread(own), is_it).copied()
    }

    /// The number of a key, if it is there.
    pub(super) fn number(&self, key: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
        Ok(self.find(key, tag(key)?))
    }

    /// The number of a key that is there.
    ///
    /// Raises ``KeyError`` if it is not.
    pub(super) fn require(&self, key: &Bound<'_, PyAny>) -> PyResult<u32> {
        let number = self.number(key)?;
        number.ok_or_else(|| PyKeyError::new_err(key.clone().unbind()))
    }

    /// The numbers of those that are there.
    pub(super) fn numbers(&self, keys: &[Bound<'_, PyAny>]) -> PyResult<Vec<u32>> {
        let mut found = Vec::with_capacity(keys.len());
        for key in keys {
            found.extend(self.number(key)?);
        }
        Ok(found)
    }

    /// Whether a set has a key; what cannot be told it has.
    pub(super) fn is_in(&self, number: u32, set: &Bound<'_, PyAny>) -> bool {
        let slot = self.slots.get(place_of(number));
        let key = slot.and_then(|slot| slot.key.as_ref());
        key.is_none_or(|key| set.contains(key).unwrap_or(true))
    }

    /// Forgets a key; returns it with its chunk.
    pub(super) fn forget<'py>(
        &mut self,
        py: Python<'py>,
        number: u32,
    ) -> PyResult<Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)>> {
        let Some(slot) = self.slots.get_mut(place_of(number)) else {
            return Ok(None);
        };
        let (own, key) = (slot.tag, slot.key.take());
        let Some(key) = key.map(|key| key.into_bound(py)) else {
            return Ok(None);
        };
        let found = self
            .numbers
            .find_entry(spread(own), |other| *other == number);
        if let Ok(entry) = found {
            entry.remove();
        }
        self.free.push(number);
        let chunks = self.chunks.bind(py);
        let chunk = chunks.get_item(&key)?;
        chunks.del_item(&key)?;
        Ok(chunk.map(|chunk| (key, chunk)))
    }

    /// Forgets victims; returns them as vLLM wants them: pairs of key and chunk.
    pub(super) fn evicted<'py>(
        &mut self,
        py: Python<'py>,
        numbers: impl IntoIterator<Item = u32>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let mut pairs = Vec::new();
        for number in numbers {
            if let Some((key, chunk)) = self.forget(py, number)? {
                pairs.push(PyTuple::new(py, [key, chunk])?.into_any());
            }
        }
        Ok(pairs)
    }
}
