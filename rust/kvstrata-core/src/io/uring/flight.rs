//! One operation that was started, and everything that has to outlive it in the kernel.

use crate::io::file::FileCache;
use crate::io::plan::Bounce;
use crate::io::work::{Executed, Mode, Work, open};
use crate::io::{Failure, Operation};
use crate::sys::fs::File;
use crate::sys::sync::Arc;

/// What is to be done with an operation next.
pub(super) enum Step {
    /// It waits for a call on this file.
    Call(Arc<File>),
    /// It is to wait before this retry.
    Pause(u32),
    /// It has ended.
    End,
}

/// An operation under way. While `lent` is set the kernel has its memory.
pub(super) struct Flight {
    pub(super) operation: Operation,
    pub(super) work: Option<Work>,
    /// The file of the call that the kernel has.
    pub(super) lent: Option<Arc<File>>,
    /// Asked back after its deadline: no further call is made.
    pub(super) cancelled: bool,
    refusal: Option<Failure>,
}

impl Flight {
    pub(super) const fn new(operation: Operation) -> Self {
        Self {
            operation,
            work: None,
            lent: None,
            cancelled: false,
            refusal: None,
        }
    }

    /// Finds out what is to be done next. The file is opened here.
    pub(super) fn step(&mut self, mode: &Mode, files: &FileCache, bounce: &mut Bounce) -> Step {
        if self.work.is_none() {
            match mode.prepare(&self.operation, bounce) {
                Ok(work) => self.work = Some(work),
                Err(failure) => {
                    self.refusal = Some(failure);
                    return Step::End;
                }
            }
        }
        let (operation, work) = (&self.operation, &mut self.work);
        let Some(transfer) = work.as_mut().map(|work| &mut work.transfer) else {
            return Step::End;
        };
        while let Some(batch) = transfer.batch() {
            match open(
                files,
                operation,
                transfer.direct(),
                batch,
                transfer.offset(),
            ) {
                Ok(file) => return Step::Call(file),
                Err(failure) => {
                    if let Some(retry) = transfer.answer(Err(failure)) {
                        return Step::Pause(retry);
                    }
                }
            }
        }
        Step::End
    }

    /// Takes the kernel's answer to a call on `file`: bytes, or an errno below zero.
    pub(super) fn answer(&mut self, file: Option<Arc<File>>, answer: i32) -> Step {
        let Some(transfer) = self.work.as_mut().map(|work| &mut work.transfer) else {
            return Step::End;
        };
        let answer = usize::try_from(answer).map_err(|_| Failure::Os(answer.saturating_neg()));
        let pause = transfer.answer(answer);
        if self.cancelled && transfer.batch().is_some() {
            transfer.fail(Failure::Os(libc::ECANCELED));
        }
        match (transfer.batch().is_some(), pause, file) {
            (true, Some(retry), _) => Step::Pause(retry),
            (true, None, Some(file)) => Step::Call(file),
            _ => Step::End,
        }
    }

    /// Ends it with a failure if it has not ended.
    pub(super) fn fail(&mut self, failure: Failure) {
        match &mut self.work {
            Some(work) if work.transfer.batch().is_some() => work.transfer.fail(failure),
            Some(_) => {}
            None => self.refusal = Some(failure),
        }
    }

    /// How it ended, once the kernel has nothing of it.
    pub(super) fn finish(&mut self, mode: &Mode, bounce: &mut Bounce) -> Executed {
        if let Some(work) = self.work.take() {
            return mode.finish(&self.operation, work, bounce);
        }
        Executed {
            transferred_bytes: 0,
            result: Err(self.refusal.unwrap_or(Failure::Poisoned)),
        }
    }
}
