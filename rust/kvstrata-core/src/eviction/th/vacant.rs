//! Numbers that are free, given out in ascending order, round and round: what is made together lies
//! together, and so does what was made at about the same time.

/// Numbers of a word.
const BITS: u32 = u64::BITS;
/// Levels: enough for all numbers.
const LEVELS: usize = 6;

/// A bit for each number, and above it, a bit for each word of the level below that is not 0.
#[derive(Debug, Default)]
pub(super) struct Vacant {
    levels: [Vec<u64>; LEVELS],
    /// Where the search for the next one begins.
    next: u32,
}

const fn split(at: u32) -> (usize, u64) {
    #[expect(clippy::as_conversions, reason = "widened; From is not const")]
    let word = (at / BITS) as usize;
    (word, 1 << (at % BITS))
}

impl Vacant {
    /// Adds a number.
    pub(super) fn put(&mut self, number: u32) {
        let mut at = number;
        for level in &mut self.levels {
            let (word, bit) = split(at);
            if level.len() <= word {
                level.resize(word + 1, 0);
            }
            let Some(word) = level.get_mut(word) else {
                return;
            };
            let was_empty = *word == 0;
            *word |= bit;
            if !was_empty {
                return;
            }
            at /= BITS;
        }
    }

    /// Takes a number out: the next one after the one that was taken last.
    pub(super) fn take(&mut self) -> Option<u32> {
        let number = self.find(self.next).or_else(|| self.find(0))?;
        let mut at = number;
        for level in &mut self.levels {
            let (word, bit) = split(at);
            let Some(word) = level.get_mut(word) else {
                break;
            };
            *word &= !bit;
            if *word != 0 {
                break;
            }
            at /= BITS;
        }
        self.next = number.wrapping_add(1);
        Some(number)
    }

    /// The first number that is not below another one.
    pub(super) fn find(&self, from: u32) -> Option<u32> {
        let mut at = from;
        for (level, words) in self.levels.iter().enumerate() {
            let (word, bit) = split(at);
            let behind = words.get(word)? & bit.wrapping_neg();
            if behind != 0 {
                let first = at / BITS * BITS + behind.trailing_zeros();
                let below = self.levels.get(..level)?;
                return below.iter().rev().try_fold(first, |at, words| {
                    let word = words.get(usize::try_from(at).ok()?)?;
                    Some(at * BITS + word.trailing_zeros())
                });
            }
            at = at / BITS + 1;
        }
        None
    }

    /// The number that is taken next.
    pub(super) fn peek(&self) -> u32 {
        self.next
    }

    /// Bytes of memory held.
    pub(super) fn memory_bytes(&self) -> usize {
        let words: usize = self.levels.iter().map(Vec::capacity).sum();
        words * size_of::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_next_one_is_the_first_behind_the_last_or_the_first_of_all() {
        let (mut vacant, mut plain) = (Vacant::default(), BTreeSet::new());
        assert_eq!(vacant.take(), None);
        let mut random = 1_u64;
        let mut draw = |below: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            u32::try_from((random >> 33) % below).unwrap()
        };
        let mut next = 0;
        for _ in 0..200_000 {
            let most = [70, 5_000, 300_000, 20_000_000][usize::try_from(draw(4)).unwrap()];
            if draw(2) == 0 {
                let number = draw(most);
                vacant.put(number);
                plain.insert(number);
            } else {
                let first = plain
                    .range(next..)
                    .next()
                    .or_else(|| plain.first())
                    .copied();
                assert_eq!(vacant.take(), first);
                plain.retain(|number| Some(*number) != first);
                next = first.map_or(next, |first| first + 1);
            }
            if plain.len() > 300 {
                plain.clear();
                while vacant.take().is_some() {}
                next = vacant.peek();
            }
        }
    }

    #[test]
    fn the_last_number_of_all_is_given_out() {
        let mut vacant = Vacant::default();
        vacant.put(u32::MAX - 1);
        vacant.put(7);
        assert_eq!(vacant.take(), Some(7));
        assert_eq!(vacant.take(), Some(u32::MAX - 1));
        assert_eq!(vacant.take(), None);
    }
}
