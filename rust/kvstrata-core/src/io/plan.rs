//! Which bytes of a direct transfer can be moved where they are, and which need a bounce.

use std::vec::IntoIter;

use super::{Alignment, Segment};
use crate::buffer::AlignedBuffer;
use crate::buffer::aligned::PAGE_BYTES;
use crate::error::Result;
use crate::sys::fs::IoVector;

/// A piece of memory that goes through the bounce buffer.
#[derive(Clone, Copy, Debug)]
struct Bounced {
    segment: usize,
    segment_offset: usize,
    buffer_offset: usize,
    length: usize,
}

#[derive(Clone, Copy, Debug)]
enum Piece {
    InPlace { address: *mut u8, length: usize },
    Bounced { buffer_offset: usize, length: usize },
}

/// How an operation's segments are moved.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pieces: Vec<Piece>,
    bounced: Vec<Bounced>,
    bounce_bytes: usize,
}

impl Plan {
    /// Plans a transfer that starts at an aligned file offset and has an aligned length. None when
    /// a segment lies outside its memory.
    ///
    /// A segment is moved in place from where both its address and its place in the file are
    /// aligned, up to the last aligned byte; the rest is bounced, together with what follows until
    /// the place in the file is aligned again.
    pub(super) fn new(segments: &[Segment], alignment: Alignment) -> Option<Self> {
        let mut plan = Self::default();
        let mut place = 0_usize;
        for (number, segment) in segments.iter().enumerate() {
            let address = segment.memory.address(segment.offset, segment.length)?;
            let mut done = 0;
            while done < segment.length {
                let left = segment.length - done;
                let start = address.wrapping_add(done);
                let misplaced = place % alignment.offset_bytes;
                let in_place = left - left % alignment.offset_bytes;
                let length = if misplaced != 0 {
                    left.min(alignment.offset_bytes - misplaced)
                } else if start.addr() % alignment.memory_bytes == 0 && in_place > 0 {
                    plan.push_in_place(start, in_place);
                    done += in_place;
                    place = place.checked_add(in_place)?;
                    continue;
                } else {
                    left
                };
                let from = segment.offset.checked_add(done)?;
                plan.push_bounced(number, from, length, alignment)?;
                done += length;
                place = place.checked_add(length)?;
            }
        }
        Some(plan)
    }

    /// Length of the bounce buffer that is needed, in bytes.
    pub(super) const fn bounce_bytes(&self) -> usize {
        self.bounce_bytes
    }

    /// Bytes that are copied.
    pub(super) fn bounced_bytes(&self) -> usize {
        self.bounced.iter().map(|piece| piece.length).sum()
    }

    /// The memory of the transfer, `bounce` standing in for what is not aligned.
    pub(super) fn vectors(&self, bounce: Option<&AlignedBuffer>) -> Vec<IoVector> {
        let base = bounce.map_or(core::ptr::null_mut(), AlignedBuffer::base);
        let vector = |piece: &Piece| match *piece {
            Piece::InPlace { address, length } => IoVector::new(address, length),
            Piece::Bounced {
                buffer_offset,
                length,
            } => IoVector::new(base.wrapping_add(buffer_offset), length),
        };
        self.pieces.iter().map(vector).collect()
    }

    /// Copies the bytes to be written into the bounce buffer.
    pub(super) fn fill(&self, segments: &[Segment], bounce: &mut AlignedBuffer) {
        for (piece, segment) in self.of(segments) {
            let end = piece.buffer_offset + piece.length;
            if let Some(target) = bounce.get_mut(piece.buffer_offset..end) {
                // In bounds: `new` looked at every segment.
                let _ = segment.memory.copy_out(piece.segment_offset, target);
            }
        }
    }

    /// Copies the bytes read from the bounce buffer to where they belong.
    pub(super) fn empty(&self, segments: &[Segment], bounce: &AlignedBuffer) {
        for (piece, segment) in self.of(segments) {
            let end = piece.buffer_offset + piece.length;
            if let Some(source) = bounce.get(piece.buffer_offset..end) {
                // In bounds: `new` looked at every segment.
                let _ = segment.memory.copy_in(piece.segment_offset, source);
            }
        }
    }

    fn of<'a>(&self, segments: &'a [Segment]) -> IntoIter<(Bounced, &'a Segment)> {
        let with_segment =
            |piece: &Bounced| segments.get(piece.segment).map(|segment| (*piece, segment));
        let pieces: Vec<_> = self.bounced.iter().filter_map(with_segment).collect();
        pieces.into_iter()
    }

    fn push_in_place(&mut self, address: *mut u8, length: usize) {
        if let Some(Piece::InPlace {
            address: before,
            length: so_far,
        }) = self.pieces.last_mut()
            && core::ptr::eq(before.wrapping_add(*so_far), address)
        {
            *so_far += length;
            return;
        }
        self.pieces.push(Piece::InPlace { address, length });
    }

    fn push_bounced(
        &mut self,
        segment: usize,
        segment_offset: usize,
        length: usize,
        alignment: Alignment,
    ) -> Option<()> {
        let continues = matches!(self.pieces.last(), Some(Piece::Bounced { .. }));
        if !continues {
            self.bounce_bytes = self
                .bounce_bytes
                .checked_next_multiple_of(alignment.memory_bytes)?;
        }
        let buffer_offset = self.bounce_bytes;
        self.bounced.push(Bounced {
            segment,
            segment_offset,
            buffer_offset,
            length,
        });
        self.bounce_bytes = buffer_offset.checked_add(length)?;
        match self.pieces.last_mut() {
            Some(Piece::Bounced { length: so_far, .. }) => *so_far += length,
            _ => self.pieces.push(Piece::Bounced {
                buffer_offset,
                length,
            }),
        }
        Some(())
    }
}

