//! The life of an open tier: closing, forks, the end of the interpreter.

use core::mem;
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use kvstrata_core::error::ErrorKind;
use kvstrata_core::key::Key;
use kvstrata_core::tier::Tier;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyResourceWarning;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use pyo3::wrap_pyfunction;

use crate::error::{exception, raised};
use crate::notices;

/// How long a tier that nobody closed may hold up the garbage collector or the interpreter's end.
const ABANDONED_TIMEOUT: Duration = Duration::from_secs(5);

/// The tiers that are open, for the interpreter's end. Weak: it keeps none alive.
static OPEN: Mutex<Vec<Weak<Handle>>> = Mutex::new(Vec::new());

/// A tier of the core and the Python buffer it works in.
///
/// The buffer is released after `close` succeeded and at no other time; when the tier goes away
/// otherwise both are leaked, for the kernel may still write to the memory.
pub(crate) struct Handle {
    tier: Arc<Tier>,
    buffer: Mutex<Option<PyUntypedBuffer>>,
    closed: AtomicBool,
    process: u32,
}

impl Handle {
    /// Takes an open tier and the buffer behind its arena.
    pub(crate) fn new(tier: Tier, buffer: PyUntypedBuffer) -> Arc<Self> {
        let handle = Arc::new(Self {
            tier: Arc::new(tier),
            buffer: Mutex::new(Some(buffer)),
            closed: AtomicBool::new(false),
            process: process::id(),
        });
        let mut open = lock(&OPEN);
        open.retain(|other| other.strong_count() > 0);
        open.push(Arc::downgrade(&handle));
        handle
    }

    /// Runs `work` on the tier without the GIL, then logs what the core has to say. Every call into
    /// the core but `open` and `close` goes through here.
    pub(crate) fn detached<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Tier) -> T + Send,
    ) -> PyResult<T> {
        if self.is_forked() {
            return Err(self.forked(py));
        }
        if self.is_closed() {
            return Err(exception(
                py,
                ErrorKind::Closed,
                "the tier is closed".to_owned(),
            ));
        }
        let (value, notices) = py.detach(|| (work(&self.tier), self.tier.take_notices()));
        notices::log(py, notices);
        Ok(value)
    }

    /// Whether a row can be loaded; `None` where that is not known yet. What the core has to say
    /// about it is logged by the next other call. Not for a forked child.
    pub(crate) fn has(&self, key: &Key) -> Option<bool> {
        if self.is_closed() {
            return Some(false);
        }
        let found = self.tier.lookup(core::slice::from_ref(key));
        found
            .ok()
            .map_or(Some(false), |found| found.first().copied().flatten())
    }

    /// The error of every call in a forked child.
    fn forked(&self, py: Python<'_>) -> PyErr {
        let text = format!(
            "the tier belongs to process {}, which forked this one",
            self.process
        );
        exception(py, ErrorKind::Closed, text)
    }

    /// Closes the tier and releases the buffer. After success it does nothing; a forked child is
    /// refused.
    pub(crate) fn close(&self, py: Python<'_>, timeout: Duration) -> PyResult<()> {
        if self.is_closed() {
            return Ok(());
        }
        if self.is_forked() {
            return Err(self.forked(py));
        }
        let (closed, notices) = py.detach(|| (self.tier.close(timeout), self.tier.take_notices()));
        notices::log(py, notices);
        closed.map_err(|error| raised(py, &error))?;
        self.closed.store(true, Ordering::Release);
        let buffer = lock(&self.buffer).take();
        if let Some(buffer) = buffer {
            buffer.release(py);
        }
        Ok(())
    }

    /// Whether `close` succeeded.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Whether this is a child of the process that opened the tier.
    pub(crate) fn is_forked(&self) -> bool {
        process::id() != self.process
    }

    /// Gives the tier and its memory up without touching either.
    fn leak(&self) {
        self.closed.store(true, Ordering::Release);
        mem::forget(Arc::clone(&self.tier));
        mem::forget(lock(&self.buffer).take());
    }

    /// Closes a tier that its owner did not close, in bounded time.
    fn finish(&self, py: Python<'_>) {
        if self.close(py, ABANDONED_TIMEOUT).is_err() {
            self.leak();
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.is_closed() {
            return;
        }
        if self.is_forked() {
            self.leak();
            return;
        }
        let attached = Python::try_attach(|py| {
            let pending = PyErr::take(py);
            let category = py.get_type::<PyResourceWarning>();
            if let Err(error) = PyErr::warn(py, &category, c"unclosed kvstrata tier", 1) {
                error.write_unraisable(py, None);
            }
            self.finish(py);
            if let Some(error) = pending {
                error.restore(py);
            }
        });
        if attached.is_none() {
            self.leak();
        }
    }
}

/// Has the interpreter close the tiers that are open when it ends.
pub(crate) fn close_at_exit(py: Python<'_>) -> PyResult<()> {
    let close = wrap_pyfunction!(close_open_tiers, py)?;
    py.import("atexit")?
        .call_method1("register", (close,))
        .map(drop)
}

/// Has a forked child let its parent's roots go.
pub(crate) fn leave_roots_after_fork(py: Python<'_>) -> PyResult<()> {
    let hooks = PyDict::new(py);
    hooks.set_item("after_in_child", wrap_pyfunction!(leave_roots, py)?)?;
    py.import("os")?
        .call_method("register_at_fork", (), Some(&hooks))
        .map(drop)
}

#[pyfunction(name = "_leave_roots")]
fn leave_roots() {
    // Another thread of the parent may have had the lock; it will not return it here.
    let Ok(mut open) = OPEN.try_lock() else {
        return;
    };
    for handle in open.drain(..).filter_map(|handle| handle.upgrade()) {
        if !handle.is_closed() {
            handle.tier.leave_root_to_parent();
        }
    }
}

#[pyfunction(name = "_close_open_tiers")]
fn close_open_tiers(py: Python<'_>) {
    let open: Vec<Arc<Handle>> = lock(&OPEN).iter().filter_map(Weak::upgrade).collect();
    for handle in open {
        handle.finish(py);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
