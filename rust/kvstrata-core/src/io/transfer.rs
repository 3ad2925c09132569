//! Moving every byte of a range, whatever single calls do.
//!
//! A call may move all, some or none of the bytes, or fail. The four cases are four arms here, and
//! the loop ends: each turn either moves a byte or uses up one of [`RETRIES_MAX`] retries.

use super::{Alignment, Direction, Failure};
use crate::sys::fs::{Direct, IO_VECTORS_MAX, IoVector};

/// Calls without progress (`EINTR`, `EAGAIN`) after which an operation fails with their errno.
pub(super) const RETRIES_MAX: u32 = 64;

/// What is asked of the kernel.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) direction: Direction,
    pub(super) vectors: Vec<IoVector>,
    pub(super) offset: u64,
    /// What direct calls need.
    pub(super) alignment: Alignment,
    pub(super) direct: Direct,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moved {
    pub(super) transferred_bytes: u64,
    pub(super) result: Result<(), Failure>,
    /// The file system refused a direct call and took the same bytes through the page cache.
    pub(super) direct_refused: bool,
    pub(super) resumed_transfers: u64,
    pub(super) retried_calls: u64,
}

/// Does single calls.
pub(super) trait Calls {
    /// Moves some of the bytes of `vectors` at `offset` and returns their number.
    fn call(&mut self, direct: Direct, vectors: &[IoVector], offset: u64)
    -> Result<usize, Failure>;

    /// Waits before retry number `retry` after `EAGAIN`; false when there is no time left.
    fn pause(&mut self, retry: u32) -> bool;
}

/// A transfer under way: what the next call is, and what its answer means. It calls nobody.
#[derive(Debug)]
pub(super) struct Transfer {
    request: Request,
    moved: Moved,
    /// The first vector that is not done.
    first: usize,
    retries: u32,
    refused: bool,
}

impl Transfer {
    /// All bytes of `request`, none of them moved yet.
    pub(super) const fn new(request: Request) -> Self {
        Self {
            request,
            moved: Moved {
                transferred_bytes: 0,
                result: Ok(()),
                direct_refused: false,
                resumed_transfers: 0,
                retried_calls: 0,
            },
            first: 0,
            retries: 0,
            refused: false,
        }
    }

    /// The vectors of the next call; None when the transfer has ended. They stay where they are
    /// until the call is answered.
    pub(super) fn batch(&self) -> Option<&[IoVector]> {
        let rest = self.request.vectors.get(self.first..)?;
        if rest.is_empty() || self.moved.result.is_err() {
            return None;
        }
        rest.get(..IO_VECTORS_MAX.min(rest.len()))
    }

    /// Which way the next call moves bytes.
    pub(super) const fn direction(&self) -> Direction {
        self.request.direction
    }

    /// Whether the next call goes round the page cache.
    pub(super) const fn direct(&self) -> Direct {
        self.request.direct
    }

    /// Where in the file the next call starts.
    pub(super) const fn offset(&self) -> u64 {
        self.request.offset
    }

    /// Takes the answer of a call on [`Transfer::batch`]. `Some(retry)`: before the next call, the
    /// number `retry` in a row without progress, there is to be a pause.
    pub(super) fn answer(&mut self, answer: Result<usize, Failure>) -> Option<u32> {
        let asked: usize = self
            .batch()
            .map_or(0, |batch| batch.iter().map(IoVector::length).sum());
        match answer {
            Ok(0) if asked > 0 => self.fail(no_progress(self.request.direction)),
            Ok(count) => {
                self.retries = 0;
                let bytes = u64::try_from(count).unwrap_or(u64::MAX);
                self.moved.transferred_bytes = self.moved.transferred_bytes.saturating_add(bytes);
                self.request.offset = self.request.offset.saturating_add(bytes);
                self.first = advance(&mut self.request.vectors, self.first, count);
                if count < asked {
                    self.moved.resumed_transfers += 1;
                    if !aligned(&self.request, self.first) {
                        self.request.direct = Direct::No;
                    }
                }
            }
            Err(Failure::Os(errno @ (libc::EINTR | libc::EAGAIN)))
                if self.retries < RETRIES_MAX =>
            {
                self.retries += 1;
                self.moved.retried_calls += 1;
                return (errno == libc::EAGAIN).then_some(self.retries);
            }
            Err(Failure::Os(libc::EINVAL | libc::EOPNOTSUPP))
                if self.request.direct == Direct::Yes && !self.refused =>
            {
                self.refused = true;
                self.request.direct = Direct::No;
            }
            Err(failure) => self.fail(failure),
        }
        None
    }

