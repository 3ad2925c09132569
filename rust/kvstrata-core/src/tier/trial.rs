//! Trials of a device that was given up: one small read, or one small file written and removed.
//!
//! Both go through the engine, on memory of the tier's own. The keeper begins them; whatever may
//! block (making and removing the file) is the writer's, which has nothing else to do then. A
//! trial that hangs is the only one until it returns.

use std::io;
use std::time::Instant;

use crate::buffer::AlignedBuffer;
use crate::io::file::DataFile;
use crate::io::{
    Channel, Completion, Direction, Failure, Memory, Operation, OperationId, Prelude, Segment,
    Started,
};
use crate::sys::fs::{Access, Direct};
use crate::sys::sync::{Arc, lock};
use crate::tier::disk::DiskTier;
use crate::tier::last_error::Cause;
use crate::tier::plan::PADDING_BYTES;

/// Rows among which the one is chosen that is read, another each time: one bad row does not keep
/// the circuit open.
const ROWS_TRIED: usize = 64;
/// Length of the file that is written.
const TRIAL_BYTES: u64 = 4096;
const _: () = assert!(TRIAL_BYTES.cast_signed() == 4096 && PADDING_BYTES == 4096);

/// How far the write that is on trial has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteTrial {
    /// There is none.
    None,
    /// The writer is to make the file and write it.
    Asked,
    /// The writer makes the file.
    Making,
    /// The engine writes it.
    Writing(OperationId),
    /// The writer is to remove the file.
    Ended,
}

/// The page that is read or written.
struct Target {
    direction: Direction,
    file: Arc<DataFile>,
    offset: u64,
}

impl Target {
    /// The operation between this page and a page of memory whose contents mean nothing.
    fn operation(self, id: OperationId, page: &Arc<AlignedBuffer>, deadline: Instant) -> Operation {
        Operation {
            id,
            direction: self.direction,
            file: self.file,
            channel: Channel::Rows,
            offset: self.offset,
            segments: vec![Segment {
                memory: Memory::Buffer(Arc::clone(page)),
                offset: 0,
                length: PADDING_BYTES,
            }],
            deadline,
            started: Started::default(),
            prelude: Prelude::NONE,
        }
    }
}

impl DiskTier {
    /// Begins the trials that are due; called by the keeper.
    pub(super) fn begin_trials(&self) {
        let now = self.around.clock.now();
        let late = now.checked_add(self.deadline).unwrap_or(now);
        let (reads, writes) = self.health.with(|circuits| {
            circuits.reads.note_late(now);
            circuits.writes.note_late(now);
            let reads = circuits.reads.begin_trial(now, late);
            let writes = circuits.writes.begin_trial(now, late);
            if writes {
                circuits.write_trial = WriteTrial::Asked;
                circuits.write_late = Some(late);
            }
            (reads, writes)
        });
        if writes {
            drop(lock(&self.state));
            self.work.notify_one();
        }
        if reads {
            self.try_read(late);
        }
    }

    /// Reads the first page of a row, or of a file where there is no row.
    fn try_read(&self, deadline: Instant) {
        let turn = self.health.with(|circuits| {
            circuits.trials = circuits.trials.wrapping_add(1);
            circuits.trials
        });
        let mut state = lock(&self.state);
        let inventory = &state.inventory;
        let listed = inventory.index.len().min(ROWS_TRIED);
        let row = turn
            .checked_rem(listed)
            .and_then(|at| inventory.index.listed().nth(at))
            .and_then(|id| inventory.index.get(id))
            .and_then(|entry| Some((inventory.row_file(entry.place)?, entry.place.row)));
        let target = match row {
            Some((row_file, row)) => Some(Target {
                direction: Direction::Read,
                file: Arc::clone(&row_file.file),
                offset: row_file.geometry.row_offset(row),
            }),
            None => inventory.containers().next().map(|(_, container)| Target {
                direction: Direction::Read,
                file: Arc::clone(&container.row_file.file),
                offset: 0,
            }),
        };
        let Some(target) = target else {
            drop(state);
            // There is nothing that could be read, so nothing whose reading could fail.
            self.end_trial(Direction::Read, None);
            return;
        };
        let id = state.operation_id();
        drop(state);
        self.health.with(|circuits| circuits.read_trial = Some(id));
        self.submit(vec![target.operation(id, &self.scratch, deadline)]);
    }

    /// Takes an operation back that is no job's.
    pub(super) fn complete_trial(&self, completion: &Completion) {
        let id = completion.operation.id;
        let ended = self.health.with(|circuits| {
            if circuits.read_trial == Some(id) {
                circuits.read_trial = None;
                return Some(Direction::Read);
            }
            if circuits.write_trial == WriteTrial::Writing(id) {
                circuits.write_trial = WriteTrial::Ended;
                return Some(Direction::Write);
            }
            None
        });
        let Some(direction) = ended else {
            return;
        };
        // A file that was cut meanwhile answered all the same.
        let cause = match completion.result {
            Ok(()) | Err(Failure::Short) => None,
            Err(failure) => Some(Cause::of_failure(failure).unwrap_or(Cause::Late)),
        };
        self.end_trial(direction, cause);
        if direction == Direction::Write {
            self.work.notify_one();
        }
    }

    /// What the writer has to do for the trial of a write.
    pub(super) fn has_trial_work(&self) -> bool {
        self.health
            .with(|circuits| matches!(circuits.write_trial, WriteTrial::Asked | WriteTrial::Ended))
    }

    /// Makes the file of a trial and has the engine write it, or removes it; called by the writer.
    pub(super) fn do_trial_work(&self) {
        let asked = self.health.with(|circuits| {
            let asked = circuits.write_trial == WriteTrial::Asked;
            circuits.write_trial = if asked {
                WriteTrial::Making
            } else {
                WriteTrial::None
            };
            asked
        });
        if !asked {
            self.remove_trial_file();
            return;
        }
        match self.make_trial_file() {
            Ok(file) => {
                let id = lock(&self.state).operation_id();
                let late = self.health.with(|circuits| {
                    circuits.write_trial = WriteTrial::Writing(id);
                    circuits.write_late
                });
                let target = Target {
                    direction: Direction::Write,
                    file,
                    offset: 0,
                };
                let deadline = late.unwrap_or_else(|| self.around.clock.now());
                self.submit(vec![target.operation(id, &self.zeros, deadline)]);
            }
            Err(error) => {
                self.remove_trial_file();
                self.health
                    .with(|circuits| circuits.write_trial = WriteTrial::None);
                self.end_trial(Direction::Write, Some(Cause::of(&error)));
            }
        }
    }

    fn make_trial_file(&self) -> io::Result<Arc<DataFile>> {
        let root = &self.root;
        match root.create_new(&self.trial_name, Access::Write, Direct::No) {
            Ok(file) => file.set_length(TRIAL_BYTES)?,
            // One of ours that could not be removed.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let file = root.open(&self.trial_name, Access::Write, Direct::No)?;
                file.set_length(TRIAL_BYTES)?;
            }
            Err(error) => return Err(error),
        }
        Ok(DataFile::new(
            Arc::clone(root),
            self.trial_name.clone(),
            Access::Write,
        ))
    }

    /// Removes what a trial left when the tier closes.
    pub(super) fn remove_last_trial(&self) {
        if self.health.with(|circuits| circuits.write_trial) != WriteTrial::None {
            self.remove_trial_file();
        }
    }

    /// One that cannot be removed is used by the next trial, or removed by the next open.
    fn remove_trial_file(&self) {
        let _ = self.root.unlink(&self.trial_name);
    }
}
