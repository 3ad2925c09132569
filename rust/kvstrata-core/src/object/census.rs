//! Which rows of a bucket go, without knowing their names. Pure.
//!
//! A bucket may have more rows than memory has room for their names. So they are counted first, by
//! namespace and by the time at which they were stored, and decided upon when they are met again.

use core::cell::Cell;
use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

/// A namespace nothing was stored in for so long is idle.
const IDLE_AFTER: Duration = Duration::from_hours(24);
/// Most spans of time that are told apart, in all namespaces together: some 4 MiB. Beyond it they
/// are made twice as long.
const SPANS_MAX: usize = 1 << 16;

pub(super) fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}

/// Rows of one namespace.
#[derive(Debug)]
struct Counted {
    rows: u64,
    /// When the newest was stored, in seconds since 1970.
    newest: i64,
    /// Bytes of those that may stay, by the span in which they were stored.
    spans: BTreeMap<i64, u64>,
}

impl Counted {
    fn bytes(&self) -> u64 {
        self.spans.values().copied().fold(0, u64::saturating_add)
    }
}

/// All rows of a bucket, counted.
#[derive(Debug)]
pub(super) struct Census {
    /// Whatever was stored before this goes.
    before: i64,
    /// Whether anything was.
    has_old: bool,
    namespaces: BTreeMap<String, Counted>,
    /// Seconds of a span.
    span: i64,
    spans: usize,
}

impl Census {
    /// Nothing is counted yet; rows that were stored before `before` are to go in any case.
    pub(super) const fn new(before: i64) -> Self {
        Self {
            before,
            has_old: false,
            namespaces: BTreeMap::new(),
            span: 1,
            spans: 0,
        }
    }

    /// Counts a row.
    pub(super) fn count(&mut self, namespace: &str, bytes: u64, stored_at: i64) {
        let span = stored_at.div_euclid(self.span);
        // Most rows are of a namespace that is known.
        if !self.namespaces.contains_key(namespace) {
            let none = Counted {
                rows: 0,
                newest: i64::MIN,
                spans: BTreeMap::new(),
            };
            self.namespaces.insert(namespace.to_owned(), none);
        }
        let Some(counted) = self.namespaces.get_mut(namespace) else {
            return;
        };
        counted.rows = counted.rows.saturating_add(1);
        counted.newest = counted.newest.max(stored_at);
        if stored_at < self.before {
            self.has_old = true;
            return;
        }
        let before = counted.spans.len();
        let of = counted.spans.entry(span).or_default();
        *of = of.saturating_add(bytes);
        self.spans = self
            .spans
            .saturating_add(counted.spans.len().abs_diff(before));
        // Each namespace may have one before 1970, and one after that.
        while self.spans > SPANS_MAX.max(self.namespaces.len().saturating_mul(2)) {
            self.lengthen();
        }
    }

    /// Has spans last twice as long.
    fn lengthen(&mut self) {
        self.span = self.span.saturating_mul(2);
        self.spans = 0;
        for counted in self.namespaces.values_mut() {
            let mut longer = BTreeMap::<i64, u64>::new();
            for (span, bytes) in core::mem::take(&mut counted.spans) {
                let of = longer.entry(span.div_euclid(2)).or_default();
                *of = of.saturating_add(bytes);
            }
            self.spans = self.spans.saturating_add(longer.len());
            counted.spans = longer;
        }
    }

