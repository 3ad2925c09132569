//! What is believed to be in a bucket: bounded, and each belief for a while only.
//!
//! Pure: time comes in as an argument. Many small tables, each under a lock of its own, so that
//! none takes long to grow while someone waits for it: a million keys take 17 MiB.

use core::time::Duration;
use std::time::Instant;

use crate::object::verdict_table::VerdictTable;
use crate::sys::sync::{Mutex, lock};

/// Number of tables, as a power of two.
const SHARD_BITS: u32 = 8;
const SHARDS: usize = 1 << SHARD_BITS;
/// Most entries of one table: 128 KiB of places hold them.
const ENTRIES_MAX: usize = 7168;
/// Entries that are kept when a table is full of beliefs that still hold.
const ENTRIES_KEPT: usize = ENTRIES_MAX / 2;
/// Unit of time of an entry: 2^30 of them are 3.4 years, after which a tier believes nothing new.
const TICK: Duration = Duration::from_millis(100);
const TICKS_MAX: u32 = (1 << 30) - 1;

/// What is believed of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fact {
    /// There is no row.
    Absent,
    /// There is an object with its name and length.
    Listed,
    /// We wrote its row, or read its header and found it right.
    Verified,
}

/// A fact and when it became known, in 2 and 30 bits; never zero.
const fn pack(fact: Fact, tick: u32) -> u32 {
    let kind = match fact {
        Fact::Absent => 1,
        Fact::Listed => 2,
        Fact::Verified => 3,
    };
    (kind << 30) | tick
}

/// The fact of an entry; `None` of a zero, which stands for no entry.
const fn fact_of(entry: u32) -> Option<Fact> {
    match entry >> 30 {
        0 => None,
        1 => Some(Fact::Absent),
        2 => Some(Fact::Listed),
        _ => Some(Fact::Verified),
    }
}

const fn tick_of(entry: u32) -> u32 {
    entry & TICKS_MAX
}

/// Where a key's table is.
fn shard_of(key: u64) -> usize {
    // The lowest bits choose the place in the table.
    let [.., shard, _, _] = key.to_le_bytes();
    usize::from(shard)
}

/// The keys in the order of their tables, each with its position.
fn by_shard(keys: &[u64]) -> Vec<(u64, usize)> {
    let mut starts = [0_usize; SHARDS + 1];
    for key in keys {
        if let Some(after) = starts.get_mut(shard_of(*key) + 1) {
            *after = after.saturating_add(1);
        }
    }
    let mut total = 0_usize;
    for start in &mut starts {
        total = total.saturating_add(*start);
        *start = total;
    }
    let mut sorted = vec![(0, 0); keys.len()];
    for (at, key) in keys.iter().enumerate() {
        if let Some(next) = starts.get_mut(shard_of(*key))
            && let Some(place) = sorted.get_mut(*next)
        {
            *place = (*key, at);
            *next = next.saturating_add(1);
        }
    }
    sorted
}

/// Beliefs about keys, by their 64-bit fingerprints. Two keys with the same one, which happens to
/// one lookup in 10^13, cost a load that misses or a store that is left out.
#[derive(Debug)]
pub struct Verdicts {
    shards: Vec<Mutex<VerdictTable>>,
    began: Instant,
    found_ticks: u32,
    absent_ticks: u32,
}

impl Verdicts {
    /// No beliefs yet. What is found is believed for `found_for`, what is absent for `absent_for`.
    #[must_use]
    pub fn new(began: Instant, found_for: Duration, absent_for: Duration) -> Self {
        let ticks = |time: Duration| {
            let ticks = time.as_millis() / TICK.as_millis();
            u32::try_from(ticks)
                .unwrap_or(TICKS_MAX)
                .clamp(1, TICKS_MAX)
        };
        Self {
            shards: core::iter::repeat_with(Mutex::default)
                .take(SHARDS)
                .collect(),
            began,
            found_ticks: ticks(found_for),
            absent_ticks: ticks(absent_for),
        }
    }

    fn tick(&self, at: Instant) -> u32 {
        let elapsed = at.saturating_duration_since(self.began).as_millis() / TICK.as_millis();
        u32::try_from(elapsed).unwrap_or(TICKS_MAX).min(TICKS_MAX)
    }

