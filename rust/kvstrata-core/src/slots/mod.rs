//! Slots of exactly the bytes of a row, for rows of several sizes in one arena.
//!
//! The arena is cut into *slabs* of one length ([`geometry`] says which); what is left at its end is
//! a shorter slab of its own. A slab serves rows of one size class at a time, one after the other
//! from its first byte, and none while it is empty: then any class may take it. Nothing is padded
//! but to the alignment, and what no row can use is a slab's tail.
//!
//! The idea is that of slab allocators (Bonwick, 1994) and of memcached's slab classes; moving a
//! slab to another class is the caller's decision ([`crate::cpu`]), who knows which rows may go.
//!
//! Pure: no clock, no files, no threads, no memory but its own. Taking and releasing a slot takes
//! constant time.

pub mod geometry;
mod slab;

use crate::error::Result;
pub use geometry::Geometry;
use slab::{FREE, Slab};

/// Rows of one size: what can take each other's slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SizeClass(pub u16);

impl SizeClass {
    /// The class of this number.
    pub fn at(number: usize) -> Option<Self> {
        u16::try_from(number).ok().map(Self)
    }
}

/// Number of a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlabId(pub u32);

/// Who has a slot; [`Owner::MAX`] is nobody.
pub type Owner = u32;

/// A slot that is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot {
    /// The slab it is in.
    pub slab: SlabId,
    /// Number of the row in the slab.
    pub row: u32,
}

/// The slabs of an arena and who has their slots; see the module.
#[derive(Debug)]
pub struct Slots {
    geometry: Geometry,
    slabs: Vec<Slab>,
    /// Per class, the slabs that serve it and have a free slot; a slab knows its place here.
    open: Vec<Vec<u32>>,
    /// Per class, free slots of the slabs that serve it.
    free: Vec<u64>,
    /// Per class, slots taken.
    taken: Vec<u64>,
    /// Whole slabs that serve no class.
    idle: Vec<u32>,
    /// Whether the short slab at the end of the arena exists and serves no class.
    tail_idle: bool,
}

impl Slots {
    /// Cuts an arena; no slot is taken yet.
    ///
    /// # Errors
    /// As [`Geometry::new`].
    pub fn new(arena_bytes: u64, align: u64, row_bytes: &[u64]) -> Result<Self> {
        let geometry = Geometry::new(arena_bytes, align, row_bytes)?;
        let whole = geometry.slabs();
        let mut slabs: Vec<Slab> = (0..whole)
            .map(|number| Slab::new(u64::from(number) * geometry.slab_bytes()))
            .collect();
        let has_tail = geometry.tail_bytes() > 0;
        if has_tail {
            slabs.push(Slab::new(u64::from(whole) * geometry.slab_bytes()));
        }
        let classes = geometry.classes();
        Ok(Self {
            geometry,
            slabs,
            open: vec![Vec::new(); classes],
            free: vec![0; classes],
            taken: vec![0; classes],
            // Taken from the end: the first slab first.
            idle: (0..whole).rev().collect(),
            tail_idle: has_tail,
        })
    }

    /// How the arena is cut.
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Takes a slot for a row of `class`: in a slab that serves the class, else in an empty one.
    pub fn take(&mut self, class: SizeClass, owner: Owner) -> Option<Slot> {
        let at = usize::from(class.0);
        if self.open.get(at)?.is_empty() {
            self.adopt(class)?;
        }
        let number = *self.open.get(at)?.last()?;
        let slab = self.slab_mut(number)?;
        let row = slab.take(owner)?;
        if slab.is_full() {
            slab.open_at = FREE;
            self.open.get_mut(at)?.pop();
        }
        *self.free.get_mut(at)? -= 1;
        *self.taken.get_mut(at)? += 1;
        Some(Slot {
            slab: SlabId(number),
            row,
        })
    }

    /// Gives a slot back; one that is not taken is ignored. The slab that becomes empty serves no
    /// class any more.
    pub fn release(&mut self, slot: Slot) {
        let number = slot.slab.0;
        let Some(slab) = self.slab_mut(number) else {
            return;
        };
        let Some(class) = slab.class else {
            return;
        };
        let was_full = slab.is_full();
        if !slab.release(slot.row) {
            return;
        }
        let (empty, rows) = (slab.used == 0, u64::from(slab.rows));
        let at = usize::from(class.0);
        change(&mut self.taken, at, |taken| taken.saturating_sub(1));
        change(&mut self.free, at, |free| free + 1);
        if was_full {
            self.list_open(number, at);
        }
        if empty {
            self.unlist_open(number, at);
            change(&mut self.free, at, |free| free.saturating_sub(rows));
            if let Some(slab) = self.slab_mut(number) {
                slab.retire();
            }
            if self.is_tail(number) {
                self.tail_idle = true;
            } else {
                self.idle.push(number);
            }
        }
    }