    /// Ends the transfer.
    pub(super) const fn fail(&mut self, failure: Failure) {
        self.moved.result = Err(failure);
    }

    /// What came of it so far.
    pub(super) fn moved(&self) -> Moved {
        Moved {
            direct_refused: self.refused && self.moved.result.is_ok(),
            ..self.moved
        }
    }
}

/// Moves all bytes of `transfer`, or says why not, with calls that block.
pub(super) fn run(transfer: &mut Transfer, calls: &mut dyn Calls) {
    while let Some(batch) = transfer.batch() {
        let answer = calls.call(transfer.direct(), batch, transfer.offset());
        if let Some(retry) = transfer.answer(answer)
            && !calls.pause(retry)
        {
            transfer.fail(Failure::Os(libc::EAGAIN));
        }
    }
}

/// The kernel took the call and moved nothing: the end of the file, or a broken file system.
const fn no_progress(direction: Direction) -> Failure {
    match direction {
        Direction::Read => Failure::Short,
        Direction::Write => Failure::Os(libc::EIO),
    }
}

/// Takes `count` bytes off the front of the vectors from `first` on; returns the new first one.
fn advance(vectors: &mut [IoVector], mut first: usize, mut count: usize) -> usize {
    while let Some(vector) = vectors.get_mut(first) {
        if count < vector.length() {
            if count > 0 {
                *vector = IoVector::new(vector.base().wrapping_add(count), vector.length() - count);
            }
            break;
        }
        count -= vector.length();
        first += 1;
    }
    first
}

