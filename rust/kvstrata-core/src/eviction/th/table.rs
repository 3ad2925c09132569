//! What was learned: for each class, how often runs of some age were used again, and from that the
//! index by which they are ranked.

use hashbrown::HashMap;

use super::feature::{FEATURES, Features, LEVELS, TICKS_PER_SECOND};
use super::index;

/// Bins of age: half octaves from a quarter of a second.
pub(super) const BINS: usize = 44;

/// Ticks of the first bin: a quarter of a second.
const FIRST_BIN_TICKS: u32 = TICKS_PER_SECOND / 4;

/// Reuses that must have been seen before anything is predicted.
const REUSES_MIN: f32 = 20.0;
/// Pseudo-counts, in reuses of runs of mean length: of a level of a feature, and of a class.
const LEVEL_PSEUDO: f32 = 32.0;
/// Of one bin of a class.
const BIN_PSEUDO: f32 = 16.0;
/// What is left of all counts from one refresh to the next.
const DECAY: f32 = 0.99;
/// Sweeps over the features.
const SWEEPS: usize = 4;
/// Classes of their own; further ones share coarse classes.
const CLASSES_MAX: usize = 4096;

/// Number of a class.
pub(super) type ClassNumber = u16;

pub(super) type Bins = [f32; BINS];

#[derive(Debug)]
struct Row {
    features: Features,
    /// Blocks that were used again, by age; decays.
    hits: Bins,
    /// Blocks that were forgotten, by age; decays.
    gone: Bins,
    /// Blocks that wait to be used again, by age.
    waiting: [u32; BINS],
    /// Blocks that came to each age, as of the last refresh.
    reached: Bins,
    /// Index at the beginning of each bin.
    index: Bins,
    within_hour: f32,
    total_hits: f32,
    expected: f32,
    /// Product of the factors of its levels.
    main: f32,
    /// What its hazards are of those of all classes, as of the last refresh.
    factor: f32,
    /// Whether its index is that of the refresh before, and its counts have not decayed since: few
    /// classes are asked for between two refreshes.
    is_due: bool,
}

/// The table; see the module.
#[derive(Debug)]
pub(super) struct Table {
    rows: Vec<Row>,
    numbers: HashMap<Features, ClassNumber>,
    /// Reuses seen, never decayed.
    reuses: f32,
    /// Mean length of a run, as a sum and a count that decay.
    blocks: f32,
    runs: f32,
    /// As of the last refresh: the hazard over all classes, and the factors of levels.
    global: Bins,
    factors: Factors,
    /// What a block counts, as of the last refresh.
    weight: f32,
    /// First tick of each bin, but for the first, which begins at 0.
    starts: [u32; BINS],
    /// Seconds that each bin lasts.
    widths: Bins,
}

impl Table {
    /// A table that has seen nothing.
    pub(super) fn new() -> Self {
        let bound = |bin: usize| 0.25 * 2_f64.powf(small(bin) / 2.0);
        let mut starts = [0; BINS];
        let mut widths = [0.0; BINS];
        for (bin, (start, width)) in starts.iter_mut().zip(&mut widths).enumerate() {
            let begins = if bin == 0 { 0.0 } else { bound(bin) };
            *start = whole(begins * f64::from(TICKS_PER_SECOND));
            *width = single(bound(bin + 1) - begins);
        }
        Self {
            rows: Vec::new(),
            numbers: HashMap::new(),
            reuses: 0.0,
            blocks: 0.0,
            runs: 0.0,
            global: [0.0; BINS],
            factors: [[1.0; LEVELS]; FEATURES],
            weight: 0.0,
            starts,
            widths,
        }
    }

    /// First tick of a bin; nothing is older than the last bin.
    pub(super) fn start(&self, bin: usize) -> u32 {
        self.starts.get(bin).copied().unwrap_or(u32::MAX)
    }

    /// The bin of an age.
    pub(super) fn bin(&self, age: u32) -> usize {
        // Twice the octave, and one more in its upper half: never more than one off.
        let octave = (age / FIRST_BIN_TICKS).max(1).ilog2();
        let guess = usize::try_from(2 * octave).unwrap_or(0).min(BINS - 2);
        let begun = |bin| usize::from(age >= self.start(bin));
        (guess + begun(guess + 1) + begun(guess + 2)).min(BINS - 1)
    }

