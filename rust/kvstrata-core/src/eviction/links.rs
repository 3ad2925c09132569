//! Doubly linked lists threaded through a slice: no allocation, constant-time moves.

/// No node.
pub(super) const NONE: u32 = u32::MAX;

/// A node's neighbours in the one list it can be in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    colder: u32,
    warmer: u32,
}

impl Links {
    /// Links of a node that is in no list.
    pub(super) const fn unlinked() -> Self {
        Self {
            colder: NONE,
            warmer: NONE,
        }
    }

    /// The neighbour that was accessed later.
    pub(super) const fn warmer(self) -> u32 {
        self.warmer
    }
}

/// A node of a [`List`].
pub(super) trait Linked {
    /// The node's links.
    fn links(&mut self) -> &mut Links;
}

/// The two ends of a list whose nodes lie in a slice that every method is given.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    coldest: u32,
    warmest: u32,
}

impl List {
    /// A list without nodes.
    pub(super) const fn new() -> Self {
        Self {
            coldest: NONE,
            warmest: NONE,
        }
    }

    /// The node at the cold end, or [`NONE`].
    pub(super) const fn coldest(self) -> u32 {
        self.coldest
    }

    /// Puts an unlinked node at the warm end.
    pub(super) fn push_warmest<N: Linked>(&mut self, nodes: &mut [N], number: u32) {
        let before = self.warmest;
        if let Some(node) = node(nodes, number) {
            *node.links() = Links {
                colder: before,
                warmer: NONE,
            };
        }
        match node(nodes, before) {
            Some(neighbour) => neighbour.links().warmer = number,
            None => self.coldest = number,
        }
        self.warmest = number;
    }

    /// Takes a node of this list out of it.
    pub(super) fn unlink<N: Linked>(&mut self, nodes: &mut [N], number: u32) {
        let Some(own) = node(nodes, number) else {
            return;
        };
        let links = core::mem::replace(own.links(), Links::unlinked());
        match node(nodes, links.colder) {
            Some(neighbour) => neighbour.links().warmer = links.warmer,
            None => self.coldest = links.warmer,
        }
        match node(nodes, links.warmer) {
            Some(neighbour) => neighbour.links().colder = links.colder,
            None => self.warmest = links.colder,
        }
    }
}

fn node<N>(nodes: &mut [N], number: u32) -> Option<&mut N> {
    usize::try_from(number)
        .ok()
        .and_then(|index| nodes.get_mut(index))
}
