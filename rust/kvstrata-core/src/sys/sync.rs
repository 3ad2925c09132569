//! Locks, atomics and threads: one place to exchange them for a model checker's.

use core::time::Duration;
use std::io;
use std::sync::{PoisonError, TryLockError};
use std::thread;

pub use std::sync::atomic;
pub use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak, mpsc};
pub use std::thread::JoinHandle;

/// Takes the lock. A lock poisoned by a panic is taken all the same: the state behind every lock
/// of this crate is left whole between statements, and a tier that stops because a thread died
/// would stop its engine too.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the lock if nobody has it, poisoned or not. For a forked child, in which the thread that
/// has a lock may not exist.
pub fn try_lock<T: ?Sized>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Waits on `condvar` until it is notified (or wakes on its own), poisoned or not.
pub fn wait<'guard, T>(condvar: &Condvar, guard: MutexGuard<'guard, T>) -> MutexGuard<'guard, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Waits on `condvar` for at most `timeout`, poisoned or not. The caller looks at its state again
/// to know whether what it waits for has come.
pub fn wait_timeout<'guard, T>(
    condvar: &Condvar,
    guard: MutexGuard<'guard, T>,
    timeout: Duration,
) -> MutexGuard<'guard, T> {
    condvar
        .wait_timeout(guard, timeout)
        .unwrap_or_else(PoisonError::into_inner)
        .0
}

/// Starts a thread named `name` (the kernel shows its first 15 bytes).
///
/// # Errors
/// The operating system's, when it will not start another thread.
pub fn spawn<F, T>(name: &str, body: F) -> io::Result<JoinHandle<T>>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    thread::Builder::new().name(name.to_owned()).spawn(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_poisoned_lock_is_taken_all_the_same() {
        let shared = Arc::new(Mutex::new(7));
        let other = Arc::clone(&shared);
        let thread = spawn("poisoner", move || {
            let _guard = lock(&other);
            panic!("on purpose");
        });
        assert!(thread.unwrap().join().is_err());
        assert_eq!(*lock(&shared), 7);
    }
}
