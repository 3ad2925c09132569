//! Which rows go when space is needed.
//!
//! A policy is pure: it knows handles, not keys, files or time. Its caller (the tier) holds one
//! lock around it and the index, so that "who may be evicted" and "what is found" never differ.
//!
//! *Ticks.* Every insertion and access takes the next tick, a counter that never repeats. Ticks
//! of one policy compare across classes, so a caller can move space to the class that needs it.
//!
//! *Order within a request.* A prefix is useless without its head, so its tail must go first.
//! Rows of a request are therefore inserted and accessed tail first
//! ([`EvictionPolicy::access_request`] does that), once per request, at its start. Pinning and
//! unpinning change no order: rows whose loads complete in any order keep the request's order.

mod containers;
mod links;
pub mod lru;

use core::fmt::Debug;

use crate::error::{Error, Result};

/// Handle of a row in the index: dense, given by the index, reused after removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryId(pub u32);

/// Rows that can take each other's place: one class per group, as rows of a group have one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Class(pub u16);

/// What is given back to the file system as a whole: a row file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContainerId(pub u32);

/// Where an entry lives. All entries of a container have one class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Which rows it can be exchanged for.
    pub class: Class,
    /// The file that holds it.
    pub container: ContainerId,
}

/// Chooses victims among the entries that this process owns.
///
/// Invariants: a pinned entry is never a victim; an entry is a victim at most once per insertion.
/// Handles that the policy does not know are ignored by every method, as is an unpin without a
/// pin: neither may cost a row or panic. A handle whose entry was removed while pinned may be
/// given to another entry only after its last unpin.
pub trait EvictionPolicy: Send + Debug {
    /// The name by which [`create`] knows the policy.
    fn name(&self) -> &'static str;

    /// Adds an entry as the most recent one, unpinned. An entry already there is replaced.
    fn insert(&mut self, entry: EntryId, placement: Placement);

    /// Makes an entry the most recent one, pinned or not.
    fn access(&mut self, entry: EntryId);

    /// Applies one request's access to `head_first`, its rows in token order: the head ends up
    /// as the most recent, the tail as the oldest of them.
    fn access_request(&mut self, head_first: &[EntryId]) {
        for entry in head_first.iter().rev() {
            self.access(*entry);
        }
    }

    /// Forgets an entry, pinned or not.
    fn remove(&mut self, entry: EntryId);

    /// Keeps an entry from being a victim until as many [`EvictionPolicy::unpin`] follow.
    fn pin(&mut self, entry: EntryId);

    /// Takes one pin back. The entry keeps its place in the order.
    fn unpin(&mut self, entry: EntryId);

    /// Number of unpinned entries of a class; constant time.
    fn evictable(&self, class: Class) -> usize;

    /// Appends `need` victims of `class`, coldest first, to `victims`, forgets them and returns
    /// true; or changes nothing and returns false when fewer can go.
    ///
    /// `protected` names entries that must stay although they are not pinned. Takes time
    /// proportional to `need` and the protected entries seen, amortised over pins.
    fn evict(
        &mut self,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
        victims: &mut Vec<EntryId>,
    ) -> bool;

    /// Tick of the last access to the entry that is the class's next victim.
    fn coldest(&self, class: Class) -> Option<u64>;

    /// The container of `class` that has entries, none of them pinned, and was accessed longest
    /// ago, with the tick of that access. A container's last access is the last insertion or
    /// access of any entry it held, also of one removed since.
    fn coldest_container(&self, class: Class) -> Option<(ContainerId, u64)>;

    /// Forgets all entries of a container and appends them to `victims`, unless one of them is
    /// pinned: then nothing changes and false is returned.
    ///
    /// Takes time proportional to all handles; files are given back rarely.
    fn remove_container(&mut self, container: ContainerId, victims: &mut Vec<EntryId>) -> bool;

    /// Number of entries, pinned ones included.
    fn len(&self) -> usize;

    /// Whether there are no entries.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory the policy holds.
    fn memory_bytes(&self) -> usize;
}

/// Names that [`create`] accepts.
pub const POLICIES: &[&str] = &["lru"];

/// Makes an empty policy by its configuration name.
///
/// # Errors
/// [`ErrorKind::Config`](crate::error::ErrorKind::Config) for a name not in [`POLICIES`].
pub fn create(name: &str) -> Result<Box<dyn EvictionPolicy>> {
    match name {
        "lru" => Ok(Box::new(lru::Lru::new())),
        _ => Err(Error::config(format!(
            "policy {name:?} is not known; one of {} is expected",
            POLICIES.join(", ")
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_is_created_by_its_own_name() {
        for name in POLICIES {
            assert_eq!(create(name).unwrap().name(), *name);
        }
    }

    #[test]
    fn an_unknown_policy_is_refused_with_the_names_that_exist() {
        let error = create("fifo").unwrap_err().to_string();
        assert!(
            error.contains("\"fifo\"") && error.contains("lru"),
            "{error}"
        );
    }
}
