//! What is known of the living requests.

use hashbrown::{HashMap, HashSet};

use crate::cpu::Handle;
use crate::key::{GroupId, Key};

/// Names a request. No other request ever has the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId {
    /// Counts requests: an older one has a smaller number.
    serial: u64,
    index: u32,
}

impl RequestId {
    /// A number for [`crate::cpu::Asker`]; never 0, and of no other request for long.
    pub fn number(self) -> u32 {
        u32::try_from(self.serial % u64::from(u32::MAX)).unwrap_or(0) + 1
    }
}

/// Which tiers a request may load from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// Rows that are in the CPU tier.
    pub cpu: bool,
    /// One bit per tier below, the first one's the lowest.
    pub below: u64,
}

impl Allowed {
    /// Every tier.
    pub const ALL: Self = Self {
        cpu: true,
        below: u64::MAX,
    };
    /// None: the request finds nothing.
    pub const NONE: Self = Self {
        cpu: false,
        below: 0,
    };

    /// Whether the tier of this number may be asked.
    pub fn allows(self, tier: usize) -> bool {
        u32::try_from(tier)
            .ok()
            .and_then(|tier| self.below.checked_shr(tier))
            .is_some_and(|bits| bits & 1 == 1)
    }
}

/// One key that was asked for in this step, and what became of it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Asked {
    /// Ready and pinned by this.
    Hit(Handle),
    /// Being written.
    Writing(Handle, GroupId),
    /// In the request's [`Request::wanted`], by position.
    Wanted(u32),
    /// Nowhere, or the tier does not know.
    Miss(GroupId),
}

/// A key that a tier below has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) key: Key,
    pub(super) tier: usize,
    /// Whether it is in the queue already.
    pub(super) queued: bool,
}

#[derive(Debug)]
pub(super) struct Request {
    pub(super) allowed: Allowed,
    /// This step's keys in the order of asking.
    pub(super) asked: Vec<Asked>,
    pub(super) wanted: Vec<Wanted>,
    /// Whether an answer of this step was "not yet".
    pub(super) is_pending: bool,
    /// When the first such answer was given. It moves on while nobody asks.
    pub(super) waits_since: Option<f64>,
    /// When the last such answer was given, and the number of that step.
    pub(super) told_at: f64,
    pub(super) told_in: u64,
    /// Whether it has waited long enough: what is not there is a miss.
    pub(super) is_tired: bool,
    /// Keys whose load from below failed while it waited for them.
    pub(super) failed: HashSet<Key>,
    /// Rows that it was given last.
    pub(super) given: Vec<Handle>,
    /// Keys of rows that it was given and that some worker did not copy.
    pub(super) unfit: HashSet<Key>,
    /// Keys that came from below while it waited for them, and the tier's number.
    pub(super) brought: HashMap<Key, usize>,
    /// Uses of rows that came, until it takes them.
    pub(super) holds: Vec<Handle>,
    pub(super) held_bytes: u64,
    /// Keys that end behind this token are misses: all of them together have no room.
    pub(super) limit: Option<u64>,
    /// Whether it was begun, and not only asked for.
    pub(super) is_known: bool,
}

impl Request {
    fn new(allowed: Allowed, is_known: bool) -> Self {
        Self {
            allowed,
            asked: Vec::new(),
            wanted: Vec::new(),
            is_pending: false,
            waits_since: None,
            told_at: 0.0,
            told_in: 0,
            is_tired: false,
            failed: HashSet::new(),
            given: Vec::new(),
            unfit: HashSet::new(),
            brought: HashMap::new(),
            holds: Vec::new(),
            held_bytes: 0,
            limit: None,
            is_known,
        }
    }

    /// Whether rows that come are kept for it.
    pub(super) const fn is_waiting(&self) -> bool {
        !self.is_tired && (self.is_pending || self.waits_since.is_some())
    }
}

#[derive(Debug)]
struct Place {
    serial: u64,
    request: Option<Request>,
}

/// All living requests.
#[derive(Debug, Default)]
pub(super) struct Requests {
    places: Vec<Place>,
    free: Vec<u32>,
    count: u64,
}

impl Requests {
    pub(super) fn begin(&mut self, allowed: Allowed, is_known: bool) -> Option<RequestId> {
        self.count += 1;
        let serial = self.count;
        let request = Some(Request::new(allowed, is_known));
        if let Some(index) = self.free.pop() {
            let place = self.places.get_mut(usize::try_from(index).ok()?)?;
            *place = Place { serial, request };
            return Some(RequestId { serial, index });
        }
        let index = u32::try_from(self.places.len()).ok()?;
        self.places.push(Place { serial, request });
        Some(RequestId { serial, index })
    }

    pub(super) fn get(&self, id: RequestId) -> Option<&Request> {
        let place = self.places.get(usize::try_from(id.index).ok()?)?;
        (place.serial == id.serial).then_some(place.request.as_ref()?)
    }

    pub(super) fn get_mut(&mut self, id: RequestId) -> Option<&mut Request> {
        let place = self.places.get_mut(usize::try_from(id.index).ok()?)?;
        (place.serial == id.serial).then_some(place.request.as_mut()?)
    }

    pub(super) fn end(&mut self, id: RequestId) -> Option<Request> {
        let place = self.places.get_mut(usize::try_from(id.index).ok()?)?;
        if place.serial != id.serial {
            return None;
        }
        let request = place.request.take()?;
        self.free.push(id.index);
        Some(request)
    }

    /// All of them, the oldest first.
    pub(super) fn ids(&self) -> Vec<RequestId> {
        let mut ids: Vec<RequestId> = (0_u32..)
            .zip(&self.places)
            .filter(|(_, place)| place.request.is_some())
            .map(|(index, place)| RequestId {
                serial: place.serial,
                index,
            })
            .collect();
        ids.sort_unstable();
        ids
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Request> {
        self.places
            .iter()
            .filter_map(|place| place.request.as_ref())
    }
}