    /// What has to go for the rest to fit: whole idle namespaces, the one unused longest first, then
    /// the oldest rows of all.
    pub(super) fn choose(&self, capacity: Option<u64>, now: i64) -> Choice {
        let mut choice = Choice {
            whole: Vec::new(),
            names: BTreeSet::new(),
            before: self.before,
            until: self.before,
            takes_others: self.has_old,
            excess: Cell::new(0),
            rows: self
                .namespaces
                .iter()
                .map(|(name, of)| (name.clone(), of.rows))
                .collect(),
        };
        let Some(capacity) = capacity else {
            return choice;
        };
        let all = self.namespaces.values().map(Counted::bytes);
        let mut bytes = all.fold(0, u64::saturating_add);
        let idle_before = now.saturating_sub(seconds(IDLE_AFTER));
        let idle = self.namespaces.iter();
        let mut idle: Vec<(i64, &String, &Counted)> = idle
            .filter(|(_, of)| of.newest < idle_before && !of.spans.is_empty())
            .map(|(name, of)| (of.newest, name, of))
            .collect();
        idle.sort_unstable_by_key(|(newest, name, _)| (*newest, *name));
        for (newest, name, of) in idle {
            if bytes <= capacity {
                return choice;
            }
            bytes = bytes.saturating_sub(of.bytes());
            choice.names.insert(name.clone());
            choice.whole.push((name.clone(), newest));
        }
        let mut spans = BTreeMap::<i64, u64>::new();
        let others = self.namespaces.iter();
        for (_, of) in others.filter(|(name, _)| !choice.names.contains(*name)) {
            for (span, size) in &of.spans {
                let sum = spans.entry(*span).or_default();
                *sum = sum.saturating_add(*size);
            }
        }
        for (span, size) in spans {
            if bytes <= capacity {
                break;
            }
            let excess = bytes.saturating_sub(capacity);
            choice.takes_others = true;
            choice.before = choice.before.max(span.saturating_mul(self.span));
            choice.until = span.saturating_add(1).saturating_mul(self.span);
            choice.excess = Cell::new(excess.min(size));
            bytes = bytes.saturating_sub(size);
        }
        choice
    }
}

/// What goes.
#[derive(Debug)]
pub(super) struct Choice {
    /// Namespaces of which every row goes that was counted, and when the newest was stored.
    whole: Vec<(String, i64)>,
    names: BTreeSet<String>,
    /// Of all others, rows that were stored before this.
    before: i64,
    /// And some of those that were stored after that and before this:
    until: i64,
    /// bytes of them that are left to remove.
    excess: Cell<u64>,
    takes_others: bool,
    /// Rows counted, by namespace.
    rows: BTreeMap<String, u64>,
}

impl Choice {
    /// Namespaces that go as a whole, in this order.
    pub(super) fn whole(&self) -> &[(String, i64)] {
        &self.whole
    }

    /// Whether rows of other namespaces go, too.
    pub(super) const fn takes_others(&self) -> bool {
        self.takes_others
    }

    /// Rows of each namespace.
    pub(super) fn rows(&self) -> BTreeMap<String, u64> {
        self.rows.clone()
    }

