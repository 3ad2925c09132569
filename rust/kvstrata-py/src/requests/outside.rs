//! What lookups ask of Python's side: tiers below, and where a key is in its prompt.

use kvstrata_core::key::Key;
use kvstrata_core::manager::{Outside, RequestId};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::book::Contexts;
use super::packed::{known, position};
use crate::tier::Tier;

pub(super) struct Below<'a, 'py> {
    pub(super) py: Python<'py>,
    pub(super) tiers: &'a [Py<PyAny>],
    pub(super) contexts: &'a Contexts,
}

impl Below<'_, '_> {
    /// Has the tier count an exception: it has nothing, then. Where even that raises, nothing is left
    /// to be done.
    fn record(&self, tier: usize, error: PyErr) {
        let told = self.tiers.get(tier).map(|tier| {
            let faults = tier.bind(self.py).getattr(intern!(self.py, "faults"))?;
            faults.call_method1(
                intern!(self.py, "record"),
                ("lookup", error.into_value(self.py)),
            )
        });
        drop(told);
    }

    fn ask(&self, tier: usize, key: &Key) -> PyResult<Option<bool>> {
        let Some(tier) = self.tiers.get(tier) else {
            return Ok(Some(false));
        };
        let native = tier.bind(self.py).getattr(intern!(self.py, "native"))?;
        if let Ok(tier) = native.cast::<Tier>() {
            return Ok(tier.get().has(key));
        }
        let key = PyBytes::new(self.py, key.as_bytes());
        let found = native.call_method1(intern!(self.py, "lookup"), ((key,),))?;
        found.get_item(0)?.extract()
    }
}

impl Outside for Below<'_, '_> {
    fn has(&mut self, tier: usize, key: &Key) -> Option<bool> {
        self.ask(tier, key).unwrap_or_else(|error| {
            self.record(tier, error);
            Some(false)
        })
    }

    fn position(&mut self, request: RequestId, key: &Key) -> Option<u64> {
        let context = self.contexts.get(&request)?.bind(self.py);
        let key = PyBytes::new(self.py, key.as_bytes()).into_any();
        position(context, known(context).as_ref(), &key)
            .ok()
            .flatten()
    }
}
