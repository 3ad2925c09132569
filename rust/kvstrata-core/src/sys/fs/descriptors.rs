//! The descriptors of a tier, written down so that a forked child can close its copies.
//!
//! A fork copies every descriptor, and with it the locks and the deleted files that it keeps. The
//! child has none of the threads that use them, and any lock in memory may be held for ever by one
//! that it lacks: it closes the descriptors by number, without a lock.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::process::{Pid, getpid};

use crate::sys::sync::Arc;
use crate::sys::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

/// Most descriptors that are written down; far more than a tier has open.
const DESCRIPTORS_MAX: usize = 1024;
const NONE: i32 = -1;

/// The open descriptors of a tier. Writing one down or off takes no lock.
#[derive(Debug)]
pub struct Descriptors {
    process: Pid,
    numbers: Box<[AtomicI32]>,
    next: AtomicUsize,
}

/// Keeps a descriptor written down. To be dropped before the descriptor is closed: the number may
/// be another's from then on.
#[derive(Debug)]
pub struct Noted {
    descriptors: Arc<Descriptors>,
    place: usize,
}

impl Descriptors {
    /// None yet, of this process.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            process: getpid(),
            numbers: (0..DESCRIPTORS_MAX).map(|_| AtomicI32::new(NONE)).collect(),
            next: AtomicUsize::new(0),
        })
    }

    /// Writes a descriptor down; `None` when there are too many.
    pub fn note(self: &Arc<Self>, descriptor: impl AsFd) -> Option<Noted> {
        let number = descriptor.as_fd().as_raw_fd();
        let start = self.next.fetch_add(1, Ordering::Relaxed);
        let places = (0..DESCRIPTORS_MAX).map(|step| start.wrapping_add(step) % DESCRIPTORS_MAX);
        for place in places {
            let free = self.numbers.get(place)?.compare_exchange(
                NONE,
                number,
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
            if free.is_ok() {
                return Some(Noted {
                    descriptors: Arc::clone(self),
                    place,
                });
            }
        }
        None
    }

    /// In a forked child: closes the child's copies. Nothing that was opened before the fork may be
    /// used or dropped in the child afterwards. In the process itself it does nothing.
    pub fn close_in_child(&self) {
        if getpid() == self.process {
            return;
        }
        for number in &self.numbers {
            let number = number.swap(NONE, Ordering::AcqRel);
            if number != NONE {
                #[expect(unsafe_code, reason = "the owners are the parent's")]
                // SAFETY: this is a forked child. The number was written down while its owner had
                // it open, the owner's copy in this process is never used or dropped, and the swap
                // lets nobody close it twice.
                drop(unsafe { OwnedFd::from_raw_fd(number) });
            }
        }
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        if let Some(number) = self.descriptors.numbers.get(self.place) {
            number.store(NONE, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written_down(descriptors: &Descriptors) -> Vec<i32> {
        let numbers = descriptors.numbers.iter();
        let numbers = numbers.map(|number| number.load(Ordering::Relaxed));
        numbers.filter(|number| *number != NONE).collect()
    }

    #[test]
    fn a_descriptor_is_written_down_until_its_note_is_dropped() {
        let descriptors = Descriptors::new();
        let (first, second) = (std::io::stdin(), std::io::stdout());
        let note = descriptors.note(&first).unwrap();
        let other = descriptors.note(&second).unwrap();
        assert_eq!(written_down(&descriptors), [0, 1]);
        drop(note);
        assert_eq!(written_down(&descriptors), [1]);
        drop(other);
        assert!(written_down(&descriptors).is_empty());
    }

    #[test]
    fn more_than_there_is_room_for_are_left_out_and_the_process_itself_closes_none() {
        let descriptors = Descriptors::new();
        let input = std::io::stdin();
        let notes: Vec<_> = (0..DESCRIPTORS_MAX)
            .map(|_| descriptors.note(&input).unwrap())
            .collect();
        assert!(descriptors.note(&input).is_none());
        descriptors.close_in_child();
        assert_eq!(written_down(&descriptors).len(), DESCRIPTORS_MAX);
        drop(notes);
        assert!(descriptors.note(&input).is_some());
    }
}