    /// The fact of an entry while it is believed.
    fn believed(&self, entry: u32, now: u32) -> Option<Fact> {
        fact_of(entry).filter(|fact| {
            let ticks = match fact {
                Fact::Absent => self.absent_ticks,
                Fact::Listed | Fact::Verified => self.found_ticks,
            };
            now.saturating_sub(tick_of(entry)) < ticks
        })
    }

    /// What is believed of a key; `None` where nothing is.
    #[must_use]
    pub fn of(&self, key: u64, now: Instant) -> Option<Fact> {
        let shard = self.shards.get(shard_of(key))?;
        let entry = lock(shard).get(key);
        self.believed(entry, self.tick(now))
    }

    /// What is believed of each key.
    #[must_use]
    pub fn look(&self, keys: &[u64], now: Instant) -> Vec<Option<Fact>> {
        let now = self.tick(now);
        // Table by table: one lock for all keys of a table, whose lines are near each other.
        let sorted = by_shard(keys);
        let mut found = vec![None; keys.len()];
        for group in sorted.chunk_by(|(a, _), (b, _)| shard_of(*a) == shard_of(*b)) {
            let Some((first, _)) = group.first() else {
                continue;
            };
            let Some(shard) = self.shards.get(shard_of(*first)) else {
                continue;
            };
            let shard = lock(shard);
            for (key, at) in group {
                let entry = shard.get(*key);
                if let Some(place) = found.get_mut(*at) {
                    *place = self.believed(entry, now);
                }
            }
        }
        found
    }

    /// Notes what just happened by our own doing: it is newer than all that was believed.
    pub fn note(&self, key: u64, fact: Fact, now: Instant) {
        let tick = self.tick(now);
        self.set(key, pack(fact, tick), tick);
    }

    /// Notes the answer, arrived at `now`, to a question that was asked at `asked`. One asked no
    /// later than what is believed already became known changes nothing: the answer may be older.
    /// It is believed from its arrival on: else a slow one would be forgotten before it is of use.
    pub fn answer(&self, key: u64, fact: Fact, asked: Instant, now: Instant) {
        let (asked, tick) = (self.tick(asked), self.tick(now));
        let Some(shard) = self.shards.get(shard_of(key)) else {
            return;
        };
        let mut shard = lock(shard);
        let entry = shard.get(key);
        if entry == 0 {
            self.make_room(&mut shard, tick);
            shard.set(key, pack(fact, tick));
        } else if asked > tick_of(entry) {
            let verified = fact_of(entry) == Some(Fact::Verified) && fact == Fact::Listed;
            shard.set(
                key,
                pack(if verified { Fact::Verified } else { fact }, tick),
            );
        }
    }

    fn set(&self, key: u64, entry: u32, now: u32) {
        if let Some(shard) = self.shards.get(shard_of(key)) {
            let mut shard = lock(shard);
            if shard.get(key) == 0 {
                self.make_room(&mut shard, now);
            }
            shard.set(key, entry);
        }
    }

    /// Forgets what no longer holds, then what has been known longest, when a table is full.
    fn make_room(&self, shard: &mut VerdictTable, now: u32) {
        if shard.len() < ENTRIES_MAX {
            return;
        }
        shard.retain(|entry| self.believed(entry, now).is_some());
        if shard.len() <= ENTRIES_KEPT {
            return;
        }
        let mut ticks: Vec<u32> = shard.entries().map(tick_of).collect();
        let excess = ticks.len().saturating_sub(ENTRIES_KEPT);
        let (_, oldest_kept, _) = ticks.select_nth_unstable(excess);
        let oldest_kept = *oldest_kept;
        let mut left = excess;
        shard.retain(|entry| {
            let goes = left > 0 && tick_of(entry) <= oldest_kept;
            left = left.saturating_sub(usize::from(goes));
            !goes
        });
    }

    /// Forgets everything: another epoch begins.
    pub fn clear(&self) {
        for shard in &self.shards {
            lock(shard).clear();
        }
    }

