//! Rows of a job as arrays: what a worker is told of them.

use kvstrata_core::cpu::Place;
use kvstrata_core::key::{GroupId, Key};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::arguments::Keys;

/// Where a context keeps the places of its keys.
const POSITIONS: &str = "_offload_key_positions";

/// Keys; and as little-endian bytes the positions of their groups (int32), chunks (int64) and
/// offsets of slots (int64).
pub(super) type Packed<'py> = (
    Bound<'py, PyTuple>,
    Bound<'py, PyBytes>,
    Bound<'py, PyBytes>,
    Bound<'py, PyBytes>,
);

/// A chunk that cannot be said.
const UNKNOWN: i64 = -1;

/// Packs rows in the order given, each with the token that its chunk ends with.
pub(super) fn pack<'py, 'a>(
    py: Python<'py>,
    tokens: &[(GroupId, u64)],
    rows: impl Iterator<Item = (&'a Key, Bound<'py, PyAny>, Option<u64>, &'a Place)>,
) -> PyResult<Packed<'py>> {
    let (mut keys, mut groups) = (Vec::new(), Vec::new());
    let (mut chunks, mut offsets) = (Vec::new(), Vec::new());
    for (key, object, end, place) in rows {
        let group = key.group();
        let at = tokens.iter().position(|(other, _)| *other == group);
        let length = at
            .and_then(|at| tokens.get(at))
            .map_or(0, |(_, tokens)| *tokens);
        let at = at.and_then(|at| i32::try_from(at).ok()).unwrap_or(-1);
        groups.extend(at.to_le_bytes());
        chunks.extend(chunk(end, length).to_le_bytes());
        offsets.extend(place.offset.to_le_bytes());
        keys.push(object);
    }
    Ok((
        PyTuple::new(py, keys)?,
        PyBytes::new(py, &groups),
        PyBytes::new(py, &chunks),
        PyBytes::new(py, &offsets),
    ))
}

/// The chunk that ends with token `end`; a key that ends elsewhere is of no whole chunk.
fn chunk(end: Option<u64>, tokens: u64) -> i64 {
    let whole = end.filter(|end| tokens > 0 && end % tokens == 0);
    whole
        .and_then(|end| i64::try_from(end / tokens).ok())
        .map_or(UNKNOWN, |count| count - 1)
}

/// The place in the prompt of each key, where the context knows it. The keys' own objects know their
/// hashes.
pub(super) fn positions_of(
    context: &Bound<'_, PyAny>,
    keys: &[Bound<'_, PyAny>],
) -> PyResult<Vec<Option<u64>>> {
    let known = known(context);
    keys.iter()
        .map(|key| position(context, known.as_ref(), key))
        .collect()
}

/// Keys group by group in the order of the prompt; those whose place is not known last.
pub(super) fn in_prompt_order(keys: &[Key], ends: &[Option<u64>]) -> Vec<Key> {
    let mut rows: Vec<(GroupId, u64, Key)> = keys
        .iter()
        .zip(ends)
        .map(|(key, end)| (key.group(), end.unwrap_or(u64::MAX), *key))
        .collect();
    rows.sort_by_key(|(group, end, _)| (*group, *end));
    rows.into_iter().map(|(_, _, key)| key).collect()
}

/// All keys of a request, group by group, each with the token that its chunk ends with.
pub(super) fn with_ends(groups: Vec<Keys>, tokens: &[(GroupId, u64)]) -> Vec<(Key, u64)> {
    let mut keys = Vec::with_capacity(groups.iter().map(|group| group.0.len()).sum());
    for group in groups {
        let first = group.0.first().map(Key::group);
        let tokens = tokens.iter().find(|(id, _)| Some(*id) == first);
        let tokens = tokens.map_or(1, |(_, tokens)| *tokens);
        let ends = (1_u64..).map(|chunk| chunk.saturating_mul(tokens));
        keys.extend(group.0.into_iter().zip(ends));
    }
    keys
}

pub(super) fn known<'py>(context: &Bound<'py, PyAny>) -> Option<Bound<'py, PyDict>> {
    let found = context.getattr(intern!(context.py(), POSITIONS)).ok()?;
    found.cast_into::<PyDict>().ok()
}

/// The token that a key's chunk ends with. `known` is the context's own table, where it has one: to
/// read it there is several times faster than to ask.
pub(super) fn position(
    context: &Bound<'_, PyAny>,
    known: Option<&Bound<'_, PyDict>>,
    key: &Bound<'_, PyAny>,
) -> PyResult<Option<u64>> {
    let py = context.py();
    let end = match known {
        Some(known) => known.get_item(key)?,
        None => Some(context.call_method1(intern!(py, "get_offload_key_position"), (key,))?),
    };
    Ok(end.and_then(|end| end.extract().ok()))
}

/// Keys as Python's bytes.
pub(super) fn bytes_of<'py>(py: Python<'py>, keys: &[Key]) -> Vec<Bound<'py, PyBytes>> {
    keys.iter()
        .map(|key| PyBytes::new(py, key.as_bytes()))
        .collect()
}