    /// Whether a row goes, which is of no namespace that goes as a whole; then it is taken for gone.
    pub(super) fn takes(&self, namespace: &str, bytes: u64, stored_at: i64) -> bool {
        if stored_at >= self.until || self.names.contains(namespace) {
            return false;
        }
        if stored_at < self.before {
            return true;
        }
        let excess = self.excess.get();
        self.excess.set(excess.saturating_sub(bytes));
        excess > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_000_000_000;
    /// As many seconds as spans are told apart.
    const SPANS: i32 = 1 << 16;

    /// A row: its namespace, its bytes, how long ago it was stored.
    type Row = (&'static str, u64, i64);

    /// What stays of these rows.
    fn staying(rows: &[Row], before: i64, capacity: Option<u64>) -> Vec<Row> {
        let mut census = Census::new(before);
        for (namespace, bytes, ago) in rows {
            census.count(namespace, *bytes, NOW - ago);
        }
        let choice = census.choose(capacity, NOW);
        let goes_whole = |namespace: &str, ago: i64| {
            let mut whole = choice.whole().iter();
            whole.any(|(name, newest)| name == namespace && NOW - ago <= *newest)
        };
        let stays = |row: &&Row| {
            let (namespace, bytes, ago) = **row;
            !goes_whole(namespace, ago) && !choice.takes(namespace, bytes, NOW - ago)
        };
        rows.iter().filter(stays).copied().collect()
    }

    #[test]
    fn idle_namespaces_go_first_and_then_the_oldest_rows_until_the_rest_fits() {
        let day = 86_400;
        let rows = [
            ("busy", 10, 10 * day),
            ("busy", 10, 5),
            ("idle", 10, 2 * day),
            ("idle", 10, 3 * day),
            ("longest", 10, 4 * day),
            ("other", 10, 7),
            ("other", 10, 6),
        ];
        let all = |capacity| staying(&rows, i64::MIN, Some(capacity));
        assert_eq!(all(70), rows);
        assert_eq!(all(69), [&rows[..4], &rows[5..]].concat());
        assert_eq!(all(50), [&rows[..2], &rows[5..]].concat());
        assert_eq!(all(40), [&rows[..2], &rows[5..]].concat());
        assert_eq!(all(39), [&rows[1..2], &rows[5..]].concat());
        assert_eq!(all(20), [rows[1], rows[6]]);
        assert_eq!(all(1), []);
        assert_eq!(staying(&rows, i64::MIN, None), rows);
    }

    #[test]
    fn strange_times_end_no_count_and_nothing_that_fits_costs_another_listing() {
        let mut census = Census::new(NOW - 10);
        assert!(!census.choose(Some(0), NOW).takes_others());
        for at in (0..3 * SPANS).map(i64::from) {
            census.count("a", 1, i64::MAX / 2 - at);
            census.count("b", 1, NOW + 1000 * at);
        }
        assert!(!census.choose(None, NOW).takes_others());
        assert!(!census.choose(Some(6 << 16), NOW).takes_others());
        assert!(census.choose(Some(6), NOW).takes_others());
        census.count("c", 1, i64::MIN);
        assert!(census.choose(None, NOW).takes_others());
        let mut census = Census::new(i64::MIN);
        for at in (0..2 * SPANS).map(i64::from) {
            census.count("a", 1, at * (i64::MAX >> 20) - i64::MAX / 8);
        }
        assert!(census.spans <= SPANS_MAX);
    }

    #[test]
    fn what_is_too_old_goes_whatever_fits_and_counts_no_more() {
        let rows = [("a", 10, 100), ("a", 10, 50), ("a", 10, 10), ("b", 10, 60)];
        let left = |capacity| staying(&rows, NOW - 55, capacity);
        assert_eq!(left(None), [rows[1], rows[2]]);
        assert_eq!(left(Some(20)), [rows[1], rows[2]]);
        assert_eq!(left(Some(19)), [rows[2]]);
        assert_eq!(left(Some(0)), []);
    }

    #[test]
    fn of_rows_that_were_stored_at_the_same_time_no_more_go_than_have_to() {
        let rows = [("a", 10, 5); 8];
        for capacity in [0, 1, 10, 45, 79, 80, 1000] {
            let left = staying(&rows, i64::MIN, Some(capacity)).len();
            assert_eq!(
                u64::try_from(left).ok(),
                Some((capacity / 10).min(8)),
                "{capacity}"
            );
        }
    }

    #[test]
    fn a_row_that_came_after_the_count_stays() {
        let mut census = Census::new(i64::MIN);
        census.count("idle", 10, 5);
        census.count("busy", 10, NOW - 5);
        let choice = census.choose(Some(0), NOW);
        assert_eq!(choice.whole(), [("idle".to_owned(), 5)]);
        assert!(!choice.takes("idle", 10, NOW) && !choice.takes("busy", 10, NOW));
        assert!(choice.takes("busy", 10, NOW - 5));
    }

    #[test]
    fn times_are_told_apart_as_far_as_there_is_room_for_them() {
        let times = 10 * i64::from(SPANS);
        let mut census = Census::new(i64::MIN);
        for time in 0..times {
            census.count(if time % 2 == 0 { "a" } else { "b" }, 10, NOW - time);
        }
        assert!(census.spans <= SPANS_MAX);
        // No namespace is idle.
        let half = 5 * u64::try_from(times).unwrap();
        let choice = census.choose(Some(half), NOW + 1);
        let (mut bytes, mut youngest, mut oldest_left) = (0, i64::MIN, NOW);
        for time in (0..times).map(|time| NOW - time) {
            if choice.takes("a", 10, time) {
                youngest = youngest.max(time);
            } else {
                bytes += 10;
                oldest_left = oldest_left.min(time);
            }
        }
        assert_eq!(bytes, half);
        assert!(
            (youngest - oldest_left).abs() <= census.span,
            "{youngest} {oldest_left}"
        );
    }
}