/// Whether what is left can still be moved directly.
fn aligned(request: &Request, first: usize) -> bool {
    let Alignment {
        memory_bytes,
        offset_bytes,
    } = request.alignment;
    let place = usize::try_from(request.offset).unwrap_or(1) % offset_bytes == 0;
    let rest = request.vectors.get(first);
    place
        && rest.is_none_or(|vector| {
            vector.base().addr() % memory_bytes == 0 && vector.length() % offset_bytes == 0
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    fn run(request: Request, calls: &mut dyn Calls) -> Moved {
        let mut transfer = Transfer::new(request);
        super::run(&mut transfer, calls);
        transfer.moved()
    }

    const SECTOR: Alignment = Alignment {
        memory_bytes: 512,
        offset_bytes: 512,
    };

    /// Answers calls from a script, then in full; notes what was asked.
    #[derive(Default)]
    struct Script {
        answers: VecDeque<Result<usize, Failure>>,
        asked: Vec<(Direct, u64, usize, usize)>,
        pauses: u32,
    }

    impl Calls for Script {
        fn call(
            &mut self,
            direct: Direct,
            vectors: &[IoVector],
            offset: u64,
        ) -> Result<usize, Failure> {
            let bytes = vectors.iter().map(IoVector::length).sum();
            self.asked.push((direct, offset, vectors.len(), bytes));
            self.answers.pop_front().unwrap_or(Ok(bytes))
        }

        fn pause(&mut self, _retry: u32) -> bool {
            self.pauses += 1;
            true
        }
    }

    fn script(answers: &[Result<usize, Failure>]) -> Script {
        Script {
            answers: answers.iter().copied().collect(),
            ..Script::default()
        }
    }

    fn request(direction: Direction, lengths: &[usize]) -> Request {
        let mut address = 4096_usize;
        let mut vectors = Vec::new();
        for length in lengths {
            vectors.push(IoVector::new(
                core::ptr::without_provenance_mut(address),
                *length,
            ));
            address += 1 << 20;
        }
        Request {
            direction,
            vectors,
            offset: 8192,
            alignment: SECTOR,
            direct: Direct::Yes,
        }
    }

    #[test]
    fn a_whole_transfer_is_one_call() {
        let mut calls = script(&[]);
        let moved = run(request(Direction::Read, &[4096, 512]), &mut calls);
        assert_eq!((moved.transferred_bytes, moved.result), (4608, Ok(())));
        assert_eq!(calls.asked, [(Direct::Yes, 8192, 2, 4608)]);
    }

    #[test]
    fn a_short_transfer_is_resumed_where_it_stopped() {
        for direction in [Direction::Read, Direction::Write] {
            let mut calls = script(&[Ok(4096 + 1024)]);
            let moved = run(request(direction, &[4096, 2048, 512]), &mut calls);
            assert_eq!((moved.transferred_bytes, moved.result), (6656, Ok(())));
            assert_eq!(moved.resumed_transfers, 1);
            assert_eq!(calls.asked[1], (Direct::Yes, 8192 + 5120, 2, 1536));
        }
    }

    #[test]
    fn after_an_odd_short_transfer_the_rest_goes_through_the_page_cache() {
        let mut calls = script(&[Ok(100)]);
        let moved = run(request(Direction::Write, &[4096]), &mut calls);
        assert_eq!((moved.transferred_bytes, moved.result), (4096, Ok(())));
        assert_eq!(calls.asked[1], (Direct::No, 8292, 1, 3996));
        assert!(!moved.direct_refused);
    }

    #[test]
    fn no_progress_is_the_end_of_a_read_and_an_error_of_a_write() {
        for (direction, failure) in [
            (Direction::Read, Failure::Short),
            (Direction::Write, Failure::Os(libc::EIO)),
        ] {
            let mut calls = script(&[Ok(512), Ok(0)]);
            let moved = run(request(direction, &[4096]), &mut calls);
            assert_eq!((moved.transferred_bytes, moved.result), (512, Err(failure)));
            assert_eq!(calls.asked.len(), 2);
        }
    }

    #[test]
    fn interrupted_calls_are_repeated_but_not_for_ever() {
        let interrupted = Err(Failure::Os(libc::EINTR));
        let mut calls = script(&[interrupted, Err(Failure::Os(libc::EAGAIN)), Ok(512)]);
        let moved = run(request(Direction::Write, &[4096]), &mut calls);
        assert_eq!((moved.result, moved.retried_calls), (Ok(()), 2));
        assert_eq!(calls.asked.len(), 4);

        let mut calls = script(&[interrupted; 1000]);
        let moved = run(request(Direction::Read, &[4096]), &mut calls);
        assert_eq!(moved.result, Err(Failure::Os(libc::EINTR)));
        assert_eq!(calls.pauses, 0);
        assert_eq!(calls.asked.len(), 65);
    }

    #[test]
    fn an_error_keeps_its_errno_and_ends_the_transfer() {
        for errno in [libc::EIO, libc::ENOSPC, libc::ESTALE] {
            let mut calls = script(&[Ok(512), Err(Failure::Os(errno))]);
            let moved = run(request(Direction::Write, &[4096]), &mut calls);
            assert_eq!(moved.result, Err(Failure::Os(errno)));
            assert_eq!((moved.transferred_bytes, calls.asked.len()), (512, 2));
        }
    }

    #[test]
    fn a_refusal_of_direct_calls_is_answered_through_the_page_cache_and_reported() {
        for errno in [libc::EINVAL, libc::EOPNOTSUPP] {
            let mut calls = script(&[Err(Failure::Os(errno))]);
            let moved = run(request(Direction::Read, &[4096]), &mut calls);
            assert_eq!((moved.result, moved.direct_refused), (Ok(()), true));
            assert_eq!(calls.asked[1].0, Direct::No);
        }
    }

    #[test]
    fn an_invalid_call_is_not_blamed_on_direct_mode() {
        let invalid = Failure::Os(libc::EINVAL);
        let mut calls = script(&[Err(invalid), Err(invalid)]);
        let moved = run(request(Direction::Read, &[4096]), &mut calls);
        assert_eq!((moved.result, moved.direct_refused), (Err(invalid), false));
    }

    #[test]
    fn more_vectors_than_one_call_takes_are_split() {
        let mut calls = script(&[]);
        let moved = run(request(Direction::Read, &vec![512; 2500]), &mut calls);
        assert_eq!(
            (moved.transferred_bytes, moved.result),
            (2500 * 512, Ok(()))
        );
        let counts: Vec<usize> = calls.asked.iter().map(|(_, _, count, _)| *count).collect();
        assert_eq!(counts, [1024, 1024, 452]);
        assert_eq!(moved.resumed_transfers, 0);
    }
}
