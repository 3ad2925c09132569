//! Buffers of the tier's own that rows are read to where a read can hang.
//!
//! A caller that reuses a slot as soon as its job ends must not be told that a job has ended while
//! the kernel may still write to the slot. On a mount whose calls can hang that would mean to wait
//! without limit. So there rows are read to these buffers and copied to their slots when they have
//! been verified; a read that is given up keeps its buffer, and nothing else, until the kernel has
//! returned it.

use std::collections::VecDeque;

use crate::buffer::aligned::{AlignedBuffer, PAGE_BYTES};
use crate::sys::sync::Arc;
use crate::tier::plan::OPERATION_BYTES_MAX;
use crate::tier::request::Request;
use crate::tier::state::FlightRow;

/// Least number of bytes that may be lent at a time.
const LENT_BYTES_MIN: usize = 16 << 20;
/// Least number of operations of the largest size that may be lent buffers at a time.
const OPERATIONS_MIN: usize = 8;
/// Reads given up, and still with the kernel, with which the mount counts as dead: as many as the
/// `threads` engine has threads, replacements included.
const STUCK_READS_MAX: usize = 16;
/// Bytes of returned buffers that are kept to be lent again.
const KEPT_BYTES_MAX: usize = 8 << 20;

/// A buffer for the rows of one operation, side by side as in the file.
#[derive(Clone, Debug)]
pub(crate) struct LoadBuffer {
    /// The memory; at least as long as the rows.
    pub(crate) memory: Arc<AlignedBuffer>,
    /// Distance from one row to the next, in bytes.
    pub(crate) stride: usize,
}

impl LoadBuffer {
    /// The payload of the row at position `at` of the operation.
    pub(crate) fn row(&self, at: usize, row_bytes: usize) -> Option<&[u8]> {
        let start = at.checked_mul(self.stride)?;
        self.memory.get(start..start.checked_add(row_bytes)?)
    }
}

/// Neighbouring rows for which no buffer is free yet.
#[derive(Debug)]
pub(crate) struct WaitingRun {
    /// The job.
    pub(crate) request: Arc<Request>,
    /// The rows, pinned.
    pub(crate) rows: Vec<FlightRow>,
    /// Epoch in which they were planned.
    pub(crate) epoch: u32,
}

/// The buffers of a tier, bounded in bytes. Made when needed; a few are kept.
#[derive(Debug)]
pub(crate) struct LoadBuffers {
    lent_bytes_max: usize,
    operation_bytes_max: usize,
    lent_bytes: usize,
    stuck_bytes: usize,
    stuck_reads: usize,
    kept: Vec<Arc<AlignedBuffer>>,
    kept_bytes: usize,
    /// Reads that wait for a buffer, in order.
    pub(crate) waiting: VecDeque<WaitingRun>,
}

impl LoadBuffers {
    /// Buffers for rows of at most `stride_max` bytes from one to the next.
    pub(crate) fn new(stride_max: usize) -> Self {
        let operation = usize::try_from(OPERATION_BYTES_MAX).unwrap_or(usize::MAX);
        let operation_bytes_max = operation.max(stride_max);
        Self {
            lent_bytes_max: operation_bytes_max
                .saturating_mul(OPERATIONS_MIN)
                .max(LENT_BYTES_MIN),
            operation_bytes_max,
            lent_bytes: 0,
            stuck_bytes: 0,
            stuck_reads: 0,
            kept: Vec::new(),
            kept_bytes: 0,
            waiting: VecDeque::new(),
        }
    }

    /// Lends a buffer of `bytes` bytes at least; none while too much is lent or memory is short.
    pub(crate) fn lend(&mut self, bytes: usize) -> Option<Arc<AlignedBuffer>> {
        // Sizes are few, so that buffers fit again.
        let length = bytes.min(self.operation_bytes_max).next_power_of_two();
        let length = length.min(self.operation_bytes_max).max(bytes);
        let lent_bytes = self.lent_bytes.checked_add(length)?;
        if lent_bytes > self.lent_bytes_max {
            return None;
        }
        let fitting = self.kept.iter().position(|buffer| buffer.len() == length);
        let buffer = match fitting {
            Some(at) => {
                self.kept_bytes = self.kept_bytes.saturating_sub(length);
                self.kept.swap_remove(at)
            }
            None => AlignedBuffer::zeroed(length, PAGE_BYTES)
                .map(Arc::new)
                .ok()?,
        };
        self.lent_bytes = lent_bytes;
        Some(buffer)
    }

