//! What distinguishes one kind of run from another: the features whose product is a class.

use crate::eviction::request::Hint;

/// Ticks of the policy's clock in a second. 32 bits of them last for two years.
pub(super) const TICKS_PER_SECOND: u32 = 64;

/// Number of features.
pub(super) const FEATURES: usize = 7;
/// More levels than any feature has.
pub(super) const LEVELS: usize = 8;

/// How a request came upon what was there; the value is the level of the feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// No block was known.
    Fresh,
    /// It goes on where another ended.
    Continuation,
    /// It goes on where another ended, but for a few blocks that were written anew.
    Rewritten,
    /// It leaves another half-way.
    Branch,
    /// It leaves where several have left.
    Shared,
    /// Left over when a request with a rewritten tail went another way.
    LeftByRewrite,
    /// Left over when a request branched off.
    LeftByBranch,
}

/// The levels of a class, one byte each, in the order of the constants below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Features(pub(super) [u8; FEATURES]);

const FREQUENCY: usize = 1;
const KIND: usize = 4;

/// The first level whose bound is not below `value`, counted from 0.
fn level(value: u32, bounds: &[u32]) -> u8 {
    let above = bounds.iter().take_while(|bound| **bound < value).count();
    u8::try_from(above).unwrap_or(u8::MAX)
}

/// Turn of a conversation: 1, 2, 3-4, 5-8, 9-20, more.
fn turn_level(turn: u8) -> u8 {
    level(u32::from(turn), &[1, 2, 4, 8, 20])
}

/// Requests that touched a run: 1, 2, 3-4, 5-8, 9-32, more.
fn frequency_level(frequency: u8) -> u8 {
    level(u32::from(frequency), &[1, 2, 4, 8, 32])
}

/// A request as its runs see it.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestFeatures {
    /// Turn of the conversation, from 1.
    pub(super) turn: u8,
    /// Tokens in no earlier request.
    pub(super) new_tokens: Option<u32>,
    /// Tokens of the prompt.
    pub(super) prompt_tokens: Option<u32>,
    /// How it came upon what was there.
    pub(super) kind: Kind,
    /// Time since the turn before, in the policy's ticks.
    pub(super) gap: Option<u32>,
    /// What its caller says of what follows.
    pub(super) hint: Hint,
}

impl RequestFeatures {
    /// The class of a run that the request touched as the `frequency`-th one.
    pub(super) fn of_run(&self, frequency: u8) -> Features {
        let new = match self.new_tokens {
            _ if frequency > 1 => 0,
            None => 6,
            Some(tokens) => 1 + level(tokens, &[512, 2048, 8192, 32_768]),
        };
        let prompt = self
            .prompt_tokens
            .map_or(4, |tokens| level(tokens, &[1536, 8192, 32_768]));
        let gap = self.gap.map_or(0, |gap| {
            let seconds = [8, 30, 180, 1200].map(|bound| bound * TICKS_PER_SECOND - 1);
            1 + level(gap, &seconds)
        });
        let hint = match self.hint {
            Hint::None => 0,
            Hint::ToolUse => 1,
            Hint::EndOfTurn => 2,
        };
        Features([
            turn_level(self.turn),
            frequency_level(frequency),
            new,
            prompt,
            kind_level(self.kind),
            gap,
            hint,
        ])
    }
}

const fn kind_level(kind: Kind) -> u8 {
    match kind {
        Kind::Fresh => 0,
        Kind::Continuation => 1,
        Kind::Rewritten => 2,
        Kind::Branch => 3,
        Kind::Shared => 4,
        Kind::LeftByRewrite => 5,
        Kind::LeftByBranch => 6,
    }
}

impl Features {
    /// The same with another kind.
    pub(super) fn with_kind(mut self, kind: Kind) -> Self {
        if let Some(level) = self.0.get_mut(KIND) {
            *level = kind_level(kind);
        }
        self
    }

    /// What is kept when there are too many classes.
    pub(super) fn coarse(mut self) -> Self {
        for (feature, place) in self.0.iter_mut().enumerate() {
            if feature != FREQUENCY && feature != KIND {
                *place = 0;
            }
        }
        self
    }
}
