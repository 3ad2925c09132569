"""Which block of a job goes into which sub-block of which slot.

vLLM names the blocks of a job group by group, how many there are of each, and where in its request
each group's first one stands: blocks carry no position of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstrata.memory.layout import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.memory.layout import SlotLayout

IntArray: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Placement:
    """Where the blocks of one group of one job go.

    Three arrays of equal length: block `block_ids[i]` of the KV tensors belongs to sub-block
    `sub_blocks[i]` of the slot whose first byte in the arena is `slots[i]`. `rows` lists the
    group's slots once each, in order.
    """

    group_index: int
    block_ids: IntArray
    slots: IntArray
    sub_blocks: IntArray
    rows: IntArray


def place_group(
    blocks_per_chunk: int, group_index: int, block_ids: IntArray, first_block: int, rows: IntArray
) -> Placement:
    """Lay a group's blocks into its slots one after the other, the first behind its skip.

    `first_block` is the place of the first block in its request. Ids may repeat.

    # Errors
    :class:`LayoutError` where the number of slots is not the one that these blocks touch.
    """
    skip = first_block % blocks_per_chunk
    positions = np.arange(skip, skip + len(block_ids), dtype=np.int64)
    touched = -(-(skip + len(block_ids)) // blocks_per_chunk) if len(block_ids) else 0
    if touched != len(rows):
        msg = (
            f"{len(block_ids)} blocks of group {group_index}, the first one at {first_block}, "
            f"touch {touched} chunks of {blocks_per_chunk}, not {len(rows)}"
        )
        raise LayoutError(msg)
    return Placement(
        group_index=group_index,
        block_ids=block_ids,
        slots=rows[positions // blocks_per_chunk],
        sub_blocks=positions % blocks_per_chunk,
        rows=rows,
    )


def place_blocks(
    layout: SlotLayout,
    block_ids: IntArray,
    group_sizes: Sequence[int],
    first_blocks: Sequence[int],
    chunk_ids: IntArray,
) -> list[Placement]:
    """Split a job over slots of one size into one :class:`Placement` per group that has blocks.

    `block_ids` and `chunk_ids` hold the groups one after the other; `group_sizes[g]` blocks belong
    to group g, the first of which is block `first_blocks[g]` of its request. Only a group's first
    chunk may start late and only its last may end early. Ids may repeat.

    What this cannot notice: a block left out in the middle of a group. All that follows would land
    one sub-block early (vLLM drops re-allocated blocks of sliding-window groups that way when a
    chunk holds several blocks). Only a count that no longer fits the number of chunks shows here;
    where every row says whose it is, :mod:`kvstrata.vllm.fit` notices all of it.

    # Errors
    :class:`LayoutError` where the counts do not fit each other.
    """
    if len(group_sizes) != len(layout.groups) or len(first_blocks) != len(layout.groups):
        msg = (
            f"a job for {len(group_sizes)} groups with {len(first_blocks)} positions, "
            f"where {len(layout.groups)} groups are known"
        )
        raise LayoutError(msg)
    per_chunk = layout.blocks_per_chunk
    placements = []
    block_start = chunk_start = 0
    for group_index, (size, first) in enumerate(zip(group_sizes, first_blocks, strict=True)):
        if size == 0:
            continue
        count = (first % per_chunk + size + per_chunk - 1) // per_chunk
        rows = chunk_ids[chunk_start : chunk_start + count] * layout.slot_bytes
        blocks = block_ids[block_start : block_start + size]
        if len(rows) != count or len(blocks) != size:
            break
        placements.append(place_group(per_chunk, group_index, blocks, first, rows))
        block_start += size
        chunk_start += count
    if (
        block_start != len(block_ids)
        or chunk_start != len(chunk_ids)
        or block_start != sum(group_sizes)
    ):
        msg = (
            f"{len(block_ids)} blocks in groups of {list(group_sizes)}, the first ones at "
            f"{list(first_blocks)}, do not fill {len(chunk_ids)} chunks of {per_chunk}"
        )
        raise LayoutError(msg)
    return placements
