//! One operation that was started, and everything that has to outlive it in the kernel.

use super::shared::Shared;
use crate::io::plan::Bounce;
use crate::io::settle::Passage;
use crate::io::work::{Executed, Mode, Opened, Work, fit, look};
use crate::io::{Failure, Operation};
use crate::sys::fs::{Direct, File};
use crate::sys::sync::Arc;

/// What is to be done with an operation next.
pub(super) enum Step {
    /// It waits for a call on this file.
    Call(Arc<File>),
    /// Its file is to be looked at by a thread that may hang.
    Look(Direct),
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
    /// What a thread that may hang has found out of its file.
    pub(super) looked: Option<Opened>,
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
            looked: None,
            cancelled: false,
            refusal: None,
        }
    }

    /// Finds out what is to be done next. Where nothing hangs, the file is opened here.
    pub(super) fn step(&mut self, shared: &Shared, bounce: &mut Bounce) -> Step {
        if self.work.is_none() {
            match shared.mode.prepare(&self.operation, bounce) {
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
            let opened = match self.looked.take() {
                Some(opened) => opened,
                None if shared.may_hang => return Step::Look(transfer.direct()),
                None => look(&shared.files, &operation.file, transfer.direct()),
            };
            match fit(opened, operation, batch, transfer.offset()) {
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

    /// Takes the kernel's answer to the call under way: bytes, or an errno below zero. The file
    /// comes back unless it is needed again.
    pub(super) fn answer(&mut self, answer: i32) -> (Step, Option<Arc<File>>) {
        let mut file = self.lent.take();
        let Some(transfer) = self.work.as_mut().map(|work| &mut work.transfer) else {
            return (Step::End, file);
        };
        let answer = usize::try_from(answer).map_err(|_| Failure::Os(answer.saturating_neg()));
        let pause = transfer.answer(answer);
        if self.cancelled && transfer.batch().is_some() {
            transfer.fail(Failure::Os(libc::ECANCELED));
        }
        let step = match (transfer.batch().is_some(), pause) {
            (true, Some(retry)) => Step::Pause(retry),
            (true, None) => file.take().map_or(Step::End, Step::Call),
            (false, _) => Step::End,
        };
        (step, file)
    }

    /// Ends it with a failure if it has not ended.
    pub(super) fn fail(&mut self, failure: Failure) {
        match &mut self.work {
            Some(work) if work.transfer.batch().is_some() => work.transfer.fail(failure),
            Some(_) => {}
            None => self.refusal = Some(failure),
        }
    }

    /// What of it went through the page cache and is to be forgotten there.
    pub(super) fn passage(&self, mode: &Mode) -> Option<Passage> {
        let direct = self.work.as_ref()?.transfer.direct();
        mode.settles()
            .then(|| Passage::of(&self.operation, direct))?
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