    /// Number of keys of which something is or was believed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).len()).sum()
    }

    /// Whether nothing is believed of any key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::clock::{Clock, SystemClock};

    const SECOND: Duration = Duration::from_secs(1);

    fn verdicts(now: Instant) -> Verdicts {
        Verdicts::new(now, 10 * SECOND, 2 * SECOND)
    }

    fn one(verdicts: &Verdicts, key: u64, now: Instant) -> Option<Fact> {
        let found = verdicts.of(key, now);
        assert_eq!(verdicts.look(&[key], now), [found]);
        found
    }

    #[test]
    fn beliefs_expire_absence_first() {
        let now = SystemClock.now();
        let verdicts = verdicts(now);
        verdicts.answer(1, Fact::Listed, now, now);
        verdicts.answer(2, Fact::Absent, now, now);
        assert_eq!(
            verdicts.look(&[2, 1, 3], now),
            [Some(Fact::Absent), Some(Fact::Listed), None]
        );
        assert_eq!(one(&verdicts, 2, now + 2 * SECOND), None);
        assert_eq!(one(&verdicts, 1, now + 2 * SECOND), Some(Fact::Listed));
        assert_eq!(one(&verdicts, 1, now + 10 * SECOND), None);
    }

    #[test]
    fn an_answer_that_is_older_than_an_event_changes_nothing() {
        let now = SystemClock.now();
        let verdicts = verdicts(now);
        let asked = now + SECOND;
        verdicts.note(1, Fact::Verified, now + 2 * SECOND);
        verdicts.answer(1, Fact::Absent, asked, asked);
        assert_eq!(one(&verdicts, 1, now + 2 * SECOND), Some(Fact::Verified));
        verdicts.note(1, Fact::Absent, now + 3 * SECOND);
        verdicts.answer(1, Fact::Listed, now + 3 * SECOND, now + 3 * SECOND);
        assert_eq!(one(&verdicts, 1, now + 3 * SECOND), Some(Fact::Absent));
        verdicts.answer(1, Fact::Listed, now + 4 * SECOND, now + 4 * SECOND);
        assert_eq!(one(&verdicts, 1, now + 4 * SECOND), Some(Fact::Listed));
    }

    #[test]
    fn an_answer_that_took_longer_than_it_is_believed_is_believed_from_its_arrival_on() {
        let now = SystemClock.now();
        let verdicts = verdicts(now);
        verdicts.answer(1, Fact::Absent, now, now + 5 * SECOND);
        assert_eq!(one(&verdicts, 1, now + 6 * SECOND), Some(Fact::Absent));
        assert_eq!(one(&verdicts, 1, now + 7 * SECOND), None);
        // Asked before an event and answered after it: of before it, however late it comes.
        verdicts.note(2, Fact::Verified, now + SECOND);
        verdicts.answer(2, Fact::Absent, now, now + 5 * SECOND);
        assert_eq!(one(&verdicts, 2, now + 5 * SECOND), Some(Fact::Verified));
    }

    #[test]
    fn being_listed_does_not_make_less_of_what_was_verified() {
        let now = SystemClock.now();
        let verdicts = verdicts(now);
        verdicts.note(1, Fact::Verified, now);
        verdicts.answer(1, Fact::Listed, now + SECOND, now + SECOND);
        assert_eq!(one(&verdicts, 1, now + SECOND), Some(Fact::Verified));
    }

    #[test]
    fn a_full_table_forgets_the_oldest_and_stays_bounded() {
        let now = SystemClock.now();
        let verdicts = verdicts(now);
        // All in one table.
        for number in 0..20_000_u64 {
            let at = now + Duration::from_micros(number * 300);
            verdicts.note(number, Fact::Verified, at);
        }
        let kept = verdicts.len();
        assert!((ENTRIES_KEPT..=ENTRIES_MAX).contains(&kept), "{kept}");
        let late = now + 6 * SECOND;
        assert_eq!(one(&verdicts, 19_999, late), Some(Fact::Verified));
        assert_eq!(one(&verdicts, 0, late), None);
        verdicts.clear();
        assert!(verdicts.is_empty());
    }
}
