//! What this machine takes for looks at random places of a table: no policy can take less.

#![expect(
    clippy::indexing_slicing,
    clippy::expect_used,
    reason = "a benchmark ends where its own numbers are wrong"
)]

use core::fmt;
use std::hint::black_box;
use std::time::Duration;

use crate::blocks::at;
use crate::processor::processor;

/// One line of the processor's caches.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Line(u32);

/// Time for each look, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Floor {
    /// Where each look says where the next one is.
    pub one_by_one: f64,
    /// Where all places are known before.
    pub together: f64,
}

impl fmt::Display for Floor {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{:.1} ns where each look waits for the one before, {:.1} ns where none does",
            self.one_by_one, self.together
        )
    }
}

/// Looks once at each of so many lines, in random order.
///
/// # Panics
/// For a table of 2^32 lines or more.
pub fn measure(lines: usize) -> Floor {
    let all = u32::try_from(lines).expect("small");
    let mut order: Vec<u32> = (0..all).collect();
    let mut random = 1_u64;
    for last in (1..lines).rev() {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let drawn = usize::try_from(random >> 33).expect("small") % (last + 1);
        order.swap(last, drawn);
    }
    let mut table = vec![Line(0); lines];
    for pair in order.windows(2) {
        table[at(pair[0])].0 = pair[1];
    }
    let start = processor();
    let mut place = order[0];
    for _ in 1..lines {
        place = table[at(place)].0;
    }
    black_box(place);
    let one_by_one = each(processor().saturating_sub(start), all);
    let start = processor();
    let sum = order.iter().map(|place| u64::from(table[at(*place)].0));
    black_box(sum.sum::<u64>());
    let together = each(processor().saturating_sub(start), all);
    Floor {
        one_by_one,
        together,
    }
}

fn each(all: Duration, count: u32) -> f64 {
    all.as_secs_f64() * 1e9 / f64::from(count)
}
