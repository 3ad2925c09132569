//! Locks of which every instruction is compiled with this crate, in place of the standard
//! library's, which comes compiled: a sanitizer that does not see the inside of a lock takes what
//! it guards for a race.

use core::time::Duration;

pub use parking_lot::{Condvar, Mutex, MutexGuard};

/// As [`super::sync::lock`] of the standard library's locks; these are never poisoned.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

/// Takes the lock if nobody has it.
pub fn try_lock<T: ?Sized>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    mutex.try_lock()
}

/// Waits on `condvar` until it is notified.
pub fn wait<'guard, T>(
    condvar: &Condvar,
    mut guard: MutexGuard<'guard, T>,
) -> MutexGuard<'guard, T> {
    condvar.wait(&mut guard);
    guard
}

/// Waits on `condvar` for at most `timeout`.
pub fn wait_timeout<'guard, T>(
    condvar: &Condvar,
    mut guard: MutexGuard<'guard, T>,
    timeout: Duration,
) -> MutexGuard<'guard, T> {
    condvar.wait_for(&mut guard, timeout);
    guard
}

/// Waits on `condvar` for at most `timeout` while `condition` holds.
pub fn wait_timeout_while<'guard, T>(
    condvar: &Condvar,
    mut guard: MutexGuard<'guard, T>,
    timeout: Duration,
    condition: impl FnMut(&mut T) -> bool,
) -> MutexGuard<'guard, T> {
    condvar.wait_while_for(&mut guard, condition, timeout);
    guard
}