    /// The number of a class.
    pub(super) fn class(&mut self, features: Features) -> ClassNumber {
        if let Some(number) = self.numbers.get(&features) {
            return *number;
        }
        if self.rows.len() >= CLASSES_MAX && features != features.coarse() {
            return self.class(features.coarse());
        }
        let number = ClassNumber::try_from(self.rows.len()).unwrap_or(0);
        self.rows.push(Row {
            features,
            hits: [0.0; BINS],
            gone: [0.0; BINS],
            waiting: [0; BINS],
            reached: [0.0; BINS],
            index: [0.0; BINS],
            within_hour: 0.0,
            total_hits: 0.0,
            expected: 0.0,
            main: 1.0,
            factor: 1.0,
            is_due: false,
        });
        self.numbers.insert(features, number);
        self.score_new(number);
        number
    }

    /// The features of a class.
    pub(super) fn features(&self, class: ClassNumber) -> Option<Features> {
        self.row(class).map(|row| row.features)
    }

    /// Number of classes.
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether enough was seen to predict anything.
    pub(super) fn is_ready(&self) -> bool {
        self.reuses >= REUSES_MIN
    }

    /// Counts a run of `blocks` that begins its life in a class.
    pub(super) fn begin(&mut self, class: ClassNumber, blocks: u32) {
        self.blocks += float(blocks);
        self.runs += 1.0;
        self.enter(class, 0, blocks);
    }

    /// Counts blocks that wait in a bin.
    pub(super) fn enter(&mut self, class: ClassNumber, bin: usize, blocks: u32) {
        if let Some(waiting) = self.row_mut(class).and_then(|row| row.waiting.get_mut(bin)) {
            *waiting = waiting.saturating_add(blocks);
        }
    }

    /// Counts blocks out that waited in a bin.
    pub(super) fn leave(&mut self, class: ClassNumber, bin: usize, blocks: u32) {
        if let Some(waiting) = self.row_mut(class).and_then(|row| row.waiting.get_mut(bin)) {
            *waiting = waiting.saturating_sub(blocks);
        }
    }

    /// Counts blocks that waited in one bin and wait in a later one now.
    pub(super) fn age(&mut self, class: ClassNumber, from: usize, to: usize, blocks: u32) {
        let Some(row) = self.row_mut(class) else {
            return;
        };
        if let Some(waiting) = row.waiting.get_mut(from) {
            *waiting = waiting.saturating_sub(blocks);
        }
        if let Some(waiting) = row.waiting.get_mut(to) {
            *waiting = waiting.saturating_add(blocks);
        }
    }

    /// Counts blocks that are forgotten, and out of the bin that they were counted in: they came to
    /// that age.
    pub(super) fn forget(&mut self, class: ClassNumber, counted: usize, age: u32, blocks: u32) {
        self.leave(class, counted, blocks);
        self.settle(class);
        let bin = self.bin(age);
        if let Some(gone) = self.row_mut(class).and_then(|row| row.gone.get_mut(bin)) {
            // One at a time, as they go: what a sum of them is rounded to is part of the figures.
            for _ in 0..blocks {
                *gone += 1.0;
            }
        }
    }

    /// Counts blocks that were used again at an age, and out of the bin that they were counted in.
    pub(super) fn hit(&mut self, class: ClassNumber, counted: usize, age: u32, blocks: u32) {
        self.leave(class, counted, blocks);
        self.settle(class);
        self.reuses += 1.0;
        let bin = self.bin(age);
        if let Some(hits) = self.row_mut(class).and_then(|row| row.hits.get_mut(bin)) {
            *hits += float(blocks);
        }
    }

    /// The index of what has this class and age: the most uses per block and second that it can
    /// still earn.
    pub(super) fn index(&mut self, class: ClassNumber, age: u32) -> f32 {
        self.settle(class);
        let bin = self.bin(age);
        let Some(row) = self.row(class) else {
            return 0.0;
        };
        let here = row.index.get(bin).copied().unwrap_or(0.0);
        let Some(next) = row.index.get(bin.saturating_add(1)).copied() else {
            return here;
        };
        let (from, to) = (self.start(bin), self.start(bin.saturating_add(1)));
        if age <= from || from == 0 {
            return here;
        }
        // Straight in the logarithm of age, from one half octave to the next.
        let part = (2.0 * (float(age) / float(from)).log2()).min(1.0);
        if age >= to {
            return next;
        }
        here + (next - here) * part
    }

    /// The probability that what has this class is used within an hour.
    pub(super) fn within_hour(&self, class: ClassNumber) -> Option<f32> {
        let row = self.row(class).filter(|_| self.is_ready())?;
        Some(if row.is_due {
            self.score(row).1
        } else {
            row.within_hour
        })
    }

