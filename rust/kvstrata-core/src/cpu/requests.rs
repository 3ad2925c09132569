//! Requests that use the tier: which rows each has, in the order of its prompt, until it ends.

use hashbrown::HashMap;

use super::entries::Entries;
use super::path::{Path, Row};
use super::{CpuTier, Handle};
use crate::eviction::request::{Arrival, Context, RequestId, Tag};
use crate::eviction::{Class, EntryId};
use crate::key::Key;

/// For whom rows are stored or loaded.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asker<'a> {
    /// Its number; 0 for nobody.
    pub request: u32,
    /// For each key of the call the token of the prompt that its chunk ends with, where that is known.
    pub ends: &'a [Option<u64>],
}

impl Asker<'_> {
    /// Nobody: keys are taken to be in the order of one prompt, group by group.
    pub const NOBODY: Self = Asker {
        request: 0,
        ends: &[],
    };

    pub(super) fn end(&self, position: usize) -> Option<u64> {
        self.ends.get(position).copied().flatten()
    }
}

/// A key of a request that arrives: where its chunk ends, what stands for it, and its row.
type Chunk = (u64, Tag, Option<(Handle, EntryId)>);

/// What is known of one request.
#[derive(Debug, Default)]
struct Own {
    /// Whether its access was counted when it arrived.
    is_observed: bool,
    /// Its rows by class.
    paths: Vec<Path>,
    /// By group, the last token of keys that it offered to store.
    offered: Vec<u64>,
}

impl Own {
    /// Its rows of a class, to add to them.
    fn path(&mut self, class: Class) -> Option<&mut Path> {
        let at = usize::from(class.0);
        if self.paths.len() <= at {
            self.paths.resize_with(at + 1, Path::default);
        }
        self.paths.get_mut(at)
    }
}

/// The requests, by number.
#[derive(Debug, Default)]
pub(super) struct Requests {
    open: HashMap<u32, Own>,
}

impl Requests {
    /// Whether a request's access was counted when it arrived.
    pub(super) fn is_observed(&self, request: u32) -> bool {
        self.open.get(&request).is_some_and(|own| own.is_observed)
    }

    /// Number of requests that were observed and have not ended.
    pub(super) fn observed(&self) -> usize {
        self.open.values().filter(|own| own.is_observed).count()
    }

    /// By group, the last token of the keys that a request offered to store.
    pub(super) fn offered_until(&self, request: u32) -> Vec<u64> {
        let own = self.open.get(&request);
        own.map_or_else(Vec::new, |own| own.offered.clone())
    }

    /// Notes that a request offered keys of a group up to token `end` to store.
    pub(super) fn offered(&mut self, request: u32, group: usize, end: u64) {
        if request == 0 {
            return;
        }
        let own = self.open.entry(request).or_default();
        if own.offered.len() <= group {
            own.offered.resize(group + 1, 0);
        }
        if let Some(until) = own.offered.get_mut(group) {
            *until = end.max(*until);
        }
    }

    /// Forgets which rows there are: none is left.
    pub(super) fn clear_rows(&mut self) {
        for own in self.open.values_mut() {
            own.paths.clear();
            own.offered.clear();
        }
    }
}

impl CpuTier {
    /// For each of these tokens, in their order, the row of a request that comes before it or ends with
    /// it.
    pub(super) fn rows_before(
        &mut self,
        request: u32,
        class: Class,
        ends: &[u64],
    ) -> Vec<Option<EntryId>> {
        let own = self.requests.open.get_mut(&request);
        let path = own.and_then(|own| own.paths.get_mut(usize::from(class.0)));
        let entries = &self.entries;
        path.map_or_else(
            || vec![None; ends.len()],
            |path| path.before(ends, |handle| listed(entries, handle)),
        )
    }

    /// The rows of a request that are there, by class, in the order of the prompt.
    fn rows_of(&self, own: &Own) -> Vec<Vec<EntryId>> {
        let there = |path: &Path| {
            let rows = path.rows().iter();
            rows.filter_map(|row| listed(&self.entries, row.handle))
                .collect()
        };
        own.paths.iter().map(there).collect()
    }

    /// A request has arrived: its one access to its keys, each with the token of the prompt that its
    /// chunk ends with. Its loads and stores do not count again until [`CpuTier::finish`]. One that
    /// is open already changes nothing.
    pub fn observe(&mut self, request: u32, keys: &[(Key, u64)], context: Context) {
        if request == 0 || self.requests.is_observed(request) {
            return;
        }
        let mut own = Own {
            is_observed: true,
            ..Own::default()
        };
        let classes = self.slots.geometry().classes();
        let mut paths: Vec<Vec<Chunk>> = vec![Vec::new(); classes];
        for (key, end) in keys {
            let Ok(class) = self.class_of(key) else {
                continue;
            };
            let found = self.entries.find_mut(key).map(|(handle, id, entry)| {
                entry.request = request;
                (handle, id)
            });
            if let Some(path) = paths.get_mut(usize::from(class.0)) {
                path.push((*end, self.entries.tag(key), found));
            }
        }
        for (class, mut path) in (0_u16..).map(Class).zip(paths) {
            if path.is_empty() {
                continue;
            }
            // Groups that share slots stand side by side: a prefix needs all of them.
            path.sort_by_key(|(end, ..)| *end);
            let tags: Vec<Tag> = path.iter().map(|(_, tag, _)| *tag).collect();
            let there = path
                .iter()
                .filter_map(|(end, _, row)| Some((*end, (*row)?)));
            let mut resident: Vec<EntryId> = Vec::with_capacity(path.len());
            let mut rows: Vec<Row> = Vec::with_capacity(path.len());
            for (end, (handle, id)) in there {
                rows.push(Row { end, handle });
                resident.push(id);
            }
            if let Some(known) = own.path(class) {
                known.merge(&rows);
            }
            let arrival = Arrival {
                id: RequestId(u64::from(request)),
                class,
                tags: &tags,
                context,
            };
            self.policy.observe(&arrival, &resident);
            self.admission.observe(&arrival);
        }
        self.requests.open.insert(request, own);
    }

