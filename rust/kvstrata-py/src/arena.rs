//! The caller's memory.

use kvstrata_core::buffer::Arena;
use kvstrata_core::error::ErrorKind;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;
#[cfg(feature = "stubs")]
use pyo3::{inspect::PyStaticExpr, type_hint_identifier};

use crate::arguments::type_name;
use crate::error::exception;

/// A writable, C-contiguous buffer of any format, held: its exporter can neither free nor resize
/// the memory meanwhile.
pub(crate) struct ArenaBuffer {
    arena: Arena,
    buffer: PyUntypedBuffer,
}

impl FromPyObject<'_, '_> for ArenaBuffer {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_identifier!("_typeshed", "WriteableBuffer");

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        const EXPECTED: &str = "a writable, C-contiguous buffer is expected";
        let refuse = |what: &str| {
            let text = format!("arena ({}) {what}; {EXPECTED}", type_name(&object));
            exception(object.py(), ErrorKind::Config, text)
        };
        // Some exporters (ctypes) leave out the strides; a memoryview adds them.
        let held = PyUntypedBuffer::get(&object)
            .or_else(|_| PyUntypedBuffer::get(&PyMemoryView::from(&object)?.into_any()))
            .map_err(|_| refuse("has no buffer"))?;
        if held.readonly() {
            return Err(refuse("is read-only"));
        }
        if !held.is_c_contiguous() {
            return Err(refuse("is not C-contiguous"));
        }
        if held.len_bytes() == 0 {
            return Err(refuse("is empty"));
        }
        #[expect(
            unsafe_code,
            reason = "the arena is the caller's memory, known by address"
        )]
        // SAFETY: the held buffer keeps the `len_bytes()` bytes at `buf_ptr()` allocated, in place
        // and writable (checked above) until it is released, which `Handle` does only after the
        // core's `close` returned success, after which the core touches no arena byte; in every
        // other case `Handle` leaks the buffer. Python leaves no byte of a buffer uninitialised.
        let arena = unsafe { Arena::new(held.buf_ptr().cast(), held.len_bytes()) };
        let arena = arena.ok_or_else(|| refuse("has no memory"))?;
        Ok(Self {
            arena,
            buffer: held,
        })
    }
}

impl ArenaBuffer {
    /// The buffer as the core sees it, and what keeps it alive.
    ///
    /// The second part must be released only after the tier that has the first was closed with
    /// success, and be leaked otherwise; [`crate::handle::Handle`] does so.
    pub(crate) fn split(self) -> (Arena, PyUntypedBuffer) {
        (self.arena, self.buffer)
    }
}