    /// Computes the index of every class anew, from what was seen so far; that of each when it is
    /// asked for.
    pub(super) fn refresh(&mut self) {
        // Every block counts the same, and a run of mean length counts as one.
        let weight = self.runs.max(1.0) / self.blocks.max(1.0);
        for row in &mut self.rows {
            if row.is_due {
                row.decay();
            }
            row.count_reached();
        }
        let global = self.global();
        for row in &mut self.rows {
            row.total_hits = row.hits.iter().sum::<f32>() * weight;
            row.expected = expected(&global, &row.reached) * weight;
        }
        self.rake();
        for row in &mut self.rows {
            row.factor = class_factor(row);
            row.is_due = true;
        }
        self.blocks *= DECAY;
        self.runs *= DECAY;
        self.global = global;
        self.weight = weight;
    }

    /// Does what the last refresh left to be done for a class.
    pub(super) fn settle(&mut self, class: ClassNumber) {
        let Some(row) = self.row(class).filter(|row| row.is_due) else {
            return;
        };
        let scored = self.score(row);
        if let Some(row) = self.row_mut(class) {
            (row.index, row.within_hour) = scored;
            row.decay();
        }
    }

    /// The index of a class, and the probability that what it has is used within an hour.
    fn score(&self, row: &Row) -> (Bins, f32) {
        score(row, &self.global, row.factor, self.weight, &self.widths)
    }

    /// Bytes of memory held.
    pub(super) fn memory_bytes(&self) -> usize {
        self.rows.capacity() * size_of::<Row>()
            + self.numbers.capacity() * size_of::<(Features, ClassNumber)>()
    }

    fn row(&self, class: ClassNumber) -> Option<&Row> {
        self.rows.get(usize::from(class))
    }

    fn row_mut(&mut self, class: ClassNumber) -> Option<&mut Row> {
        self.rows.get_mut(usize::from(class))
    }

    /// The hazard of each bin over all classes.
    fn global(&self) -> Bins {
        let (mut global, mut reached) = ([0.0; BINS], [0.0; BINS]);
        for row in &self.rows {
            add(&mut global, &row.hits);
            add(&mut reached, &row.reached);
        }
        for (hits, reached) in global.iter_mut().zip(&reached) {
            *hits /= reached.max(*hits).max(1e-6);
        }
        global
    }

    /// Computes the factors of the levels of all features, such that what is expected of each level agrees with
    /// what was seen of it.
    fn rake(&mut self) {
        self.factors = [[1.0; LEVELS]; FEATURES];
        // Side by side: they are gone through many times.
        let of = |row: &Row| (row.features, row.total_hits, row.expected);
        let rows: Vec<(Features, f32, f32)> = self.rows.iter().map(of).collect();
        let mut mains = vec![1.0; rows.len()];
        for _ in 0..SWEEPS {
            for (feature, own) in self.factors.iter_mut().enumerate() {
                let mut seen = [0.0; LEVELS];
                let mut due = [0.0; LEVELS];
                for ((features, hits, expected), main) in rows.iter().zip(&mains) {
                    let at = features.0.get(feature).map_or(0, |at| usize::from(*at));
                    if let (Some(seen), Some(due)) = (seen.get_mut(at), due.get_mut(at)) {
                        *seen += hits;
                        *due += expected * main;
                    }
                }
                let mut change = [1.0; LEVELS];
                for ((change, seen), due) in change.iter_mut().zip(&seen).zip(&due) {
                    *change = (seen + LEVEL_PSEUDO) / (due + LEVEL_PSEUDO);
                }
                for ((features, ..), main) in rows.iter().zip(&mut mains) {
                    *main *= level_of(*features, feature, &change);
                }
                for (factor, change) in own.iter_mut().zip(&change) {
                    *factor *= change;
                }
            }
        }
        for (row, main) in self.rows.iter_mut().zip(mains) {
            row.main = main;
        }
    }

    /// Gives a class that was not seen before an index at once.
    fn score_new(&mut self, class: ClassNumber) {
        let factors = self.factors;
        if let Some(row) = self.row_mut(class) {
            row.main = product(row.features, &factors);
            row.factor = class_factor(row);
        }
        if let Some(row) = self.row(class) {
            let scored = score(row, &self.global, row.factor, 0.0, &self.widths);
            if let Some(row) = self.row_mut(class) {
                (row.index, row.within_hour) = scored;
            }
        }
    }
}

impl Row {
    /// What came to an age is what was used at that age or later, or waits there.
    fn count_reached(&mut self) {
        let mut older = 0.0;
        let ended = self.hits.iter().zip(&self.gone);
        let bins = self.reached.iter_mut().zip(ended).zip(&self.waiting);
        for ((reached, (hits, gone)), waiting) in bins.rev() {
            older += hits + gone + float(*waiting);
            *reached = older;
        }
    }

