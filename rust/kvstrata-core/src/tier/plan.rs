//! From rows to operations: which rows go together, and where their bytes are.

use crate::buffer::aligned::AlignedBuffer;
use crate::buffer::arena::Arena;
use crate::format::geometry::Geometry;
use crate::io::{Memory, Segment};
use crate::sys::sync::Arc;
use crate::tier::inventory::Inventory;
use crate::tier::request::Item;
use crate::tier::state::FlightRow;

/// Most bytes of one operation; a larger row goes alone.
pub(crate) const OPERATION_BYTES_MAX: u64 = 1 << 20;
/// Most rows of one operation: two segments each stay far below `IOV_MAX` (1024).
pub(crate) const OPERATION_ROWS_MAX: usize = 64;
/// Bytes of the scratch and zero pages: more than any padding, which is below 4 KiB.
pub(crate) const PADDING_BYTES: usize = 4096;

/// Sorts rows into runs of neighbours in one file, each small enough for one operation.
pub(crate) fn runs(mut rows: Vec<FlightRow>, inventory: &Inventory) -> Vec<Vec<FlightRow>> {
    rows.sort_unstable_by_key(|row| row.place);
    let mut runs: Vec<Vec<FlightRow>> = Vec::new();
    for row in rows {
        let stride = inventory
            .row_file(row.place)
            .map_or(OPERATION_BYTES_MAX, |file| file.geometry.row_stride_bytes());
        let rows_max = usize::try_from(OPERATION_BYTES_MAX / stride.max(1))
            .unwrap_or(1)
            .clamp(1, OPERATION_ROWS_MAX);
        match runs.last_mut() {
            Some(run) if run.len() < rows_max && follows(run.last(), &row) => run.push(row),
            _ => runs.push(vec![row]),
        }
    }
    runs
}

fn follows(before: Option<&FlightRow>, row: &FlightRow) -> bool {
    before.is_some_and(|before| {
        before.place.container == row.place.container
            && before.place.row.checked_add(1) == Some(row.place.row)
    })
}

/// The memory of neighbouring rows in file order: each slot, then its padding up to the stride.
pub(crate) fn segments(
    run: &[FlightRow],
    items: &[Item],
    geometry: &Geometry,
    arena: &Arc<Arena>,
    padding: &Arc<AlignedBuffer>,
) -> Vec<Segment> {
    let stride = usize::try_from(geometry.row_stride_bytes()).unwrap_or(usize::MAX);
    let mut segments = Vec::with_capacity(run.len().saturating_mul(2));
    for item in run.iter().filter_map(|row| items.get(row.position)) {
        segments.push(Segment {
            memory: Memory::Arena(Arc::clone(arena)),
            offset: item.offset,
            length: item.row_bytes,
        });
        let rest = stride.saturating_sub(item.row_bytes);
        if rest > 0 {
            segments.push(Segment {
                memory: Memory::Buffer(Arc::clone(padding)),
                // At the page's end: aligned from where its place in the file is.
                offset: PADDING_BYTES.saturating_sub(rest),
                length: rest.min(PADDING_BYTES),
            });
        }
    }
    segments
}
