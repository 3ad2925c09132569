//! The best that any cache of a size could have done: Belady's rule (1966) with bypass.
//!
//! The block whose next use is farthest goes, or does not come in. A block's next use is never
//! before that of the blocks before it, so among equals the deepest goes: prefixes stay whole.

use std::collections::BTreeSet;

use super::trace::Trace;

const NEVER: u32 = u32::MAX;

/// Blocks that the best cache of `capacity` blocks would have found.
pub fn optimum(trace: &Trace, capacity: usize) -> u64 {
    let unique = usize::try_from(trace.unique_blocks).unwrap_or(0);
    let following = next_uses(trace, unique);
    let mut cached: BTreeSet<(u32, u32, u32)> = BTreeSet::new();
    let mut key: Vec<Option<(u32, u32)>> = vec![None; unique];
    let mut hits = 0_u64;
    let mut following = following.into_iter();
    for request in &trace.requests {
        let mut unbroken = true;
        for (depth, block) in (0_u32..).zip(request.blocks()) {
            let next = following.next().unwrap_or(NEVER);
            let Some(own) = usize::try_from(block).ok().and_then(|at| key.get_mut(at)) else {
                continue;
            };
            let old = own.take();
            if let Some((next, depth)) = old {
                cached.remove(&(next, depth, block));
            }
            unbroken = unbroken && old.is_some();
            hits += u64::from(unbroken);
            if next == NEVER {
                continue;
            }
            *own = Some((next, depth));
            cached.insert((next, depth, block));
            if cached.len() > capacity
                && let Some((_, _, victim)) = cached.pop_last()
                && let Some(own) = usize::try_from(victim).ok().and_then(|at| key.get_mut(at))
            {
                *own = None;
            }
        }
    }
    hits
}

/// For each access in order, the number of the request that uses the block next.
fn next_uses(trace: &Trace, unique: usize) -> Vec<u32> {
    let mut next = vec![NEVER; unique];
    let mut reversed = Vec::new();
    for (number, request) in (0_u32..)
        .zip(&trace.requests)
        .collect::<Vec<_>>()
        .into_iter()
        .rev()
    {
        let blocks: Vec<u32> = request.blocks().collect();
        for block in blocks.iter().rev() {
            let place = usize::try_from(*block).ok().and_then(|at| next.get_mut(at));
            reversed.push(place.map_or(NEVER, |place| core::mem::replace(place, number)));
        }
    }
    reversed.reverse();
    reversed
}
