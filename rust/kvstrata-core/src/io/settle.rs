//! Keeping the page cache small where rows go through it.
//!
//! Rows that were read are forgotten at once. Rows that were written are handed to the device at
//! once, and forgotten when it has them: the last [`UNSETTLED_BYTES_MAX`] stay behind.

use std::collections::VecDeque;

use super::file::FileCache;
use super::work::look;
use super::{Channel, DataFile, Direction, Operation};
use crate::sys::fs::{Direct, File};
use crate::sys::sync::{Arc, Mutex, lock};

/// Bytes that may have been written and not yet been forgotten.
const UNSETTLED_BYTES_MAX: u64 = 32 << 20;

/// Part of a file that went through the page cache.
#[derive(Debug)]
pub(super) struct Passage {
    file: Arc<DataFile>,
    direction: Direction,
    offset: u64,
    bytes: u64,
}

impl Passage {
    /// The passage of an operation; None for those whose pages are to stay.
    pub(super) fn of(operation: &Operation, direct: Direct) -> Option<Self> {
        let is_row = operation.channel == Channel::Rows && direct == Direct::No;
        is_row.then(|| Self {
            file: Arc::clone(&operation.file),
            direction: operation.direction,
            offset: operation.offset,
            bytes: operation.bytes(),
        })
    }
}

/// To be called before a row is read through the page cache that is to be kept small.
pub(super) fn before_read(operation: &Operation, direct: Direct, file: &File) {
    let is_row = operation.channel == Channel::Rows && direct == Direct::No;
    if is_row && operation.direction == Direction::Read {
        file.read_nothing_ahead();
    }
}

#[derive(Debug, Default)]
struct Unsettled {
    passages: VecDeque<Passage>,
    bytes: u64,
}

/// Forgets what went through the page cache.
#[derive(Debug, Default)]
pub(super) struct Settler {
    unsettled: Mutex<Unsettled>,
}

impl Settler {
    /// Takes notice of a passage. Blocks while the device is behind.
    pub(super) fn settle(&self, files: &FileCache, passage: Passage) {
        if passage.direction == Direction::Read {
            if let Ok((file, _)) = look(files, &passage.file, Direct::No) {
                file.forget_pages(passage.offset, passage.bytes);
            }
            return;
        }
        if let Ok((file, _)) = look(files, &passage.file, Direct::No) {
            file.begin_writing_back(passage.offset, passage.bytes);
        }
        let mut unsettled = lock(&self.unsettled);
        unsettled.bytes = unsettled.bytes.saturating_add(passage.bytes);
        unsettled.passages.push_back(passage);
        let mut due = Vec::new();
        while unsettled.bytes > UNSETTLED_BYTES_MAX
            && let Some(oldest) = unsettled.passages.pop_front()
        {
            unsettled.bytes = unsettled.bytes.saturating_sub(oldest.bytes);
            due.push(oldest);
        }
        drop(unsettled);
        for passage in due {
            if let Ok((file, _)) = look(files, &passage.file, Direct::No) {
                file.finish_writing_back(passage.offset, passage.bytes);
                file.forget_pages(passage.offset, passage.bytes);
            }
        }
    }
}
