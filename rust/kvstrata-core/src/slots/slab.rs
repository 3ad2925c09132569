//! A piece of the arena that serves rows of one size.

use super::{Owner, SizeClass};

/// Nobody, and nowhere.
pub(super) const FREE: u32 = u32::MAX;

#[derive(Debug)]
pub(super) struct Slab {
    /// First byte in the arena.
    pub(super) offset: u64,
    /// What it serves; none while it is empty.
    pub(super) class: Option<SizeClass>,
    /// Slots it has for that class.
    pub(super) rows: u32,
    /// Slots that are taken.
    pub(super) used: u32,
    /// Its place in the class's list of slabs with free slots; [`FREE`] when it is not there.
    pub(super) open_at: u32,
    /// Slots below this length were taken once since the slab serves its class.
    owners: Vec<Owner>,
    /// Of these, the ones given back.
    released: Vec<u32>,
}

impl Slab {
    pub(super) const fn new(offset: u64) -> Self {
        Self {
            offset,
            class: None,
            rows: 0,
            used: 0,
            open_at: FREE,
            owners: Vec::new(),
            released: Vec::new(),
        }
    }

    pub(super) const fn is_full(&self) -> bool {
        self.used == self.rows
    }

    pub(super) fn serve(&mut self, class: SizeClass, rows: u32) {
        self.class = Some(class);
        self.rows = rows;
    }

    /// Forgets what it served. It must be empty.
    pub(super) fn retire(&mut self) {
        self.class = None;
        self.rows = 0;
        self.owners = Vec::new();
        self.released = Vec::new();
    }

    pub(super) fn take(&mut self, owner: Owner) -> Option<u32> {
        if self.is_full() || owner == FREE {
            return None;
        }
        let row = if let Some(row) = self.released.pop() {
            *self.owners.get_mut(usize::try_from(row).ok()?)? = owner;
            row
        } else {
            let row = u32::try_from(self.owners.len()).ok()?;
            self.owners.push(owner);
            row
        };
        self.used += 1;
        Some(row)
    }

    /// Whether the slot was taken, and is free now.
    pub(super) fn release(&mut self, row: u32) -> bool {
        let Some(owner) = usize::try_from(row)
            .ok()
            .and_then(|row| self.owners.get_mut(row))
        else {
            return false;
        };
        if *owner == FREE {
            return false;
        }
        *owner = FREE;
        self.released.push(row);
        self.used -= 1;
        true
    }

    pub(super) fn owner(&self, row: u32) -> Option<Owner> {
        self.owners
            .get(usize::try_from(row).ok()?)
            .copied()
            .filter(|owner| *owner != FREE)
    }

    pub(super) fn owners(&self) -> impl Iterator<Item = Owner> + '_ {
        self.owners.iter().copied()
    }
}
