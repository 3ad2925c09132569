//! Requests that use the tier: which rows each has, in the order of its prompt, until it ends.

use hashbrown::HashMap;

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

/// A row of a request.
#[derive(Clone, Copy, Debug)]
struct Row {
    end: u64,
    handle: Handle,
}

/// A key of a request that arrives: where its chunk ends, what stands for it, and its row.
type Chunk = (u64, Tag, Option<(Handle, EntryId)>);

/// What is known of one request.
#[derive(Debug, Default)]
struct Own {
    /// Whether its access was counted when it arrived.
    is_observed: bool,
    /// Its rows by class, in the order of the prompt. Some may be gone.
    rows: Vec<Vec<Row>>,
    /// The last token of keys that it offered to store.
    offered: u64,
}

impl Own {
    fn class(&self, class: Class) -> &[Row] {
        let rows = self.rows.get(usize::from(class.0));
        rows.map_or(&[], Vec::as_slice)
    }

    /// Notes a row; whether it was not known.
    fn add(&mut self, class: Class, end: u64, handle: Handle) -> bool {
        let at = usize::from(class.0);
        if self.rows.len() <= at {
            self.rows.resize_with(at + 1, Vec::new);
        }
        let Some(rows) = self.rows.get_mut(at) else {
            return false;
        };
        let until = rows.partition_point(|row| row.end <= end);
        let same = rows.get(..until).unwrap_or_default().iter().rev();
        if same
            .take_while(|row| row.end == end)
            .any(|row| row.handle == handle)
        {
            return false;
        }
        rows.insert(until, Row { end, handle });
        true
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

    /// Notes a row of a request; whether it was not known.
    pub(super) fn add(&mut self, request: u32, class: Class, end: u64, handle: Handle) -> bool {
        request != 0
            && self
                .open
                .entry(request)
                .or_default()
                .add(class, end, handle)
    }

    /// The last token of the keys that a request offered to store; 0 for none.
    pub(super) fn offered_until(&self, request: u32) -> u64 {
        self.open.get(&request).map_or(0, |own| own.offered)
    }

    /// Notes that a request offered keys up to token `end` to store.
    pub(super) fn offered(&mut self, request: u32, end: u64) {
        if request != 0 {
            let own = self.open.entry(request).or_default();
            own.offered = own.offered.max(end);
        }
    }

    /// Forgets which rows there are: none is left.
    pub(super) fn clear_rows(&mut self) {
        for own in self.open.values_mut() {
            own.rows.clear();
            own.offered = 0;
        }
    }
}

impl CpuTier {
    /// The row of a request that comes before token `end`, or ends with it.
    pub(super) fn row_before(&self, request: u32, class: Class, end: u64) -> Option<EntryId> {
        let rows = self.requests.open.get(&request)?.class(class);
        let until = rows.partition_point(|row| row.end <= end);
        let mut before = rows.get(..until)?.iter().rev();
        before.find_map(|row| self.listed(row.handle))
    }

    fn listed(&self, handle: Handle) -> Option<EntryId> {
        let (id, entry) = self.entries.held(handle)?;
        entry.listed.then_some(id)
    }

    /// The rows of a request that are there, by class, in the order of the prompt.
    fn rows_of(&self, own: &Own) -> Vec<(Class, Vec<EntryId>)> {
        let classes = (0_u16..).map(Class).zip(&own.rows);
        let there = |rows: &Vec<Row>| {
            rows.iter()
                .filter_map(|row| self.listed(row.handle))
                .collect()
        };
        classes.map(|(class, rows)| (class, there(rows))).collect()
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
            for (end, (handle, id)) in there {
                own.add(class, end, handle);
                resident.push(id);
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
        for (_, rows) in self.rows_of(&own) {
            if own.is_observed {
                let id = RequestId(u64::from(request));
                self.policy.finish(id, output_tokens, &rows);
            } else {
                self.policy.arrange(&rows);
            }
        }
    }

    /// The rows of a request, in the order of the prompt, class by class. Some may be gone.
    pub(super) fn handles_of(&self, request: u32) -> Vec<Handle> {
        let own = self.requests.open.get(&request);
        let rows = own.into_iter().flat_map(|own| own.rows.iter().flatten());
        rows.map(|row| row.handle).collect()
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
        let mut ends: Vec<(u64, EntryId)> = rows
            .iter()
            .filter_map(|(position, id)| Some((asker.end(*position)?, *id)))
            .collect();
        // In the order of the prompt, so that each goes to the end of what is known.
        ends.sort_by_key(|(end, _)| *end);
        let mut is_new = false;
        for (end, id) in ends {
            if let Some(class) = self.class_of_entry(id)
                && let Some(handle) = self.entries.handle(id)
            {
                is_new |= self.requests.add(asker.request, class, end, handle);
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
