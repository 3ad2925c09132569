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

pub mod admission;
pub mod arc_vllm;
mod by_tag;
mod containers;
mod ghosts;
mod ledger;
mod links;
pub mod lru;
mod order;
pub mod ranked;
mod recent;
pub mod request;
pub mod s3fifo;
pub mod th;
mod two_lists;

use core::fmt::Debug;

use hashbrown::HashMap;

use crate::error::{Error, Result};
use request::{Arrival, EndedKey, RequestId, Tag};

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
pub trait EvictionPolicy: Send + Sync + Debug {
    /// The name by which [`create`] knows the policy.
    fn name(&self) -> &'static str;

    /// Says what time it is, in milliseconds since any fixed instant. Time that goes back stands
    /// still. Policies that order by ticks alone ignore it.
    fn set_time(&mut self, _milliseconds: u64) {}

    /// Says how many entries there can be, where the caller knows it.
    fn set_capacity(&mut self, _entries: usize) {}

    /// A request has arrived. `resident` are its entries that are there, in token order: this is
    /// the request's one access to them.
    fn observe(&mut self, _arrival: &Arrival<'_>, resident: &[EntryId]) {
        self.access_request(resident);
    }

    /// An observed request has ended. `resident` are its entries that are there now, in token
    /// order, those inserted for it included: they take the order of one access to all of them.
    fn finish(&mut self, _id: RequestId, _output_tokens: Option<u32>, resident: &[EntryId]) {
        self.access_request(resident);
    }

    /// A request that nobody told of at its arrival has ended: its one access to its keys, in token
    /// order. This is how vLLM's managers tell their policies.
    fn ended(&mut self, _class: Class, keys: &[EndedKey]) {
        for key in keys.iter().rev() {
            if let Some(entry) = key.entry.filter(|_| key.used) {
                self.access(entry);
            }
        }
    }

    /// Rows of these keys, in token order, are about to be stored, once per request and before
    /// space is made for them: policies that remember what they evicted learn from it.
    fn missed(&mut self, _tags: &[Tag]) {}

    /// Whether [`EvictionPolicy::reuse_probability`] says anything.
    fn predicts(&self) -> bool {
        false
    }

    /// The probability that a key of an observed request is used again within an hour, if the
    /// policy predicts it.
    fn reuse_probability(&self, _tag: Tag) -> Option<f32> {
        None
    }

    /// Adds an entry as the most recent one, unpinned. An entry already there is replaced.
    fn insert(&mut self, entry: EntryId, tag: Tag, placement: Placement);

    /// Adds entries of one request and one class, in token order, `behind` another of its entries that
    /// comes before them. A policy that orders by access puts them just colder than that one; else,
    /// and where that one is not there, they are the most recent ones, the head as the latest.
    fn insert_behind(&mut self, head_first: &[(EntryId, Tag, Placement)], _behind: EntryId) {
        for (entry, tag, placement) in head_first.iter().rev() {
            self.insert(*entry, *tag, *placement);
        }
    }

    /// Puts entries that one request has, in token order, in the order of that request, which counts
    /// as no access to them: some came after it was observed. Policies that order by access make them
    /// the most recent ones.
    fn arrange(&mut self, _head_first: &[EntryId]) {}

    /// Adds many entries to an empty policy. Their placements come in any order, each entry once;
    /// `coldest_first` names the same entries (others are ignored) as calls of
    /// [`EvictionPolicy::insert`] would.
    fn fill(
        &mut self,
        placements: &mut dyn Iterator<Item = (EntryId, Tag, Placement)>,
        coldest_first: &mut dyn Iterator<Item = EntryId>,
    ) {
        let placements: HashMap<EntryId, (Tag, Placement)> = placements
            .map(|(entry, tag, placement)| (entry, (tag, placement)))
            .collect();
        for entry in coldest_first {
            if let Some((tag, placement)) = placements.get(&entry) {
                self.insert(entry, *tag, *placement);
            }
        }
    }

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
    ) -> bool {
        let Some(chosen) = self.next_victims(need, class, protected) else {
            return false;
        };
        for entry in &chosen {
            self.evicted(*entry);
        }
        victims.extend(chosen);
        true
    }

    /// Evicts up to `need` entries for rows of the request that owns `tag`, as
    /// [`EvictionPolicy::evict`] does, and returns how many. A policy that can tell takes only those
    /// that are worth less: the caller leaves the rest of the request's tail out.
    fn evict_for(
        &mut self,
        _tag: Tag,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
        victims: &mut Vec<EntryId>,
    ) -> usize {
        if self.evict(need, class, protected, victims) {
            need
        } else {
            0
        }
    }

    /// Forgets a victim that [`EvictionPolicy::next_victims`] named, as
    /// [`EvictionPolicy::evict`] does: unlike a removed entry it may come back.
    fn evicted(&mut self, entry: EntryId) {
        self.remove(entry);
    }

    /// The victims that [`EvictionPolicy::evict`] would choose now, without forgetting them.
    fn next_victims(
        &mut self,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
    ) -> Option<Vec<EntryId>>;

    /// Tick of the last access to the entry that is the class's next victim. Pinned entries at the
    /// cold end are passed once, not at every call.
    fn coldest(&mut self, class: Class) -> Option<u64>;

    /// The latest tick: the age of what has tick `t` is `now() - t`.
    fn now(&self) -> u64;

    /// Entries looked at so far in search of victims: what eviction costs, on any machine.
    fn visited(&self) -> u64;

    /// The container of `class` that has entries, none of them pinned, and was accessed longest
    /// ago, with the tick of that access. A container's last access is the last insertion or
    /// access of any entry it held, also of one removed since.
    fn coldest_container(&self, class: Class) -> Option<(ContainerId, u64)> {
        self.coldest_containers(class, 1).pop()
    }

    /// Up to `most` containers as of [`EvictionPolicy::coldest_container`], coldest first.
    fn coldest_containers(&self, class: Class, most: usize) -> Vec<(ContainerId, u64)>;

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
pub const POLICIES: &[&str] = &["arc_vllm", "lru", "s3fifo", "th"];

/// Makes an empty policy by its configuration name.
///
/// # Errors
/// [`ErrorKind::Config`](crate::error::ErrorKind::Config) for a name not in [`POLICIES`].
pub fn create(name: &str) -> Result<Box<dyn EvictionPolicy>> {
    create_with(name, None)
}

/// The same, with so many keys in the directory of a policy that has one at most; `None`: its default.
///
/// # Errors
/// As [`create`].
pub fn create_with(name: &str, directory: Option<usize>) -> Result<Box<dyn EvictionPolicy>> {
    match name {
        "arc_vllm" => Ok(Box::new(arc_vllm::ArcVllm::new())),
        "s3fifo" => Ok(Box::new(s3fifo::S3Fifo::new())),
        "lru" => Ok(Box::new(lru::Lru::new())),
        "th" => Ok(Box::new(th::Th::with_directory(directory))),
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
