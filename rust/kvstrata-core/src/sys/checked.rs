//! What the model checker's threads lack beside the machine's.

use core::sync::atomic::{AtomicBool, Ordering};
use std::io;
use std::sync::Arc;
use std::thread::Result;

use shuttle::thread::Builder;

/// A thread to be waited for, which also says whether it has ended.
#[derive(Debug)]
pub struct JoinHandle<T> {
    thread: shuttle::thread::JoinHandle<T>,
    finished: Arc<AtomicBool>,
}

impl<T> JoinHandle<T> {
    /// Waits for the thread's end.
    ///
    /// # Errors
    /// With what the thread panicked with.
    pub fn join(self) -> Result<T> {
        self.thread.join()
    }

    /// Whether the thread's body has ended.
    pub fn is_finished(&self) -> bool {
        self.finished.load(Ordering::SeqCst)
    }
}

/// As [`super::sync::spawn`].
pub(super) fn spawn<F, T>(name: &str, body: F) -> io::Result<JoinHandle<T>>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    let finished = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&finished);
    let builder = Builder::new().name(name.to_owned());
    let thread = builder.spawn(move || {
        let result = body();
        ended.store(true, Ordering::SeqCst);
        result
    })?;
    Ok(JoinHandle { thread, finished })
}