    /// A request has ended. Its rows take the order of one access to all of them, those that were
    /// stored for it included. One that used nothing is ignored.
    pub fn finish(&mut self, request: u32, output_tokens: Option<u32>) {
        self.runs(request);
        let Some(own) = self.requests.open.remove(&request) else {
            return;
        };
        for rows in self.rows_of(&own) {
            if own.is_observed {
                let id = RequestId(u64::from(request));
                self.policy.finish(id, output_tokens, &rows);
            } else {
                self.policy.arrange(&rows);
            }
        }
    }

    /// The rows of a request in the order of the prompt, each with the token that its chunk ends with.
    /// Some may be gone.
    pub(super) fn rows_by_end(&self, request: u32) -> Vec<(u64, Handle)> {
        let own = self.requests.open.get(&request);
        let paths = own.into_iter().flat_map(|own| &own.paths);
        let rows = paths.flat_map(Path::rows);
        let mut rows: Vec<(u64, Handle)> = rows.map(|row| (row.end, row.handle)).collect();
        rows.sort_by_key(|(end, _)| *end);
        rows
    }

    /// Says what time it is, in milliseconds since any instant.
    pub fn set_time(&mut self, milliseconds: u64) {
        self.policy.set_time(milliseconds);
        self.admission.set_time(milliseconds);
    }

    /// Counts what a request does with rows that are there, given by the positions of their keys.
    pub(super) fn access(&mut self, keys: &[Key], found: &[(usize, EntryId)], asker: Asker<'_>) {
        let request = asker.request;
        let is_new = self.note_rows(found, asker);
        if !self.requests.is_observed(request) {
            for id in tail_first(keys, found, asker) {
                if self.is_first_access(id, request) {
                    self.policy.access(id);
                }
            }
        } else if is_new {
            // They came from below, or another request has stored them since.
            let mut head_first = tail_first(keys, found, asker);
            head_first.reverse();
            self.policy.arrange(&head_first);
        }
    }

    /// Notes rows of a request, given by the positions of their keys; whether any was not known.
    pub(super) fn note_rows(&mut self, rows: &[(usize, EntryId)], asker: Asker<'_>) -> bool {
        if asker.request == 0 {
            return false;
        }
        let described = |(position, id): &(usize, EntryId)| {
            let (end, handle) = (asker.end(*position)?, self.entries.handle(*id)?);
            Some((self.class_of_entry(*id)?, Row { end, handle }))
        };
        let mut known: Vec<(Class, Row)> = rows.iter().filter_map(described).collect();
        known.sort_by_key(|(class, row)| (*class, row.end));
        let own = self.requests.open.entry(asker.request).or_default();
        let entries = &self.entries;
        let mut is_new = false;
        for rows in known.chunk_by(|one, other| one.0 == other.0) {
            let path = rows.first().and_then(|(class, _)| own.path(*class));
            let rows: Vec<Row> = rows.iter().map(|(_, row)| *row).collect();
            if let Some(path) = path {
                is_new |= path.merge(&rows);
                path.tidy(|handle| listed(entries, handle).is_some());
            }
        }
        is_new
    }

    /// Whether this is an access by another request than the last.
    fn is_first_access(&mut self, id: EntryId, request: u32) -> bool {
        match self.entries.get_mut(id) {
            Some(entry) if request != 0 && entry.request == request => false,
            Some(entry) => {
                entry.request = request;
                true
            }
            None => false,
        }
    }

    pub(super) fn class_of_entry(&self, id: EntryId) -> Option<Class> {
        let slab = self.entries.get(id)?.slot.slab;
        self.slots.class_of(slab).map(|class| Class(class.0))
    }
}

/// The entry of a row that lookups find.
fn listed(entries: &Entries, handle: Handle) -> Option<EntryId> {
    let (id, entry) = entries.held(handle)?;
    entry.listed.then_some(id)
}

/// Entries of a request from its tail to its head. Where nobody says which token a chunk ends with,
/// keys come group by group, each from its head; chunks of the same number in all groups stay side by
/// side, for a prefix needs all of them.
pub(super) fn tail_first(
    keys: &[Key],
    found: &[(usize, EntryId)],
    asker: Asker<'_>,
) -> Vec<EntryId> {
    let known: Option<Vec<u64>> = found
        .iter()
        .map(|(position, _)| asker.end(*position))
        .collect();
    let places = known.unwrap_or_else(|| numbers(keys, found));
    let mut order: Vec<(u64, EntryId)> = places
        .into_iter()
        .zip(found)
        .map(|(place, (_, id))| (place, *id))
        .collect();
    order.sort_by_key(|(place, _)| *place);
    order.into_iter().rev().map(|(_, id)| id).collect()
}

/// The number of each key among those of its group.
fn numbers(keys: &[Key], found: &[(usize, EntryId)]) -> Vec<u64> {
    let mut group = None;
    let mut first = 0;
    let number = |(position, _): &(usize, EntryId)| {
        let own = keys.get(*position).map(Key::group);
        if own != group {
            group = own;
            first = *position;
        }
        u64::try_from(position - first).unwrap_or(u64::MAX)
    };
    found.iter().map(number).collect()
}
