//! Checks of what a caller hands over with a job.

use crate::error::{Error, Result};
use crate::key::Key;

/// Checks keys and offsets of a job; returns each slot's start and length in the arena.
///
/// # Errors
/// `Argument`, naming the position: lengths that differ, an unknown group, a slot past the
/// arena's end, a key twice, slots that overlap.
pub(crate) fn check_arguments(
    keys: &[Key],
    offsets: &[u64],
    arena_length: usize,
    row_bytes: impl Fn(&Key) -> Option<usize>,
) -> Result<Vec<(usize, usize)>> {
    if keys.len() != offsets.len() {
        return Err(Error::argument(format!(
            "keys and offsets differ in length: {} and {}",
            keys.len(),
            offsets.len()
        )));
    }
    let mut slots = Vec::with_capacity(keys.len());
    for (position, (key, offset)) in keys.iter().zip(offsets).enumerate() {
        let Some(row_bytes) = row_bytes(key) else {
            return Err(Error::argument(format!(
                "keys[{position}]: group {} is not one of this tier's groups",
                key.group()
            )));
        };
        let start = usize::try_from(*offset).ok();
        let end = start.and_then(|start| start.checked_add(row_bytes));
        let (Some(start), Some(_)) = (start, end.filter(|end| *end <= arena_length)) else {
            return Err(Error::argument(format!(
                "offsets[{position}]: a slot of {row_bytes} bytes at {offset} does not fit in \
                 the arena of {arena_length} bytes"
            )));
        };
        slots.push((start, row_bytes));
    }
    check_keys_distinct(keys)?;
    check_slots_apart(&slots)?;
    Ok(slots)
}

fn check_keys_distinct(keys: &[Key]) -> Result<()> {
    let mut order: Vec<usize> = (0..keys.len()).collect();
    let bytes_of = |at: &usize| keys.get(*at).map(Key::as_bytes);
    order.sort_unstable_by_key(bytes_of);
    for pair in order.windows(2) {
        if let [a, b] = pair
            && bytes_of(a) == bytes_of(b)
        {
            return Err(Error::argument(format!(
                "keys[{}] and keys[{}] are the same",
                a.min(b),
                a.max(b)
            )));
        }
    }
    Ok(())
}

fn check_slots_apart(slots: &[(usize, usize)]) -> Result<()> {
    let mut order: Vec<usize> = (0..slots.len()).collect();
    order.sort_unstable_by_key(|at| slots.get(*at));
    for pair in order.windows(2) {
        if let [a, b] = pair
            && let (Some((first, length)), Some((second, _))) = (slots.get(*a), slots.get(*b))
            && first.saturating_add(*length) > *second
        {
            let what = if first == second {
                "are the same"
            } else {
                "overlap"
            };
            return Err(Error::argument(format!(
                "the slots at offsets[{}] and offsets[{}] {what}",
                a.min(b),
                a.max(b)
            )));
        }
    }
    Ok(())
}
