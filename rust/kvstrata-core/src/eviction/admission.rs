//! Which rows a tier takes at all: those that are likely to be used again, or that were asked for
//! often enough.
//!
//! Both are counted when a request arrives, once for all its keys, wherever a lookup would have
//! stopped. A tier that nobody tells of requests counts the keys that it is offered.

use hashbrown::HashMap;

use super::EvictionPolicy;
use super::request::{Arrival, Tag};
use super::th::Th;

/// Keys of which it is counted how often they were asked for, where nothing else is said.
pub const TRACKED_KEYS: usize = 64_000;

/// What is asked of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdmissionOptions {
    /// Least probability of a use within an hour; 0 takes everything. Rows of which nothing is known
    /// are taken, and so are all while the predictor's directory does not reach back an hour.
    pub theta: f32,
    /// Requests that must have had a key; 1 takes everything.
    pub store_threshold: u32,
    /// Keys of which that is counted.
    pub tracked_keys: usize,
    /// Keys that a predictor knows at most; `None`: those of the last hour, as many as
    /// [`Th::with_directory`] says.
    pub directory: Option<usize>,
}

impl Default for AdmissionOptions {
    /// Takes everything.
    fn default() -> Self {
        Self {
            theta: 0.0,
            store_threshold: 1,
            tracked_keys: TRACKED_KEYS,
            directory: None,
        }
    }
}

/// The state; see the module.
#[derive(Debug)]
pub struct Admission {
    options: AdmissionOptions,
    /// Where the tier's policy predicts nothing.
    predictor: Option<Box<Th>>,
    seen: Seen,
    /// Whether anybody tells of requests.
    is_told: bool,
}

impl Admission {
    /// Knows of no key. `predicts` says whether the tier's own policy predicts.
    pub fn new(options: AdmissionOptions, predicts: bool) -> Self {
        let needed = options.theta > 0.0 && !predicts;
        Self {
            predictor: needed.then(|| Box::new(Th::with_directory(options.directory))),
            seen: Seen::new(options.tracked_keys),
            is_told: false,
            options,
        }
    }

    /// Whether every row is taken, whatever comes.
    pub fn takes_all(&self) -> bool {
        self.options.theta <= 0.0 && self.options.store_threshold <= 1
    }

    /// Says what time it is, in milliseconds since any instant.
    pub fn set_time(&mut self, milliseconds: u64) {
        if let Some(predictor) = &mut self.predictor {
            predictor.set_time(milliseconds);
        }
    }

    /// A request has arrived.
    pub fn observe(&mut self, arrival: &Arrival<'_>) {
        self.is_told = true;
        if let Some(predictor) = &mut self.predictor {
            predictor.observe(arrival, &[]);
        }
        if self.options.store_threshold > 1 {
            for tag in arrival.tags {
                self.seen.count(*tag);
            }
        }
    }

    /// Rows of these keys are offered.
    pub fn offered(&mut self, tags: impl IntoIterator<Item = Tag>) {
        if self.options.store_threshold <= 1 {
            return;
        }
        for tag in tags {
            // What a request adds to its prompt was in no arrival.
            if !self.is_told || self.seen.times(tag) == 0 {
                self.seen.count(tag);
            }
        }
    }

    /// Whether a row is taken; `policy` is the tier's own.
    pub fn admits(&self, tag: Tag, policy: Option<&dyn EvictionPolicy>) -> bool {
        let threshold = self.options.store_threshold;
        if threshold > 1 && self.seen.times(tag) < threshold {
            return false;
        }
        if self.options.theta <= 0.0 || !self.is_told {
            return true;
        }
        let predicted = match &self.predictor {
            Some(predictor) => predictor.reuse_probability(tag),
            None => policy.and_then(|policy| policy.reuse_probability(tag)),
        };
        predicted.is_none_or(|probability| probability >= self.options.theta)
    }

