//! Keys that were evicted, in order, bounded.

use super::by_tag::ByTag;
use super::links::{Links, List, NONE, Nodes};
use super::request::Tag;
use crate::sys::prefetch::prefetch;

#[derive(Clone, Copy, Debug)]
struct Ghost {
    tag: Tag,
    links: Links,
}

impl Nodes for Vec<Ghost> {
    fn links(&mut self, number: u32) -> Option<&mut Links> {
        let ghost = self.get_mut(usize::try_from(number).ok()?)?;
        Some(&mut ghost.links)
    }
}

/// The keys; 16 bytes each, and 9 to 10 in a hash table.
#[derive(Debug)]
pub(super) struct Ghosts {
    all: Vec<Ghost>,
    free: Vec<u32>,
    order: List,
    by_tag: ByTag,
}

impl Default for Ghosts {
    fn default() -> Self {
        Self {
            all: Vec::new(),
            free: Vec::new(),
            order: List::new(),
            by_tag: ByTag::default(),
        }
    }
}

fn tag_at(ghosts: &[Ghost], number: u32) -> Option<Tag> {
    let at = usize::try_from(number).ok()?;
    ghosts.get(at).map(|ghost| ghost.tag)
}

impl Ghosts {
    /// Number of keys.
    pub(super) fn len(&self) -> usize {
        self.by_tag.len()
    }

    fn find(&self, tag: Tag) -> Option<u32> {
        let same = |number| tag_at(&self.all, number) == Some(tag);
        self.by_tag.find(tag, same)
    }

    /// Fetches the place of a key: it will be looked for soon.
    pub(super) fn prefetch(&self, tag: Tag) {
        self.by_tag.prefetch(tag);
    }

    /// Makes a key the latest one; false if it is not there.
    pub(super) fn renew(&mut self, tag: Tag) -> bool {
        let Some(number) = self.find(tag) else {
            return false;
        };
        self.order.unlink(&mut self.all, number);
        self.order.push_warmest(&mut self.all, number);
        true
    }

    /// Adds a key as the latest one.
    pub(super) fn insert(&mut self, tag: Tag) {
        if self.renew(tag) {
            return;
        }
        let ghost = Ghost {
            tag,
            links: Links::unlinked(),
        };
        let number = if let Some(number) = self.free.pop() {
            let at = usize::try_from(number).ok();
            if let Some(place) = at.and_then(|at| self.all.get_mut(at)) {
                *place = ghost;
            }
            number
        } else {
            self.all.push(ghost);
            u32::try_from(self.all.len() - 1).unwrap_or(NONE)
        };
        self.order.push_warmest(&mut self.all, number);
        let all = &self.all;
        let tag_of = |number| tag_at(all, number).unwrap_or(Tag(0));
        let ask = |number| prefetch(usize::try_from(number).ok().and_then(|at| all.get(at)));
        self.by_tag.insert(tag, number, tag_of, ask);
    }

    /// Takes a key out; false if it is not there.
    pub(super) fn remove(&mut self, tag: Tag) -> bool {
        let Some(number) = self.find(tag) else {
            return false;
        };
        self.order.unlink(&mut self.all, number);
        self.by_tag.remove(tag, number);
        self.free.push(number);
        true
    }

    /// Forgets the earliest keys until no more than `most` are left.
    pub(super) fn trim(&mut self, most: usize) {
        while self.len() > most {
            let Some(tag) = tag_at(&self.all, self.order.coldest()) else {
                return;
            };
            self.remove(tag);
        }
    }

    /// Bytes of memory held.
    pub(super) fn memory_bytes(&self) -> usize {
        self.all.capacity() * size_of::<Ghost>()
            + self.free.capacity() * size_of::<u32>()
            + self.by_tag.memory_bytes()
    }
}
