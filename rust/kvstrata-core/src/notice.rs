//! Log lines of a tier, few and bounded, kept until the caller takes them.
//!
//! The core's threads never touch the caller's logging: whoever calls the tier next takes the
//! lines and logs them on its own thread.

use core::time::Duration;
use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use crate::sys::clock::Clock;
use crate::sys::sync::{Arc, Mutex, lock};

/// Most lines that wait to be taken; the oldest go first.
const WAITING_MAX: usize = 256;
/// Time between two lines about the same subject.
const REPEAT_AFTER: Duration = Duration::from_secs(10);

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Good to know.
    Info,
    /// Something was given up.
    Warning,
    /// The tier does not do its work.
    Error,
}

/// One log line.
#[derive(Clone, Debug)]
pub struct Notice {
    /// How bad it is.
    pub level: Level,
    /// One line of text.
    pub text: String,
}

#[derive(Debug, Default)]
struct Waiting {
    lines: VecDeque<Notice>,
    last: HashMap<&'static str, (Instant, u64)>,
}

/// Collects log lines, at most one per subject every ten seconds.
#[derive(Debug)]
pub struct Notices {
    waiting: Mutex<Waiting>,
    clock: Arc<dyn Clock>,
}

impl Notices {
    /// No lines yet.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            waiting: Mutex::default(),
            clock,
        }
    }

    /// Keeps a line about `subject`, unless one was kept less than ten seconds ago; then it is
    /// only counted and the next line tells how many were left out.
    pub fn say(&self, level: Level, subject: &'static str, text: impl FnOnce() -> String) {
        let now = self.clock.now();
        let mut waiting = lock(&self.waiting);
        let left_out = match waiting.last.get_mut(subject) {
            Some((at, left_out)) if now.saturating_duration_since(*at) < REPEAT_AFTER => {
                *left_out = left_out.saturating_add(1);
                return;
            }
            Some((_, left_out)) => *left_out,
            None => 0,
        };
        waiting.last.insert(subject, (now, 0));
        let mut text = text();
        if left_out > 0 {
            text = format!("{text} ({left_out} similar lines left out)");
        }
        match level {
            Level::Info => tracing::info!("{text}"),
            Level::Warning => tracing::warn!("{text}"),
            Level::Error => tracing::error!("{text}"),
        }
        if waiting.lines.len() >= WAITING_MAX {
            waiting.lines.pop_front();
        }
        waiting.lines.push_back(Notice { level, text });
    }

    /// Keeps a line about `subject` unless there ever was one.
    pub fn say_once(&self, level: Level, subject: &'static str, text: impl FnOnce() -> String) {
        if !lock(&self.waiting).last.contains_key(subject) {
            self.say(level, subject, text);
        }
    }

    /// Takes the lines kept so far.
    pub fn take(&self) -> Vec<Notice> {
        lock(&self.waiting).lines.drain(..).collect()
    }
}
