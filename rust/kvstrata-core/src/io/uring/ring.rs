//! The ring itself: set-up, entries, completions. The unsafe part of the engine is here.

use core::cell::Cell;
use core::time::Duration;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use rustix::event::{EventfdFlags, eventfd};

use crate::buffer::AlignedBuffer;
use crate::io::Direction;
use crate::io::transfer::Transfer;
use crate::sys::fs::File;
use crate::sys::sync::Arc;

/// User data of the read of the event counter. Those of transfers are larger.
const WAKE: u64 = 0;
/// User data of cancellations, whose own completions say nothing.
const CANCEL: u64 = 1;
/// The smallest user data of a transfer.
pub(super) const FIRST_TOKEN: u64 = 2;

/// Length of what an event counter is read into, in bytes.
const COUNTER_BYTES: u32 = 8;

/// Most files that a ring holds open besides those it works on.
const HELD_MAX: usize = 8;

/// Attempts to get the read of the event counter back before its buffer is leaked.
const RETURN_ATTEMPTS: u32 = 100;

/// Wakes the thread that sleeps in the ring. Any thread may.
#[derive(Debug)]
pub(super) struct Wake(OwnedFd);

impl Wake {
    /// A new event counter.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC)?))
    }

    /// The number of its descriptor.
    pub(super) fn number(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Ends the sleep, or the next one.
    pub(super) fn signal(&self) {
        // It fails only for a counter at its maximum, which wakes as well.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

/// A ring, owned by the thread that made it.
pub(super) struct Ring {
    kernel: IoUring,
    wake: Arc<Wake>,
    /// What the event counter is read into; leaked if the kernel keeps it.
    counter: Option<AlignedBuffer>,
    counter_is_lent: bool,
    /// Of every transfer.
    flags: squeue::Flags,
    /// User data of the last entries, those that the kernel has not taken among them.
    pushed: VecDeque<u64>,
    /// Number of files that the ring holds.
    held: Cell<u32>,
}

impl Ring {
    /// A ring of `entries` submissions (rounded up to a power of two) and twice as many
    /// completions, with the cheapest way of task work that the kernel knows.
    ///
    /// # Errors
    /// The kernel's: `EPERM` and `ENOSYS` where it is forbidden, `ENOMEM`; `Unsupported` before
    /// Linux 5.11.
    pub(super) fn new(entries: u32, wake: Arc<Wake>) -> io::Result<Self> {
        let kernel = Self::build(entries)?;
        let known = kernel.params();
        if !(known.is_feature_ext_arg() && known.is_feature_nodrop()) {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "io_uring of this kernel is too old",
            ));
        }
        let counter = AlignedBuffer::zeroed(64, 64).map_err(|_| io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            kernel,
            wake,
            counter: Some(counter),
            counter_is_lent: false,
            flags: squeue::Flags::empty(),
            pushed: VecDeque::new(),
            held: Cell::new(0),
        })
    }

    fn build(entries: u32) -> io::Result<IoUring> {
        let mut deferred = IoUring::builder();
        deferred
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag();
        let mut cooperative = IoUring::builder();
        cooperative.setup_coop_taskrun().setup_taskrun_flag();
        let mut refusal = None;
        for mut builder in [deferred, cooperative, IoUring::builder()] {
            match builder.dontfork().setup_clamp().build(entries) {
                Ok(ring) => return Ok(ring),
                // An older kernel, which does not know the flags.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => refusal = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(refusal.unwrap_or_else(|| io::ErrorKind::Unsupported.into()))
    }

    /// The ring's descriptor.
    pub(super) fn descriptor(&self) -> RawFd {
        self.kernel.as_raw_fd()
    }

    /// Has the ring hold these files too until it has drained, up to [`HELD_MAX`] in all.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn hold(&self, files: &[OwnedFd]) -> io::Result<()> {
        let submitter = self.kernel.submitter();
        let first = self.held.get();
        if first == 0 {
            // Places without a file: a table cannot grow.
            submitter.register_files(&[-1; HELD_MAX])?;
        }
        let descriptors: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let count = submitter.register_files_update(first, &descriptors)?;
        self.held
            .set(first.saturating_add(u32::try_from(count).unwrap_or(u32::MAX)));
        Ok(())
    }

    /// Has the kernel make all transfers on threads of its own, `calls` of them at most: some mounts
    /// answer the ring itself only when they have the bytes. Each call that hangs holds a thread.
    pub(super) fn never_block(&mut self, calls: usize) {
        self.flags = squeue::Flags::ASYNC;
        let mut bounded_and_unbounded = [u32::try_from(calls).unwrap_or(u32::MAX), 0];
        let submitter = self.kernel.submitter();
        // Before Linux 5.15 the kernel keeps its own number.
        let _ = submitter.register_iowq_max_workers(&mut bounded_and_unbounded);
    }

    /// Has the kernel read the event counter, unless it does already: from now on
    /// [`Wake::signal`] ends a wait.
    pub(super) fn listen(&mut self) {
        let Some(counter) = self.counter.as_ref().filter(|_| !self.counter_is_lent) else {
            return;
        };
        let fd = Fd(self.wake.0.as_raw_fd());
        let entry = opcode::Read::new(fd, counter.base(), COUNTER_BYTES).build();
        #[expect(unsafe_code, reason = "the kernel writes to the counter's buffer")]
        // SAFETY: the buffer has room for 8 bytes, nobody else looks at it, and it and the
        // descriptor live as long as this ring; `drop` waits for the completion or leaks it.
        let pushed = unsafe { self.push(&entry.user_data(WAKE)) };
        self.counter_is_lent = pushed;
    }

    /// Queues the next call of `transfer`; false when there is no room.
    ///
    /// # Safety
    /// Until [`Ring::reap`] has returned `token`, the transfer must not be changed or dropped, the
    /// memory its vectors name must be valid and belong to the call alone, and `file` must stay
    /// open.
    #[expect(unsafe_code, reason = "the kernel moves bytes after this returns")]
    pub(super) unsafe fn push_transfer(
        &mut self,
        token: u64,
        file: &File,
        transfer: &Transfer,
    ) -> bool {
        let vectors = transfer.batch().unwrap_or_default();
        // At most `IO_VECTORS_MAX`.
        let count = u32::try_from(vectors.len()).unwrap_or(0);
        // `IoVector` is a transparent `iovec`.
        let (fd, first) = (Fd(file.as_raw_fd()), vectors.as_ptr().cast());
        let entry = match transfer.direction() {
            Direction::Read => opcode::Readv::new(fd, first, count)
                .offset(transfer.offset())
                .build(),
            Direction::Write => opcode::Writev::new(fd, first, count)
                .offset(transfer.offset())
                .build(),
        };
        // SAFETY: the caller upholds that memory, vectors and descriptor outlive the operation.
        unsafe { self.push(&entry.user_data(token).flags(self.flags)) }
    }

    /// Asks the kernel to give up the call with this token; false when there is no room. The
    /// call completes all the same.
    pub(super) fn push_cancel(&mut self, token: u64) -> bool {
        let entry = opcode::AsyncCancel::new(token).build().user_data(CANCEL);
        #[expect(unsafe_code, reason = "any entry may name memory")]
        // SAFETY: this one names none.
        unsafe {
            self.push(&entry)
        }
    }

    /// # Safety
    /// What the entry names must be valid until its completion.
    #[expect(
        unsafe_code,
        reason = "the kernel acts on the entry after this returns"
    )]
    unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        if self.kernel.submission().is_full() && self.kernel.submit().is_err() {
            return false;
        }
        // SAFETY: the caller upholds it.
        let pushed = unsafe { self.kernel.submission().push(entry).is_ok() };
        if pushed {
            self.pushed.push_back(entry.get_user_data());
            self.forget_taken();
        }
        pushed
    }

    /// User data of the entries that the kernel has not taken. It takes them only when the ring is
    /// entered.
    pub(super) fn untaken(&mut self) -> Vec<u64> {
        self.forget_taken();
        self.pushed.iter().copied().collect()
    }

    fn forget_taken(&mut self) {
        let taken = self
            .pushed
            .len()
            .saturating_sub(self.kernel.submission().len());
        self.pushed.drain(..taken);
    }

    /// Hands over what was queued, and fetches what is done.
    pub(super) fn submit(&self) -> io::Result<()> {
        self.kernel.submit().map(drop)
    }

    /// Hands over what was queued and sleeps until something is done, `timeout` long at most.
    pub(super) fn wait(&self, timeout: Option<Duration>) -> io::Result<()> {
        let Some(timeout) = timeout else {
            return self.kernel.submit_and_wait(1).map(drop);
        };
        let timeout = Timespec::from(timeout);
        let arguments = SubmitArgs::new().timespec(&timeout);
        match self.kernel.submitter().submit_with_args(1, &arguments) {
            Err(error) if error.raw_os_error() != Some(libc::ETIME) => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether something was queued that the kernel has not taken.
    pub(super) fn has_unsubmitted(&mut self) -> bool {
        !self.kernel.submission().is_empty()
    }

    /// Adds what is done to `done`: the token and the kernel's answer of every transfer.
    pub(super) fn reap(&mut self, done: &mut VecDeque<(u64, i32)>) {
        for completion in self.kernel.completion() {
            match completion.user_data() {
                WAKE => self.counter_is_lent = false,
                CANCEL => {}
                token => done.push_back((token, completion.result())),
            }
        }
    }
}

impl Drop for Ring {
    /// Gets the event counter's buffer back. Transfers have all been returned by now, or are
    /// leaked.
    fn drop(&mut self) {
        let mut ignored = VecDeque::new();
        for _ in 0..RETURN_ATTEMPTS {
            if !self.counter_is_lent {
                return;
            }
            self.wake.signal();
            let _ = self.wait(Some(Duration::from_millis(10)));
            self.reap(&mut ignored);
        }
        core::mem::forget(self.counter.take());
    }
}
