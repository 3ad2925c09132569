//! How an arena is cut: the size classes and the length of a slab.
//!
//! A slab's length decides what is lost. Rows whose size does not divide it leave a tail of up to a
//! row in every slab; long slabs make these tails small, and then the class with little demand
//! leaves much of its one slab empty. Of all lengths that are a multiple of some row size,
//! [`Geometry::new`] takes the one for which the sum of both is least.

use super::SizeClass;
use crate::error::{Error, Result};

/// Most slabs of an arena that has several size classes, so that their records stay small.
const SLABS_MAX: u64 = 4096;
/// Longest slab in rows of any one class: a tail is then less than half a per cent of it.
const ROWS_MAX: u64 = 256;
/// Most size classes.
const CLASSES_MAX: usize = 256;
/// The parts of an arena that losses are counted in.
const PARTS: u128 = 1 << 40;

/// Size classes and slabs of an arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    arena_bytes: u64,
    align: u64,
    /// Per class, bytes from one slot to the next. From the largest to the smallest.
    strides: Vec<u64>,
    /// Per row size as given, its class.
    class_of: Vec<SizeClass>,
    slab_bytes: u64,
    slabs: u32,
    tail_bytes: u64,
}

impl Geometry {
    /// Cuts an arena of `arena_bytes` for rows of the sizes `row_bytes`, one per group. A slot
    /// begins at a multiple of `align`; rows of equal size after alignment are one class.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::error::ErrorKind::Config) for no row sizes or too many, a row
    /// or an alignment of no bytes, and for an arena that does not hold the largest row.
    pub fn new(arena_bytes: u64, align: u64, row_bytes: &[u64]) -> Result<Self> {
        if align == 0 || !align.is_power_of_two() {
            return Err(Error::config(format!(
                "a slot alignment of {align} bytes is not a power of two"
            )));
        }
        let rounded = row_bytes
            .iter()
            .map(|bytes| match bytes.checked_next_multiple_of(align) {
                Some(stride) if *bytes > 0 => Ok(stride),
                _ => Err(Error::config(format!("a row of {bytes} bytes is no row"))),
            })
            .collect::<Result<Vec<u64>>>()?;
        let mut strides = rounded.clone();
        strides.sort_unstable_by(|one, other| other.cmp(one));
        strides.dedup();
        let Some(largest) = strides.first().copied() else {
            return Err(Error::config("slots without a row size"));
        };
        if strides.len() > CLASSES_MAX {
            return Err(Error::config(format!(
                "{} sizes of rows; {CLASSES_MAX} at most are possible",
                strides.len()
            )));
        }
        if largest > arena_bytes {
            return Err(Error::config(format!(
                "{arena_bytes} bytes hold no row of {largest} bytes"
            )));
        }
        let class_of = rounded
            .iter()
            .map(|stride| {
                let class = strides.iter().position(|other| other == stride);
                SizeClass(class.and_then(|at| u16::try_from(at).ok()).unwrap_or(0))
            })
            .collect();
        let slab_bytes = best_slab(arena_bytes, &strides);
        let slabs = u32::try_from(arena_bytes / slab_bytes)
            .map_err(|_| Error::config(format!("{arena_bytes} bytes make too many slabs")))?;
        Ok(Self {
            arena_bytes,
            align,
            strides,
            class_of,
            slab_bytes,
            slabs,
            tail_bytes: arena_bytes % slab_bytes,
        })
    }

    /// Bytes of the arena.
    pub const fn arena_bytes(&self) -> u64 {
        self.arena_bytes
    }

    /// What every slot's offset is a multiple of.
    pub const fn align(&self) -> u64 {
        self.align
    }

    /// Number of size classes.
    pub const fn classes(&self) -> usize {
        self.strides.len()
    }

    /// Bytes from one slot of a class to the next.
    pub fn stride(&self, class: SizeClass) -> Option<u64> {
        self.strides.get(usize::from(class.0)).copied()
    }

    /// The class of the group at this position of the row sizes given.
    pub fn class_of(&self, group: usize) -> Option<SizeClass> {
        self.class_of.get(group).copied()
    }

    /// Bytes of a whole slab.
    pub const fn slab_bytes(&self) -> u64 {
        self.slab_bytes
    }

    /// Number of whole slabs.
    pub const fn slabs(&self) -> u32 {
        self.slabs
    }

    /// Bytes of the short slab at the end; 0 when there is none.
    pub const fn tail_bytes(&self) -> u64 {
        self.tail_bytes
    }

    /// Rows of a class that fit in a whole slab, or in the tail.
    pub fn rows_in(&self, tail: bool, class: SizeClass) -> u32 {
        let bytes = if tail {
            self.tail_bytes
        } else {
            self.slab_bytes
        };
        let rows = self.stride(class).map_or(0, |stride| bytes / stride);
        u32::try_from(rows).unwrap_or(u32::MAX)
    }

    /// Slots of a class when it has the whole arena.
    pub fn rows(&self, class: SizeClass) -> u64 {
        u64::from(self.slabs) * u64::from(self.rows_in(false, class))
            + u64::from(self.rows_in(true, class))
    }
}

/// The slab length that loses least. With one class nothing is lost to any length.
fn best_slab(arena: u64, strides: &[u64]) -> u64 {
    let largest = strides.first().copied().unwrap_or(arena).max(1);
    let shortest = largest.max(arena.div_ceil(SLABS_MAX));
    let longest = shortest.max(arena / u64::try_from(strides.len()).unwrap_or(1));
    let mut best = (lost(arena, largest, strides), largest);
    if largest < shortest {
        best.0 = u128::MAX;
    }
    for stride in strides {
        let first = shortest.div_ceil(*stride);
        for rows in first..first.saturating_add(ROWS_MAX) {
            let length = rows.saturating_mul(*stride);
            if length > longest.max(largest) || length > arena {
                break;
            }
            best = best.min((lost(arena, length, strides), length));
        }
    }
    best.1
}

/// What a slab length costs, in [`PARTS`] of the arena: the worst tail of a slab, half a slab for
/// every class but one, and what no row can use at the arena's end.
fn lost(arena: u64, length: u64, strides: &[u64]) -> u128 {
    let part = |bytes: u64, of: u64| u128::from(bytes) * PARTS / u128::from(of.max(1));
    let tail = strides
        .iter()
        .map(|stride| length % stride)
        .max()
        .unwrap_or(0);
    let others = u64::try_from(strides.len().saturating_sub(1)).unwrap_or(0);
    let end = strides
        .iter()
        .map(|stride| (arena % length) % stride)
        .min()
        .unwrap_or(0);
    part(tail, length) + part(others.saturating_mul(length) / 2, arena) + part(end, arena)
}
