//! Requests that callers told of: their keys, from arrival to end.
//!
//! The arrival is the request's one access, so loads and touches of its keys do not count again;
//! and its keys are to stay until it has ended, where others can go.

use std::collections::{HashMap, VecDeque};

use crate::error::Result;
use crate::eviction::request::{Arrival, Context, RequestId, Tag};
use crate::eviction::{Class, EntryId};
use crate::index::Fingerprint;
use crate::key::Key;
use crate::sys::sync::{Arc, lock};
use crate::tier::disk::DiskTier;
use crate::tier::inventory::Inventory;

/// Keys of open requests that are remembered; the earliest requests beyond that count as ended.
const KEYS_MAX: usize = if cfg!(test) { 1 << 14 } else { 1 << 20 };

/// Keys of one request by class, in token order.
pub(crate) type ByClass = Vec<(Class, Vec<Fingerprint>)>;

#[derive(Debug)]
struct Open {
    number: RequestId,
    keys: Arc<ByClass>,
}

/// Open requests.
#[derive(Debug, Default)]
pub(crate) struct Observed {
    open: HashMap<String, Open>,
    order: VecDeque<(RequestId, String)>,
    uses: HashMap<Fingerprint, u32>,
    keys: usize,
    next: u64,
}

impl Observed {
    /// Notes an arrival; `None` when the request is open already.
    fn begin(&mut self, id: &str, keys: Arc<ByClass>) -> Option<RequestId> {
        if self.open.contains_key(id) {
            return None;
        }
        let number = RequestId(self.next);
        self.next = self.next.wrapping_add(1);
        for key in keys.iter().flat_map(|(_, keys)| keys) {
            self.keys += 1;
            let uses = self.uses.entry(*key).or_insert(0);
            *uses = uses.saturating_add(1);
        }
        self.open.insert(id.to_owned(), Open { number, keys });
        self.order.push_back((number, id.to_owned()));
        while self.keys > KEYS_MAX {
            let Some((earliest, id)) = self.order.pop_front() else {
                break;
            };
            if self.is_open(earliest, &id) {
                self.end(&id);
            }
        }
        Some(number)
    }

    /// Notes an end; `None` for a request that is not open.
    fn end(&mut self, id: &str) -> Option<(RequestId, Arc<ByClass>)> {
        let open = self.open.remove(id)?;
        for key in open.keys.iter().flat_map(|(_, keys)| keys) {
            self.keys = self.keys.saturating_sub(1);
            let left = self.uses.get_mut(key).map(|uses| {
                *uses = uses.saturating_sub(1);
                *uses
            });
            if left == Some(0) {
                self.uses.remove(key);
            }
        }
        // Those that have ended leave the order in bulk.
        if self.order.len() > self.open.len().saturating_mul(2).saturating_add(64) {
            let open = &self.open;
            let goes_on = |(number, id): &(RequestId, String)| {
                open.get(id).is_some_and(|open| open.number == *number)
            };
            self.order.retain(goes_on);
        }
        Some((open.number, open.keys))
    }

    fn is_open(&self, number: RequestId, id: &str) -> bool {
        let open = self.open.get(id);
        open.is_some_and(|open| open.number == number)
    }

    /// Whether an open request has a key.
    pub(crate) fn covers(&self, key: Fingerprint) -> bool {
        self.uses.contains_key(&key)
    }

    /// Whether no request is open.
    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }
}

impl Inventory {
    fn resident(&self, keys: &[Fingerprint]) -> Vec<EntryId> {
        let found = keys.iter().filter_map(|key| self.index.find(*key));
        found.collect()
    }

    /// A request arrives: its one access.
    fn observe(&mut self, id: &str, keys: ByClass, context: Context, now: u32) {
        let keys = Arc::new(keys);
        let Some(number) = self.observed.begin(id, Arc::clone(&keys)) else {
            return;
        };
        for (class, keys) in keys.iter() {
            let resident = self.resident(keys);
            let tags: Vec<Tag> = keys.iter().map(|key| key.tag()).collect();
            let arrival = Arrival {
                id: number,
                class: *class,
                tags: &tags,
                context,
            };
            self.policy.observe(&arrival, &resident);
            self.admission.observe(&arrival);
            self.mark_accessed(&resident, now);
        }
    }