/// Bounce buffers are kept from one operation to the next up to this many bytes in all.
const KEPT_BYTES_MAX: usize = 4 << 20;

/// A thread's bounce buffers.
#[derive(Debug, Default)]
pub struct Bounce {
    kept: Vec<AlignedBuffer>,
    kept_bytes: usize,
}

impl Bounce {
    /// A buffer of at least `bytes`; None for no bytes.
    pub(super) fn take(&mut self, bytes: usize) -> Result<Option<AlignedBuffer>> {
        if bytes == 0 {
            return Ok(None);
        }
        if let Some(fits) = self.kept.iter().position(|buffer| buffer.len() >= bytes) {
            let buffer = self.kept.swap_remove(fits);
            self.kept_bytes -= buffer.len();
            return Ok(Some(buffer));
        }
        let size = bytes.checked_next_power_of_two().unwrap_or(bytes);
        AlignedBuffer::zeroed(size, PAGE_BYTES).map(Some)
    }

    /// Gives a buffer back for another operation.
    pub(super) fn keep(&mut self, buffer: AlignedBuffer) {
        while self.kept_bytes + buffer.len() > KEPT_BYTES_MAX {
            let Some(dropped) = self.kept.pop() else {
                return;
            };
            self.kept_bytes -= dropped.len();
        }
        self.kept_bytes += buffer.len();
        self.kept.push(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Memory;
    use crate::sys::sync::Arc;

    const SECTOR: Alignment = Alignment {
        memory_bytes: 512,
        offset_bytes: 512,
    };

    fn memory(length: usize) -> Memory {
        let mut buffer = AlignedBuffer::zeroed(length, 4096).unwrap();
        for (byte, value) in buffer.iter_mut().zip((0_u8..251).cycle()) {
            *byte = value;
        }
        Memory::Buffer(Arc::new(buffer))
    }

    fn segment(memory: &Memory, offset: usize, length: usize) -> Segment {
        Segment {
            memory: memory.clone(),
            offset,
            length,
        }
    }

    fn shape(plan: &Plan) -> Vec<(char, usize)> {
        let piece = |piece: &Piece| match piece {
            Piece::InPlace { length, .. } => ('p', *length),
            Piece::Bounced { length, .. } => ('b', *length),
        };
        plan.pieces.iter().map(piece).collect()
    }

    #[test]
    fn aligned_neighbours_become_one_vector() {
        let arena = memory(1 << 16);
        let segments = [segment(&arena, 0, 4096), segment(&arena, 4096, 8192)];
        let plan = Plan::new(&segments, SECTOR).unwrap();
        assert_eq!(shape(&plan), [('p', 12288)]);
        assert_eq!(plan.bounced_bytes(), 0);
    }

    #[test]
    fn of_an_odd_row_only_the_tail_and_its_padding_are_bounced() {
        let (arena, zero) = (memory(1 << 16), memory(4096));
        let segments = [
            segment(&arena, 0, 5000),
            segment(&zero, 0, 3192),
            segment(&arena, 8192, 4096),
        ];
        let plan = Plan::new(&segments, SECTOR).unwrap();
        assert_eq!(shape(&plan), [('p', 4608), ('b', 3584), ('p', 4096)]);
        assert_eq!(plan.bounced_bytes(), 3584);
    }

    #[test]
    fn a_row_at_an_odd_address_is_bounced_whole() {
        let arena = memory(1 << 16);
        let segments = [segment(&arena, 64, 8192), segment(&arena, 16384, 4096)];
        let plan = Plan::new(&segments, SECTOR).unwrap();
        assert_eq!(shape(&plan), [('b', 8192), ('p', 4096)]);
    }

    #[test]
    fn without_requirements_nothing_is_bounced() {
        let arena = memory(1 << 16);
        let segments = [segment(&arena, 3, 17), segment(&arena, 100, 1)];
        let plan = Plan::new(&segments, Alignment::NONE).unwrap();
        assert_eq!(shape(&plan), [('p', 17), ('p', 1)]);
    }

    #[test]
    fn a_segment_outside_its_memory_is_no_plan() {
        let arena = memory(4096);
        assert!(Plan::new(&[segment(&arena, 1, 4096)], SECTOR).is_none());
        assert!(Plan::new(&[segment(&arena, usize::MAX, 2)], SECTOR).is_none());
    }

    #[test]
    fn what_is_bounced_out_and_back_lands_where_it_was() {
        let (source, target) = (memory(1 << 15), memory(1 << 15));
        let blank = vec![0; 1 << 15];
        assert!(target.copy_in(0, &blank));
        let pieces = [(3, 700), (2048, 4000), (9000, 1), (16384, 3491)];
        let of = |memory| pieces.map(|(offset, length)| segment(memory, offset, length));
        let plan = Plan::new(&of(&source), SECTOR).unwrap();
        let mut bounce = Bounce::default();
        let mut buffer = bounce.take(plan.bounce_bytes()).unwrap().unwrap();
        plan.fill(&of(&source), &mut buffer);
        plan.empty(&of(&target), &buffer);
        for piece in &plan.bounced {
            let (mut was, mut is) = (vec![0; piece.length], vec![1; piece.length]);
            let offset = pieces[piece.segment].0 + (piece.segment_offset - pieces[piece.segment].0);
            assert!(source.copy_out(offset, &mut was) && target.copy_out(offset, &mut is));
            assert_eq!(was, is);
        }
        assert!(plan.bounced_bytes() > 700);
    }
}