    /// Takes a buffer back that the kernel has returned; `stuck` if its read was given up before.
    pub(crate) fn take_back(&mut self, buffer: Arc<AlignedBuffer>, stuck: bool) {
        let length = buffer.len();
        self.lent_bytes = self.lent_bytes.saturating_sub(length);
        if stuck {
            self.stuck_bytes = self.stuck_bytes.saturating_sub(length);
            self.stuck_reads = self.stuck_reads.saturating_sub(1);
        }
        let kept_bytes = self.kept_bytes.saturating_add(length);
        if kept_bytes <= KEPT_BYTES_MAX {
            self.kept_bytes = kept_bytes;
            self.kept.push(buffer);
        }
    }

    /// Notes that the read of a lent buffer was given up: the kernel has it for as long as it
    /// likes.
    pub(crate) fn give_up(&mut self, buffer: &AlignedBuffer) {
        self.stuck_bytes = self.stuck_bytes.saturating_add(buffer.len());
        self.stuck_reads = self.stuck_reads.saturating_add(1);
    }

    /// Whether so many reads are stuck that no other can be expected to come back.
    pub(crate) const fn exhausted(&self) -> bool {
        self.stuck_reads >= STUCK_READS_MAX
            || self.stuck_bytes.saturating_add(self.operation_bytes_max) > self.lent_bytes_max
    }

    /// Whether a buffer could be lent later although none can be now.
    pub(crate) const fn any_lent(&self) -> bool {
        self.lent_bytes > self.stuck_bytes
    }

    /// Bytes that are lent.
    pub(crate) const fn lent_bytes(&self) -> usize {
        self.lent_bytes
    }

    /// Of these, bytes whose reads were given up.
    pub(crate) const fn stuck_bytes(&self) -> usize {
        self.stuck_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_bounded_in_bytes_and_lent_again() {
        let mut buffers = LoadBuffers::new(16 << 20);
        let lent: Vec<_> = (0..8).map(|_| buffers.lend(16 << 20).unwrap()).collect();
        assert_eq!(buffers.lent_bytes(), 128 << 20);
        assert!(buffers.lend(1).is_none());
        for buffer in lent {
            buffers.take_back(buffer, false);
        }
        assert_eq!(buffers.lent_bytes(), 0);
        let small = buffers.lend(5000).unwrap();
        assert_eq!((small.len(), buffers.lent_bytes()), (8192, 8192));
        let base = small.base();
        buffers.take_back(small, false);
        assert_eq!(buffers.lend(8000).unwrap().base(), base);
    }

    #[test]
    fn stuck_reads_exhaust_the_buffers_by_number_or_by_bytes() {
        let mut buffers = LoadBuffers::new(4096);
        let mut stuck = Vec::new();
        for _ in 0..STUCK_READS_MAX {
            assert!(!buffers.exhausted());
            let buffer = buffers.lend(4096).unwrap();
            buffers.give_up(&buffer);
            stuck.push(buffer);
        }
        assert!(buffers.exhausted());
        buffers.take_back(stuck.pop().unwrap(), true);
        assert!(!buffers.exhausted());

        let mut buffers = LoadBuffers::new(16 << 20);
        for _ in 0..8 {
            assert!(!buffers.exhausted());
            let buffer = buffers.lend(16 << 20).unwrap();
            buffers.give_up(&buffer);
        }
        assert!(buffers.exhausted() && !buffers.any_lent());
    }

    #[test]
    fn rows_lie_a_stride_apart() {
        let mut memory = AlignedBuffer::zeroed(3 * 8192, PAGE_BYTES).unwrap();
        memory[8192..8195].copy_from_slice(&[1, 2, 3]);
        let buffer = LoadBuffer {
            memory: Arc::new(memory),
            stride: 8192,
        };
        assert_eq!(buffer.row(1, 3), Some([1, 2, 3].as_slice()));
        assert_eq!(buffer.row(2, 8193), None);
        assert_eq!(buffer.row(usize::MAX, 1), None);
    }
}
