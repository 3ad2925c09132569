//! Jobs and answers as Python sees them.

use kvstrata_core::cpu::{self, Handle};
use kvstrata_core::error::ErrorKind;
use kvstrata_core::key::Key;
use kvstrata_core::manager::{self, Answer, Outcome};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use super::packed::{Packed, bytes_of};
use super::{Book, RequestBook};
use crate::error::exception;

/// Keys, slots' offsets and handles of a job, and the payload bytes of its rows.
pub(super) type Job<'py> = (
    Bound<'py, PyTuple>,
    Bound<'py, PyTuple>,
    Bound<'py, PyTuple>,
    u64,
);

/// Keys to store, their rows, and keys that made room.
pub(super) type Prepared<'py> = (Bound<'py, PyList>, Packed<'py>, Vec<Bound<'py, PyBytes>>);

/// Tier and job of each load to start, keys that made room, and one that was waited for too long.
pub(super) type StepEnd<'py> = (
    Vec<(usize, Job<'py>)>,
    Vec<Bound<'py, PyBytes>>,
    Option<Bound<'py, PyBytes>>,
);

impl RequestBook {
    /// Runs `work` on the requests and the CPU tier.
    pub(super) fn with<T>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Book, &mut cpu::CpuTier) -> T,
    ) -> PyResult<T> {
        let mut shared = self.cpu.get().shared(py);
        let shared = &mut *shared;
        match &mut shared.book {
            Some(book) => Ok(work(book, &mut shared.tier)),
            None => Err(exception(
                py,
                ErrorKind::Closed,
                "the CPU tier has no requests".to_owned(),
            )),
        }
    }

    pub(super) fn answer(&self, py: Python<'_>, answer: Answer) -> Py<PyAny> {
        let [miss, hit, pending, retry] = &self.answers;
        match answer {
            Answer::Miss => miss,
            Answer::Hit => hit,
            Answer::Pending => pending,
            Answer::Retry => retry,
        }
        .clone_ref(py)
    }

    pub(super) fn job<'py>(
        &self,
        py: Python<'py>,
        keys: &[Key],
        places: &[(u64, Handle)],
    ) -> PyResult<Job<'py>> {
        let shared = self.cpu.get().shared(py);
        let bytes = keys
            .iter()
            .filter_map(|key| shared.tier.row_bytes(key))
            .sum();
        drop(shared);
        Ok((
            PyTuple::new(py, keys.iter().map(|key| PyBytes::new(py, key.as_bytes())))?,
            PyTuple::new(py, places.iter().map(|(offset, _)| *offset))?,
            PyTuple::new(py, places.iter().map(|(_, handle)| handle.0))?,
            bytes,
        ))
    }

    pub(super) fn step_end<'py>(
        &self,
        py: Python<'py>,
        done: &manager::StepEnd,
    ) -> PyResult<StepEnd<'py>> {
        let mut starts = Vec::with_capacity(done.starts.len());
        for start in &done.starts {
            let places = start
                .offsets
                .iter()
                .copied()
                .zip(start.handles.iter().copied());
            let places: Vec<(u64, Handle)> = places.collect();
            starts.push((start.tier, self.job(py, &start.keys, &places)?));
        }
        let timed_out = done.timed_out;
        Ok((
            starts,
            bytes_of(py, &done.evicted),
            timed_out.map(|key| PyBytes::new(py, key.as_bytes())),
        ))
    }
}

/// Rows of a load from below: those at `lost` did not come, and of those the slots of `busy` are
/// still in use.
pub(super) fn loaded(
    keys: Vec<Key>,
    handles: Vec<u64>,
    lost: Vec<usize>,
    busy: Vec<usize>,
) -> Vec<(Key, Handle, Outcome)> {
    let mut rows: Vec<(Key, Handle, Outcome)> = keys
        .into_iter()
        .zip(handles)
        .map(|(key, handle)| (key, Handle(handle), Outcome::Good))
        .collect();
    for (positions, outcome) in [(lost, Outcome::Bad), (busy, Outcome::Busy)] {
        for at in positions {
            if let Some((.., what)) = rows.get_mut(at) {
                *what = outcome;
            }
        }
    }
    rows
}

/// The objects of a call's keys.
pub(super) fn keys_of<'py>(keys: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    keys.try_iter()?.collect()
}
