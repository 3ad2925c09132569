//! The newest of the epochs that are recorded, whatever else lies among the records. Pure.

use std::collections::BTreeSet;

use crate::object::names::Epoch;

/// Most epochs out of reach that are kept until it is known whether others lie between.
const FAR_MAX: usize = 1024;

/// The newest epoch so far.
#[derive(Debug, Default)]
pub(crate) struct Newest {
    epoch: Option<Epoch>,
    /// Those that were met and that nobody can have come to, the nearest.
    far: BTreeSet<Epoch>,
}

impl Newest {
    /// Takes notice of a record, in any order.
    pub(crate) fn meet(&mut self, epoch: Epoch) {
        self.far.insert(epoch);
        while let Some(next) = self.far.first()
            && next.can_follow(self.epoch.map_or(0, |epoch| epoch.number))
        {
            self.epoch = self.epoch.max(self.far.pop_first());
        }
        if self.far.len() > FAR_MAX {
            self.far.pop_last();
        }
    }

    /// The newest of those met.
    pub(crate) const fn epoch(&self) -> Option<Epoch> {
        self.epoch
    }

    /// How many were left out, as far as they are known.
    pub(crate) fn left_out(&self) -> u64 {
        u64::try_from(self.far.len()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn met(numbers: impl IntoIterator<Item = u32>) -> (Option<u32>, u64) {
        let mut newest = Newest::default();
        for number in numbers {
            newest.meet(Epoch { number, suffix: 0 });
        }
        (newest.epoch().map(|epoch| epoch.number), newest.left_out())
    }

    #[test]
    fn the_largest_in_reach_is_found_in_any_order() {
        let far = 4_000_000_000;
        assert_eq!(met([]), (None, 0));
        assert_eq!(met([1, 2, 3]), (Some(3), 0));
        assert_eq!(met([3, 1, 2]), (Some(3), 0));
        assert_eq!(met([far, 2, far - 1, 1]), (Some(2), 2));
        assert_eq!(met([far]), (None, 1));
        // One leads to the next.
        assert_eq!(met([200_000_001, 1, 100_000_001]), (Some(200_000_001), 0));
        assert_eq!(met([200_000_002, 1, 100_000_001]), (Some(100_000_001), 1));
    }

    #[test]
    fn what_is_out_of_reach_takes_bounded_memory() {
        let far = (0..5000).map(|at| 4_000_000_000 - at);
        let (newest, left_out) = met(far.chain([7]));
        assert_eq!((newest, left_out), (Some(7), 1024));
    }
}