    /// Makes what was seen count less than what will be.
    fn decay(&mut self) {
        for value in self.hits.iter_mut().chain(&mut self.gone) {
            *value *= DECAY;
        }
        self.is_due = false;
    }
}

fn add(sums: &mut Bins, more: &Bins) {
    for (sum, more) in sums.iter_mut().zip(more) {
        *sum += more;
    }
}

type Factors = [[f32; LEVELS]; FEATURES];

/// The factor of a class's level of a feature.
fn level_of(features: Features, feature: usize, factors: &[f32; LEVELS]) -> f32 {
    let level = features.0.get(feature).copied().map(usize::from);
    let factor = level.and_then(|level| factors.get(level));
    factor.copied().unwrap_or(1.0)
}

fn product(features: Features, factors: &Factors) -> f32 {
    let levels = features.0.iter().zip(factors);
    levels
        .filter_map(|(level, factors)| factors.get(usize::from(*level)))
        .product()
}

fn expected(global: &Bins, reached: &Bins) -> f32 {
    let both = global.iter().zip(reached);
    both.map(|(hazard, reached)| hazard * reached).sum()
}

fn class_factor(row: &Row) -> f32 {
    let seen = (row.total_hits + LEVEL_PSEUDO) / (row.expected * row.main + LEVEL_PSEUDO);
    row.main * seen
}

/// A class's hazards, and from them its index at the beginning of each bin and the probability of a
/// use within an hour.
fn score(row: &Row, global: &Bins, factor: f32, weight: f32, widths: &Bins) -> (Bins, f32) {
    let mut hazards = [0.0_f32; BINS];
    let counts = row.hits.iter().zip(&row.reached).zip(global);
    for (own, ((hits, reached), hazard)) in hazards.iter_mut().zip(counts) {
        let prior = hazard * factor;
        let seen = (hits * weight + BIN_PSEUDO) / (reached * weight * prior + BIN_PSEUDO);
        *own = (prior * seen).clamp(0.0, 0.95);
    }
    let mut index = [0.0; BINS];
    let within_hour = index::compute(&hazards, widths, &mut index);
    (index, within_hour)
}

#[expect(clippy::as_conversions, clippy::cast_precision_loss, reason = "counts")]
const fn float(count: u32) -> f32 {
    count as f32
}

#[expect(
    clippy::as_conversions,
    clippy::cast_precision_loss,
    reason = "numbers of bins"
)]
const fn small(bin: usize) -> f64 {
    bin as f64
}

#[expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    reason = "seconds"
)]
const fn single(value: f64) -> f32 {
    value as f32
}

#[expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "ticks: positive, and the conversion saturates"
)]
const fn whole(value: f64) -> u32 {
    value as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bin_of_an_age_is_the_last_one_that_has_begun() {
        let table = Table::new();
        let ages = (0..200_000).chain((17..32).map(|octave| 1 << octave));
        for age in ages.chain([u32::MAX]) {
            let begun = (0..BINS).take_while(|bin| table.start(*bin) <= age).count();
            assert_eq!(table.bin(age) + 1, begun, "{age}");
        }
    }

    #[test]
    fn a_class_that_is_asked_for_late_has_the_index_of_the_refresh_before() {
        let (mut early, mut late) = (Table::new(), Table::new());
        let class_of = |turn| {
            let features = [turn, 1, 2, 0, 1, 0, 0];
            Features(features)
        };
        for round in 0..40_u32 {
            for turn in 0..5_u8 {
                let blocks = 1 + (round + u32::from(turn)) % 7;
                for table in [&mut early, &mut late] {
                    let class = table.class(class_of(turn));
                    table.begin(class, blocks + 2);
                    if round % 3 > 0 && round % 5 == u32::from(turn) {
                        table.hit(class, 0, round * 50, blocks);
                    } else if round % 4 == 0 && turn > 0 {
                        table.forget(class, 0, round * 300, 1);
                    }
                }
            }
            early.refresh();
            (0..5).for_each(|class| early.settle(class));
            late.refresh();
            if round % 6 == 0 {
                let class = ClassNumber::try_from(round % 5).unwrap();
                let bits = |table: &mut Table| table.index(class, 90).to_bits();
                assert_eq!(bits(&mut early), bits(&mut late), "{round}");
            }
        }
        assert!(early.is_ready());
        for class in 0..5 {
            let hour = |table: &Table| table.within_hour(class).map(f32::to_bits);
            assert_eq!(hour(&early), hour(&late));
            for age in [0, 17, 400, 90_000, u32::MAX] {
                let bits = |table: &mut Table| table.index(class, age).to_bits();
                assert_eq!(bits(&mut early), bits(&mut late), "{class} {age}");
            }
            assert!(hour(&late).is_some());
        }
    }
}