    /// First byte of a slot in the arena; `None` for a slot that is not taken.
    pub fn offset(&self, slot: Slot) -> Option<u64> {
        let slab = self.slab(slot.slab.0)?;
        slab.owner(slot.row)?;
        let stride = self.geometry.stride(slab.class?)?;
        Some(slab.offset + u64::from(slot.row) * stride)
    }

    /// Who has the slots of a slab.
    pub fn owners(&self, slab: SlabId) -> impl Iterator<Item = Owner> + '_ {
        self.slab(slab.0)
            .into_iter()
            .flat_map(|slab| slab.owners().filter(|owner| *owner != FREE))
    }

    /// The class a slab serves.
    pub fn class_of(&self, slab: SlabId) -> Option<SizeClass> {
        self.slab(slab.0)?.class
    }

    /// Slots of a slab that are taken.
    pub fn used(&self, slab: SlabId) -> u32 {
        self.slab(slab.0).map_or(0, |slab| slab.used)
    }

    /// Rows of `class` that fit in a slab, whatever it serves now.
    pub fn rows_of(&self, slab: SlabId, class: SizeClass) -> u32 {
        self.geometry.rows_in(self.is_tail(slab.0), class)
    }

    /// Free slots of the slabs that serve `class`.
    pub fn free(&self, class: SizeClass) -> u64 {
        self.free.get(usize::from(class.0)).copied().unwrap_or(0)
    }

    /// Slots of `class` that are taken.
    pub fn taken(&self, class: SizeClass) -> u64 {
        self.taken.get(usize::from(class.0)).copied().unwrap_or(0)
    }

    /// Whole slabs that serve no class.
    pub fn idle(&self) -> u32 {
        u32::try_from(self.idle.len()).unwrap_or(u32::MAX)
    }

    /// Whether the short slab at the end serves no class.
    pub const fn tail_is_idle(&self) -> bool {
        self.tail_idle
    }

    /// Makes an empty slab serve `class`. The tail is taken first: fewer rows fit there, and it is
    /// of no use to larger ones.
    fn adopt(&mut self, class: SizeClass) -> Option<()> {
        let tail_rows = self.geometry.rows_in(true, class);
        let (number, rows) = if self.tail_idle && tail_rows > 0 {
            self.tail_idle = false;
            (self.geometry.slabs(), tail_rows)
        } else {
            (self.idle.pop()?, self.geometry.rows_in(false, class))
        };
        self.slab_mut(number)?.serve(class, rows);
        let at = usize::from(class.0);
        self.list_open(number, at);
        change(&mut self.free, at, |free| free + u64::from(rows));
        Some(())
    }

    const fn is_tail(&self, number: u32) -> bool {
        number == self.geometry.slabs()
    }

    fn list_open(&mut self, number: u32, at: usize) {
        let Some(list) = self.open.get_mut(at) else {
            return;
        };
        let place = u32::try_from(list.len()).unwrap_or(FREE);
        list.push(number);
        if let Some(slab) = self.slab_mut(number) {
            slab.open_at = place;
        }
    }

    fn unlist_open(&mut self, number: u32, at: usize) {
        let Some(place) = self
            .slab_mut(number)
            .map(|slab| core::mem::replace(&mut slab.open_at, FREE))
        else {
            return;
        };
        let Some(list) = self.open.get_mut(at) else {
            return;
        };
        let Some(index) = usize::try_from(place)
            .ok()
            .filter(|index| *index < list.len())
        else {
            return;
        };
        list.swap_remove(index);
        let moved = list.get(index).copied();
        if let Some(slab) = moved.and_then(|number| self.slab_mut(number)) {
            slab.open_at = place;
        }
    }

    fn slab(&self, number: u32) -> Option<&Slab> {
        self.slabs.get(usize::try_from(number).ok()?)
    }

    fn slab_mut(&mut self, number: u32) -> Option<&mut Slab> {
        self.slabs.get_mut(usize::try_from(number).ok()?)
    }
}

fn change(counts: &mut [u64], at: usize, by: impl FnOnce(u64) -> u64) {
    if let Some(count) = counts.get_mut(at) {
        *count = by(*count);
    }
}
