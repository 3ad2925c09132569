//! From hazards to the index by which runs are ranked: the most uses per block and second that can
//! still be earned.

use super::table::{BINS, Bins};

/// Horizon of the probability that is returned, in seconds.
const HOUR: f32 = 3600.0;

/// Computes the index at the beginning of each bin, and returns the probability of a use within an
/// hour.
///
/// With S the probability of not having been used so far, the index at a point is the steepest way
/// from there to a later point in the plane of (sum of S times width, sum of S times hazard): its
/// numerator is the probability of a use until then, its denominator the expected time. Those ways
/// lie on an upper hull, which one pass from the end finds.
pub(super) fn compute(hazards: &Bins, widths: &Bins, index: &mut Bins) -> f32 {
    let (mut time, mut gain, mut survives) = (0.0_f32, 0.0_f32, 1.0_f32);
    let (mut elapsed, mut within_hour) = (0.0_f32, 0.0);
    let mut points = [(0.0_f32, 0.0_f32); BINS + 1];
    let bins = hazards.iter().zip(widths).zip(points.iter_mut().skip(1));
    for ((hazard, width), point) in bins {
        gain += survives * hazard;
        time += survives * width * (1.0 - hazard / 2.0);
        survives *= 1.0 - hazard;
        elapsed += width;
        if elapsed <= HOUR {
            within_hour = gain;
        }
        *point = (time, gain);
    }
    let mut hull = Hull::of(points.last().copied().unwrap_or_default());
    let starts = points.iter().take(BINS);
    for (index, start) in index.iter_mut().zip(starts).rev() {
        // What lies below the way from here to the point after it is on no steepest way any more.
        while hull.has_two() && below(*start, hull.near, hull.far) {
            hull.pop();
        }
        *index = slope(*start, hull.near);
        hull.push(*start);
    }
    within_hour
}

/// Points, of which the last two are at hand.
struct Hull {
    near: (f32, f32),
    far: (f32, f32),
    /// The points, but for the last one.
    others: [(f32, f32); BINS + 1],
    length: usize,
}

impl Hull {
    const fn of(point: (f32, f32)) -> Self {
        Self {
            near: point,
            far: point,
            others: [point; BINS + 1],
            length: 1,
        }
    }

    const fn has_two(&self) -> bool {
        self.length > 1
    }

    fn push(&mut self, point: (f32, f32)) {
        if let Some(place) = self.others.get_mut(self.length) {
            *place = self.near;
        }
        self.length += 1;
        (self.near, self.far) = (point, self.near);
    }

    fn pop(&mut self) {
        self.length -= 1;
        self.near = self.far;
        let before = self.others.get(self.length.saturating_sub(1));
        self.far = before.copied().unwrap_or_default();
    }
}

/// Whether a point is not above the way from one before it to one behind it.
fn below(start: (f32, f32), near: (f32, f32), far: (f32, f32)) -> bool {
    (near.1 - start.1) * (far.0 - start.0) <= (far.1 - start.1) * (near.0 - start.0)
}

fn slope(from: (f32, f32), to: (f32, f32)) -> f32 {
    (to.1 - from.1) / (to.0 - from.0).max(1e-9)
}
