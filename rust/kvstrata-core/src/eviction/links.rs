//! Doubly linked lists threaded through numbered nodes: no allocation, constant-time moves.

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

    /// The neighbour that was accessed earlier.
    pub(super) const fn colder(self) -> u32 {
        self.colder
    }

    /// The neighbour that was accessed later.
    pub(super) const fn warmer(self) -> u32 {
        self.warmer
    }
}

/// The nodes of a [`List`], by number.
pub(super) trait Nodes {
    /// The links of a node, if there is one of that number.
    fn links(&mut self, number: u32) -> Option<&mut Links>;
}

/// The two ends of a list whose nodes lie in what every method is given.
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
    pub(super) fn push_warmest(&mut self, nodes: &mut impl Nodes, number: u32) {
        let before = self.warmest;
        if let Some(links) = nodes.links(number) {
            *links = Links {
                colder: before,
                warmer: NONE,
            };
        }
        match nodes.links(before) {
            Some(neighbour) => neighbour.warmer = number,
            None => self.coldest = number,
        }
        self.warmest = number;
    }

    /// The node at the warm end, or [`NONE`].
    pub(super) const fn warmest(self) -> u32 {
        self.warmest
    }

    /// Whether there are no nodes.
    pub(super) const fn is_empty(self) -> bool {
        self.coldest == NONE
    }

    /// Puts an unlinked node next to another of this list, on its warm side; at the cold end where
    /// that is [`NONE`].
    pub(super) fn insert_warmer_than(&mut self, nodes: &mut impl Nodes, colder: u32, number: u32) {
        let warmer = match nodes.links(colder) {
            Some(links) => core::mem::replace(&mut links.warmer, number),
            None => core::mem::replace(&mut self.coldest, number),
        };
        if let Some(links) = nodes.links(number) {
            *links = Links { colder, warmer };
        }
        match nodes.links(warmer) {
            Some(links) => links.colder = number,
            None => self.warmest = number,
        }
    }

    /// Takes a node of this list out of it.
    pub(super) fn unlink(&mut self, nodes: &mut impl Nodes, number: u32) {
        let Some(own) = nodes.links(number) else {
            return;
        };
        let links = core::mem::replace(own, Links::unlinked());
        match nodes.links(links.colder) {
            Some(neighbour) => neighbour.warmer = links.warmer,
            None => self.coldest = links.warmer,
        }
        match nodes.links(links.warmer) {
            Some(neighbour) => neighbour.colder = links.colder,
            None => self.warmest = links.colder,
        }
    }
}
