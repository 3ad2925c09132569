//! What may block and is no transfer: opening, looking at and closing files. Done by threads that
//! come when they are needed, so that the ring's thread never waits for a mount that hangs.

use std::collections::VecDeque;

use super::shared::{Asleep, Shared};
use crate::io::DataFile;
use crate::io::settle::Passage;
use crate::io::work::{Opened, look};
use crate::sys::fs::{Direct, File};
use crate::sys::sync::{Arc, Condvar, Mutex, lock, wait};

/// Most threads, each of which may hang with one file.
const THREADS_MAX: usize = 16;

/// While so many errands wait, no operation is started.
const WAITING_MAX: usize = 256;

/// A file and the way it is opened. The address is that of the handle that asks.
pub(super) type OpenKey = (usize, Direct);

/// The key of `file`.
pub(super) fn key(file: &Arc<DataFile>, direct: Direct) -> OpenKey {
    (Arc::as_ptr(file).addr(), direct)
}

#[derive(Debug)]
enum Errand {
    Open(Arc<DataFile>, Direct),
    Close(File),
    Settle(Passage),
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Errand>,
    threads: usize,
    idle: usize,
    closing: bool,
}

/// The errands of a ring.
#[derive(Debug, Default)]
pub(super) struct Errands {
    state: Mutex<State>,
    work: Condvar,
}

/// What came of an errand.
#[derive(Debug)]
pub(super) struct Looked {
    pub(super) key: OpenKey,
    /// Kept so that no other file takes its address before the answer has been looked at.
    pub(super) _file: Arc<DataFile>,
    pub(super) opened: Opened,
}

impl Errands {
    /// Has `file` opened, if need be, and looked at.
    pub(super) fn open(&self, shared: &Arc<Shared>, file: &Arc<DataFile>, direct: Direct) {
        self.send(shared, Errand::Open(Arc::clone(file), direct));
    }

    /// Has `file` closed, if nobody else uses it.
    pub(super) fn close(&self, shared: &Arc<Shared>, file: Arc<File>) {
        if let Some(file) = Arc::into_inner(file) {
            self.send(shared, Errand::Close(file));
        }
    }

    /// Has the page cache forget what was moved.
    pub(super) fn settle(&self, shared: &Arc<Shared>, passage: Passage) {
        self.send(shared, Errand::Settle(passage));
    }

    /// Whether so much is to be done that nothing new is to be started.
    pub(super) fn is_full(&self) -> bool {
        lock(&self.state).waiting.len() >= WAITING_MAX
    }

    /// Lets the threads end when they have nothing to do.
    pub(super) fn end(&self) {
        lock(&self.state).closing = true;
        self.work.notify_all();
    }

    fn send(&self, shared: &Arc<Shared>, errand: Errand) {
        let mut state = lock(&self.state);
        state.waiting.push_back(errand);
        let is_short = state.idle < state.waiting.len() && state.threads < THREADS_MAX;
        if is_short {
            state.threads += 1;
        }
        drop(state);
        self.work.notify_one();
        if !is_short {
            return;
        }
        shared.intake.lock().alive += 1;
        let own = Arc::clone(shared);
        if shared
            .intake
            .spawn("kvstrata-open", move || own.errands.run(&own))
            .is_err()
        {
            shared.intake.end_thread();
            let mut state = lock(&self.state);
            state.threads -= 1;
            // With no thread at all they would wait for ever.
            let stranded = if state.threads == 0 {
                core::mem::take(&mut state.waiting)
            } else {
                VecDeque::new()
            };
            drop(state);
            for errand in stranded {
                do_errand(shared, errand);
            }
        }
    }

    fn run(&self, shared: &Shared) {
        while let Some(errand) = self.next() {
            do_errand(shared, errand);
        }
        shared.intake.end_thread();
    }

    /// Sleeps until there is an errand; None when this thread is one too many, or the last.
    fn next(&self) -> Option<Errand> {
        let mut state = lock(&self.state);
        loop {
            if let Some(errand) = state.waiting.pop_front() {
                return Some(errand);
            }
            if state.closing || state.idle > 0 {
                state.threads -= 1;
                return None;
            }
            state.idle += 1;
            state = wait(&self.work, state);
            state.idle -= 1;
        }
    }
}

fn do_errand(shared: &Shared, errand: Errand) {
    match errand {
        Errand::Open(file, direct) => {
            let opened = look(&shared.files, &file, direct);
            shared.looked(Looked {
                key: key(&file, direct),
                _file: file,
                opened,
            });
        }
        Errand::Close(file) => drop(file),
        Errand::Settle(passage) => {
            shared.settler.settle(&shared.files, passage);
            shared.rouse_from(Asleep::Full);
        }
    }
}
