//! The order of vLLM's LRU, in its place.

use core::sync::atomic::{AtomicU64, Ordering};

use kvstrata_core::eviction::ranked::Ranked;
use pyo3::intern;
use pyo3::prelude::*;

use super::keys::{Keys, Use, Uses, bound, is_free};
use crate::arguments::{self as named, Deferred, Objects, Size};

/// Tells orders apart that were made one after the other.
static ORDERS: AtomicU64 = AtomicU64::new(0);

/// What a request's context remembers.
#[pyclass(frozen, module = "kvstrata")]
struct RequestRank {
    order: u64,
    rank: u64,
}

/// The order of vLLM's LRU, in its place.
///
/// ``chunks``: what is there, by key. ``kept`` and ``freed``: append a key that is to stay from now
/// on, and one that may go again, as often as it was kept.
#[pyclass(module = "kvstrata")]
pub(crate) struct LruOrder {
    keys: Keys,
    uses: Uses,
    order: Ranked,
    number: u64,
    /// The request that was asked for last, with its rank.
    latest: Option<(Py<PyAny>, u64)>,
}

#[pymethods]
impl LruOrder {
    /// An empty order for so many chunks.
    #[new]
    fn new(py: Python<'_>, capacity: Deferred<Size<named::Blocks>>) -> PyResult<Self> {
        Ok(Self {
            keys: Keys::new(py, capacity.value()?),
            uses: Uses::new(py),
            order: Ranked::new(),
            number: ORDERS.fetch_add(1, Ordering::Relaxed),
            latest: None,
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

    /// Adds a key with its chunk: the latest of all, or where the request has a place for it.
    ///
    /// vLLM 0.32 tells of no request.
    #[pyo3(signature = (key, chunk, req_context=None))]
    fn insert(
        &mut self,
        key: &Bound<'_, PyAny>,
        chunk: &Bound<'_, PyAny>,
        req_context: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.take_uses(key.py())?;
        let place = match req_context {
            Some(context) => self.place(key, context)?,
            None => None,
        };
        let free = is_free(chunk)?;
        let (number, _) = self.keys.insert(key, chunk)?;
        self.order.insert(number, place, free);
        Ok(())
    }

    /// Gives keys their places in a request, unless they have later ones.
    fn access(&mut self, keys: &Bound<'_, PyAny>, req_context: &Bound<'_, PyAny>) -> PyResult<()> {
        // The request has a rank from now on, whatever it brings.
        self.rank(req_context)?;
        for key in keys.try_iter()? {
            let key = key?;
            if let Some(number) = self.keys.number(&key)?
                && let Some((rank, position)) = self.place(&key, req_context)?
            {
                self.order.raise(number, rank, position);
            }
        }
        Ok(())
    }

    /// Makes keys, in token order, the latest ones; those that are not there are passed.
    fn touch(&mut self, py: Python<'_>, keys: Deferred<Objects<named::AllKeys>>) -> PyResult<()> {
        let keys = bound(py, keys)?;
        // A cache that holds all that is asked for sees no other call that takes them up.
        self.take_uses(py)?;
        let found = self.keys.numbers(&keys)?;
        self.order.renew(&found);
        Ok(())
    }

    /// Forgets a key.
    ///
    /// Raises ``KeyError`` if it is not there.
    fn remove(&mut self, key: &Bound<'_, PyAny>) -> PyResult<()> {
        self.take_uses(key.py())?;
        let number = self.keys.require(key)?;
        self.order.remove(number);
        self.keys.forget(key.py(), number)?;
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
        self.take_uses(py)?;
        let keys = &self.keys;
        let stays = |number| keys.is_in(number, protected);
        let Some(victims) = self.order.evict(n, stays) else {
            return Ok(None);
        };
        self.keys.evicted(py, victims).map(Some)
    }
}

impl LruOrder {
    fn take_uses(&mut self, py: Python<'_>) -> PyResult<()> {
        let order = &mut self.order;
        self.uses.take(py, &self.keys, |what, number| match what {
            Use::Kept => order.keep(number),
            Use::Freed => order.let_go(number),
        })
    }

    /// The rank of a request and the position of a key in it, if it has one.
    fn place(
        &mut self,
        key: &Bound<'_, PyAny>,
        context: &Bound<'_, PyAny>,
    ) -> PyResult<Option<(u64, u32)>> {
        let position = intern!(key.py(), "get_offload_key_position");
        let position: Option<u32> = context.call_method1(position, (key,))?.extract()?;
        match position {
            Some(position) => Ok(Some((self.rank(context)?, position))),
            None => Ok(None),
        }
    }

    fn rank(&mut self, context: &Bound<'_, PyAny>) -> PyResult<u64> {
        if let Some((latest, rank)) = &self.latest
            && latest.is(context)
        {
            return Ok(*rank);
        }
        let py = context.py();
        let known = context.call_method1("get_state", (py.get_type::<RequestRank>(),))?;
        let known = known.cast::<RequestRank>().ok().map(Bound::get);
        let known = known.filter(|known| known.order == self.number);
        let rank = if let Some(known) = known {
            known.rank
        } else {
            let (order, rank) = (self.number, self.order.next_rank());
            context.call_method1("set_state", (Bound::new(py, RequestRank { order, rank })?,))?;
            rank
        };
        self.latest = Some((context.clone().unbind(), rank));
        Ok(rank)
    }
}
