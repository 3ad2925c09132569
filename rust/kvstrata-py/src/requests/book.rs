//! Contexts of requests, and the state behind them.

use hashbrown::HashMap;
use kvstrata_core::manager::{Allowed, Manager, ManagerOptions, RequestId};
use pyo3::prelude::*;

use super::RequestBook;

/// The requests by the address of their context. An address is of one object while that is held.
#[derive(Debug)]
pub(crate) struct Book {
    pub(super) manager: Manager,
    pub(super) contexts: Contexts,
    addresses: HashMap<usize, RequestId>,
    /// The context that was looked for last: a scheduler asks many keys in a row for one.
    last: Option<(usize, RequestId)>,
}

/// The contexts of living requests.
pub(super) type Contexts = HashMap<RequestId, Py<PyAny>>;

impl Book {
    pub(super) fn new(options: ManagerOptions) -> Self {
        Self {
            manager: Manager::new(options),
            contexts: HashMap::new(),
            addresses: HashMap::new(),
            last: None,
        }
    }

    pub(super) fn begin(
        &mut self,
        context: &Bound<'_, PyAny>,
        allowed: Allowed,
        is_known: bool,
    ) -> Option<RequestId> {
        if let Some(id) = self.find(context) {
            if is_known {
                self.manager.know(id);
            }
            return Some(id);
        }
        let id = self.manager.begin(allowed, is_known)?;
        self.addresses.insert(context.as_ptr().addr(), id);
        self.contexts.insert(id, context.clone().unbind());
        Some(id)
    }

    pub(super) fn find(&mut self, context: &Bound<'_, PyAny>) -> Option<RequestId> {
        let address = context.as_ptr().addr();
        if let Some((last, id)) = self.last
            && last == address
        {
            return Some(id);
        }
        let id = *self.addresses.get(&address)?;
        self.last = Some((address, id));
        Some(id)
    }

    pub(super) fn forget(&mut self, context: &Bound<'_, PyAny>) -> Option<RequestId> {
        self.last = None;
        let id = self.addresses.remove(&context.as_ptr().addr())?;
        self.contexts.remove(&id);
        Some(id)
    }

    /// Forgets the contexts of requests that the manager has forgotten by itself.
    pub(super) fn drop_dead(&mut self) {
        let forgotten = self.manager.take_forgotten();
        if forgotten.is_empty() {
            return;
        }
        self.last = None;
        for id in forgotten {
            if let Some(context) = self.contexts.remove(&id) {
                self.addresses.remove(&context.as_ptr().addr());
            }
        }
    }
}

impl RequestBook {
    /// Which tiers a request may load from.
    pub(super) fn allowed_to(
        &self,
        py: Python<'_>,
        context: &Bound<'_, PyAny>,
    ) -> PyResult<Allowed> {
        let filter = context.getattr(pyo3::intern!(py, "load_tier_filter"))?;
        if filter.is(self.everywhere.bind(py)) {
            return Ok(Allowed::ALL);
        }
        let (cpu, below) = self.allowed.bind(py).call1((context,))?.extract()?;
        Ok(Allowed { cpu, below })
    }
}