    /// A request ends: its rows, those stored for it included, take the order of its access.
    fn finish(&mut self, id: &str, output_tokens: Option<u32>) {
        let Some((number, keys)) = self.observed.end(id) else {
            return;
        };
        for (_, keys) in keys.iter() {
            let resident = self.resident(keys);
            self.policy.finish(number, output_tokens, &resident);
        }
    }

    /// Whether a row is stored.
    pub(crate) fn admits(&self, key: Fingerprint) -> bool {
        self.admission.takes_all() || self.admission.admits(key.tag(), Some(self.policy.as_ref()))
    }

    /// Rows of these keys are offered.
    pub(crate) fn offered(&mut self, keys: impl IntoIterator<Item = Fingerprint>) {
        self.admission
            .offered(keys.into_iter().map(Fingerprint::tag));
    }
}

impl DiskTier {
    /// Milliseconds since the first call of this.
    pub(super) fn milliseconds(&self) -> u64 {
        let now = self.around.clock.now();
        let first = *lock(&self.first_request).get_or_insert(now);
        let since = now.saturating_duration_since(first);
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }

    /// See [`Tier::observe`](crate::tier::Tier::observe).
    pub(crate) fn observe(&self, id: &str, keys: &[Key], context: Context) -> Result<()> {
        let mut by_class: ByClass = Vec::new();
        for key in keys {
            // A group that this namespace does not have is none of its business.
            let Some((class, _)) = self.groups.get(&key.group()) else {
                continue;
            };
            let fingerprint = self.fingerprinter.of(key);
            match by_class.iter_mut().find(|(of, _)| of == class) {
                Some((_, own)) => own.push(fingerprint),
                None => by_class.push((*class, vec![fingerprint])),
            }
        }
        let (now, milliseconds) = (self.around.clock.unix_seconds(), self.milliseconds());
        let mut state = self.open_state()?;
        state.inventory.policy.set_time(milliseconds);
        state.inventory.admission.set_time(milliseconds);
        state.inventory.observe(id, by_class, context, now);
        Ok(())
    }

    /// See [`Tier::finish`](crate::tier::Tier::finish).
    pub(crate) fn finish(&self, id: &str, output_tokens: Option<u32>) -> Result<()> {
        let milliseconds = self.milliseconds();
        let mut state = self.open_state()?;
        state.inventory.policy.set_time(milliseconds);
        state.inventory.finish(id, output_tokens);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Fingerprinter;

    fn keys(from: u8, count: u8) -> Arc<ByClass> {
        let of = Fingerprinter::new([1; 16]);
        let key = |number: u8| of.of(&Key::new(&[number; 36]).unwrap());
        Arc::new(vec![(Class(0), (from..from + count).map(key).collect())])
    }

    #[test]
    fn a_key_is_covered_until_the_last_request_that_has_it_ends() {
        let (one, other) = (keys(0, 3), keys(2, 3));
        let shared = one[0].1[2];
        let mut observed = Observed::default();
        assert!(observed.begin("one", one).is_some());
        assert!(observed.begin("other", other).is_some());
        assert!(observed.begin("one", keys(9, 1)).is_none());
        assert!(observed.end("one").is_some());
        assert!(observed.covers(shared));
        assert!(observed.end("other").is_some());
        assert!(!observed.covers(shared) && observed.is_empty());
        assert!(observed.end("other").is_none());
        assert!(observed.uses.is_empty() && observed.keys == 0);
    }

    #[test]
    fn requests_that_never_end_are_forgotten_when_there_are_too_many_keys() {
        let mut observed = Observed::default();
        let many = keys(0, 200);
        for number in 0..200 {
            observed.begin(&number.to_string(), Arc::clone(&many));
            assert!(observed.keys <= KEYS_MAX);
        }
        assert!(observed.end("0").is_none());
        assert!(observed.end("199").is_some());
        for number in 0..1000 {
            let name = format!("short {number}");
            observed.begin(&name, keys(0, 1));
            observed.end(&name);
        }
        assert!(observed.order.len() <= observed.open.len() * 2 + 65);
    }
}