    /// Bytes of memory held.
    pub fn memory_bytes(&self) -> usize {
        let predictor = self.predictor.as_ref();
        predictor.map_or(0, |predictor| predictor.memory_bytes()) + self.seen.memory_bytes()
    }
}

/// How often keys were seen: of the last ones, and of those before them.
#[derive(Debug)]
struct Seen {
    most: usize,
    latest: HashMap<Tag, u32>,
    earlier: HashMap<Tag, u32>,
}

impl Seen {
    fn new(most: usize) -> Self {
        Self {
            most: most.div_ceil(2).max(1),
            latest: HashMap::new(),
            earlier: HashMap::new(),
        }
    }

    fn times(&self, tag: Tag) -> u32 {
        let found = self.latest.get(&tag).or_else(|| self.earlier.get(&tag));
        found.copied().unwrap_or(0)
    }

    fn count(&mut self, tag: Tag) {
        let times = self.times(tag).saturating_add(1);
        if self.latest.len() >= self.most && !self.latest.contains_key(&tag) {
            self.earlier = core::mem::take(&mut self.latest);
        }
        self.latest.insert(tag, times);
    }

    fn memory_bytes(&self) -> usize {
        (self.latest.capacity() + self.earlier.capacity()) * size_of::<(Tag, u32)>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eviction::Class;
    use crate::eviction::request::{Context, RequestId};

    fn options(theta: f32, store_threshold: u32) -> AdmissionOptions {
        AdmissionOptions {
            theta,
            store_threshold,
            ..AdmissionOptions::default()
        }
    }

    fn arrive(admission: &mut Admission, tags: &[Tag], milliseconds: u64) {
        admission.set_time(milliseconds);
        admission.observe(&Arrival {
            id: RequestId(0),
            class: Class(0),
            tags,
            context: Context::default(),
        });
    }

    fn tags(numbers: impl IntoIterator<Item = u64>) -> Vec<Tag> {
        let spread = |number: u64| Tag(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        numbers.into_iter().map(spread).collect()
    }

    #[test]
    fn without_rules_everything_is_taken() {
        let mut admission = Admission::new(AdmissionOptions::default(), false);
        assert!(admission.takes_all());
        arrive(&mut admission, &tags(0..4), 0);
        assert!(admission.admits(Tag(9), None));
        assert_eq!(admission.memory_bytes(), 0);
    }

    #[test]
    fn a_request_counts_once_and_its_answer_is_seen_when_it_is_offered() {
        let mut admission = Admission::new(options(0.0, 2), false);
        let (prompt, answer) = (tags(0..3), tags(3..4));
        arrive(&mut admission, &prompt, 0);
        for _ in 0..3 {
            admission.offered(prompt.iter().chain(&answer).copied());
        }
        assert!(!admission.admits(prompt[0], None) && !admission.admits(answer[0], None));
        arrive(&mut admission, &tags(0..4), 0);
        assert!(admission.admits(prompt[0], None) && admission.admits(answer[0], None));
    }

    #[test]
    fn who_is_told_of_no_request_counts_offers() {
        let mut admission = Admission::new(options(0.05, 2), false);
        admission.offered(tags(0..2));
        assert!(!admission.admits(tags(0..1)[0], None));
        admission.offered(tags(0..1));
        assert!(admission.admits(tags(0..1)[0], None));
        assert!(!admission.admits(tags(1..2)[0], None));
    }

    #[test]
    fn how_often_keys_were_seen_is_forgotten_when_there_are_too_many() {
        let mut seen = Seen::new(100);
        for number in 0..10_000 {
            seen.count(Tag(number));
            assert!(seen.latest.len() + seen.earlier.len() <= 101);
        }
        assert_eq!((seen.times(Tag(9_999)), seen.times(Tag(0))), (1, 0));
    }

    #[test]
    fn prompts_that_never_come_back_are_refused_and_turns_are_not() {
        let mut admission = Admission::new(options(0.05, 1), false);
        let mut next = 1_000_000;
        let mut minute = 0;
        for session in 0..60_u64 {
            // A session of three turns, and twenty prompts that come once.
            for turn in 1..=3 {
                minute += 1;
                arrive(
                    &mut admission,
                    &tags(session * 100..session * 100 + turn * 8),
                    minute * 60_000,
                );
                for _ in 0..20 {
                    let once = tags(next..next + 8);
                    next += 8;
                    admission.set_time(minute * 60_000);
                    admission.observe(&Arrival {
                        id: RequestId(0),
                        class: Class(0),
                        tags: &once,
                        context: Context {
                            prompt_tokens: Some(40_000),
                            ..Context::default()
                        },
                    });
                }
            }
        }
        let turns = tags(9_000..9_008);
        arrive(&mut admission, &turns, minute * 60_000 + 1);
        arrive(
            &mut admission,
            &tags(9_000..9_016),
            minute * 60_000 + 60_000,
        );
        assert!(admission.admits(turns[0], None));
        assert!(!admission.admits(tags(next - 8..next)[0], None));
        assert!(admission.admits(Tag(77), None), "nothing is known of it");
    }

    /// Prompts of 8 keys, one a minute; each comes back `gap` minutes later. How many of the later half
    /// of `minutes` are taken when they come first.
    fn taken_of_sessions(directory: usize, gap: u64, minutes: u64) -> u64 {
        let mut admission = Admission::new(
            AdmissionOptions {
                directory: Some(directory),
                ..options(0.05, 1)
            },
            false,
        );
        let session = |number: u64| tags(number * 8..number * 8 + 8);
        let mut taken = 0;
        for minute in 0..minutes {
            if let Some(earlier) = minute.checked_sub(gap) {
                arrive(&mut admission, &session(earlier), minute * 60_000);
            }
            arrive(&mut admission, &session(minute), minute * 60_000);
            let is_taken = admission.admits(session(minute)[0], None);
            taken += u64::from(minute >= minutes / 2 && is_taken);
        }
        taken
    }

    #[test]
    fn a_directory_that_forgets_before_the_hour_refuses_nothing() {
        // Sessions come back after 40 minutes; the directory knows the keys of 20, then 30, then all.
        for directory in [160, 240, 1 << 16] {
            assert_eq!(
                taken_of_sessions(directory, 40, 2_000),
                1_000,
                "{directory}"
            );
        }
    }

    #[test]
    fn a_directory_that_reaches_back_an_hour_refuses_what_never_comes() {
        // Each comes back after two hours, when the directory of 3 hours' keys still knows it.
        assert_eq!(taken_of_sessions(16 * 180, 120, 2_000), 0);
    }

    #[test]
    fn predictions_begin_again_when_the_whole_directory_reaches_back_an_hour() {
        let mut admission = Admission::new(
            AdmissionOptions {
                directory: Some(800),
                ..options(0.05, 1)
            },
            false,
        );
        // One prompt that comes back, and then those that never do, one a minute.
        let mut milliseconds = 0;
        for _ in 0..40 {
            milliseconds += 10_000_000;
            arrive(&mut admission, &tags(0..8), milliseconds);
        }
        let mut once = |admission: &mut Admission, number: u64, step: u64| {
            milliseconds += step;
            let own = tags(1_000 + number * 8..1_008 + number * 8);
            arrive(admission, &own, milliseconds);
            admission.admits(own[0], None)
        };
        for number in 0..400 {
            once(&mut admission, number, 60_000);
        }
        assert!(!once(&mut admission, 400, 60_000));
        // A flood: the directory turns over within minutes, and nobody knows what would come back.
        let flood: Vec<bool> = (500..700)
            .map(|at| once(&mut admission, at, 1_000))
            .collect();
        assert!(flood[150..].iter().all(|taken| *taken));
        // It is over. For a turn of the directory all are taken, then none.
        let after: Vec<bool> = (700..1_200)
            .map(|at| once(&mut admission, at, 60_000))
            .collect();
        assert!(after[..80].iter().all(|taken| *taken));
        assert!(after[300..].iter().all(|taken| !*taken));
    }
}
