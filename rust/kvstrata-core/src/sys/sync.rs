//! Locks, atomics and threads: one place to exchange them. Under the feature `shuttle` they are a
//! model checker's, which decides at each of them who goes on; its waits never time out. Under the
//! feature `instrumented` the locks are ones that a sanitizer sees through.

#[cfg(not(feature = "instrumented"))]
use core::time::Duration;
use std::io;
#[cfg(not(feature = "instrumented"))]
use std::sync::{PoisonError, TryLockError};
use std::thread::Builder;

pub use std::sync::{Arc, OnceLock, Weak};
#[cfg(not(feature = "shuttle"))]
pub use std::{
    sync::{atomic, mpsc},
    thread::JoinHandle,
};

#[cfg(not(any(feature = "shuttle", feature = "instrumented")))]
pub use std::sync::{Condvar, Mutex, MutexGuard};

#[cfg(feature = "shuttle")]
pub use super::checked::JoinHandle;
#[cfg(feature = "shuttle")]
pub use shuttle::sync::{Condvar, Mutex, MutexGuard, atomic, mpsc};

#[cfg(feature = "instrumented")]
pub use super::instrumented::{
    Condvar, Mutex, MutexGuard, lock, try_lock, wait, wait_timeout, wait_timeout_while,
};

/// Takes the lock. A lock poisoned by a panic is taken all the same: the state behind every lock
/// of this crate is left whole between statements, and a tier that stops because a thread died
/// would stop its engine too.
#[cfg(not(feature = "instrumented"))]
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the lock if nobody has it, poisoned or not. For a forked child, in which the thread that
/// has a lock may not exist.
#[cfg(not(feature = "instrumented"))]
pub fn try_lock<T: ?Sized>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Waits on `condvar` until it is notified (or wakes on its own), poisoned or not.
#[cfg(not(feature = "instrumented"))]
pub fn wait<'guard, T>(condvar: &Condvar, guard: MutexGuard<'guard, T>) -> MutexGuard<'guard, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Waits on `condvar` for at most `timeout`, poisoned or not. The caller looks at its state again
/// to know whether what it waits for has come.
#[cfg(not(feature = "instrumented"))]
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

/// Waits on `condvar` for at most `timeout` while `condition` holds, poisoned or not. The caller
/// looks at its state again to know which of the two ended the wait.
#[cfg(not(feature = "instrumented"))]
pub fn wait_timeout_while<'guard, T>(
    condvar: &Condvar,
    guard: MutexGuard<'guard, T>,
    timeout: Duration,
    condition: impl FnMut(&mut T) -> bool,
) -> MutexGuard<'guard, T> {
    condvar
        .wait_timeout_while(guard, timeout, condition)
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
    #[cfg(feature = "shuttle")]
    return super::checked::spawn(name, body);
    #[cfg(not(feature = "shuttle"))]
    Builder::new().name(name.to_owned()).spawn(body)
}

/// Runs `body` on up to `workers` threads at once, the caller's being one of them, and returns what
/// each came to, the caller's first. Where no thread can be started there are fewer: bodies take
/// their work from something they share. The model checker has only the caller's.
///
/// # Panics
/// As a body did.
pub fn fan_out<T: Send>(workers: usize, body: impl Fn() -> T + Sync) -> Vec<T> {
    let workers = if cfg!(feature = "shuttle") {
        1
    } else {
        workers
    };
    let body = &body;
    std::thread::scope(|scope| {
        let started: Vec<_> = (1..workers)
            .map_while(|_| {
                let builder = Builder::new().name("kvstrata-open".to_owned());
                builder.spawn_scoped(scope, body).ok()
            })
            .collect();
        let mut all = vec![body()];
        for thread in started {
            match thread.join() {
                Ok(one) => all.push(one),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        all
    })
}

/// Processors that this process may use, at least 1.
pub fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(not(feature = "shuttle"))]
    #[test]
    fn work_is_shared_by_all_threads_and_the_callers_is_one() {
        let own = std::thread::current().id();
        let left = atomic::AtomicUsize::new(1000);
        let take = || {
            left.fetch_update(atomic::Ordering::SeqCst, atomic::Ordering::SeqCst, |n| {
                n.checked_sub(1)
            })
        };
        let all = fan_out(3, || {
            (
                std::thread::current().id(),
                core::iter::from_fn(|| take().ok()).count(),
            )
        });
        assert_eq!(all.len(), 3);
        assert_eq!(all[0].0, own);
        assert_eq!(all.iter().map(|(_, count)| count).sum::<usize>(), 1000);
    }

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
