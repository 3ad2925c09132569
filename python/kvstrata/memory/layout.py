"""The byte layout of one slot, and which block of a job goes where in it.

Units: bytes, unless a name says blocks or chunks. Pure: no torch, no clock, no files.

A *slot* holds one chunk of one KV cache group for all ranks: ``W0|W1|...|padding``. The area of one
rank holds the tensors one after the other, and each tensor ``blocks_per_chunk`` pages. That is the
order vLLM's own offloading worker uses, so rows written under either worker mean the same. What a
group does not cover of its rank's area (tensors of other groups, page padding, blocks a partial
chunk leaves out) is a *gap*, and gaps are zeroed when a slot is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

IntArray = npt.NDArray[np.int64]


class LayoutError(ValueError):
    """Sizes or counts that do not fit each other. The message names both."""


@dataclass(frozen=True, slots=True)
class PageRef:
    """The page of one layer of a group: in which tensor, and which of its bytes matter.

    `page_bytes` is the unpadded size; the padded one belongs to the tensor. `page_offset` is not
    zero where a tensor's page holds several layers side by side (vLLM's packed layouts).
    """

    tensor_index: int
    page_bytes: int
    page_offset: int = 0


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``[start, stop)`` of a rank's area in a slot."""

    start: int
    stop: int


@dataclass(frozen=True)
class Placement:
    """Where the blocks of one group of one job go.

    Three arrays of equal length: block `block_ids[i]` of the KV tensors belongs to sub-block
    `sub_blocks[i]` of the slot of chunk `chunk_ids[i]`. `chunks` lists the group's chunks once
    each, in order.
    """

    group_index: int
    block_ids: IntArray
    chunk_ids: IntArray
    sub_blocks: IntArray
    chunks: IntArray


@dataclass(frozen=True)
class SlotLayout:
    """The geometry of the slots as one rank sees them.

    Invariants (checked by :meth:`check`): the rank's area lies within the slot, the pages fit the
    area, and every reference is to a tensor that exists and is not larger than that tensor's page.
    """

    slot_bytes: int
    area_offset: int
    area_bytes: int
    blocks_per_chunk: int
    tensor_page_bytes: tuple[int, ...]
    groups: tuple[tuple[PageRef, ...], ...]

    def check(self) -> None:
        """Raise :class:`LayoutError` where an invariant does not hold."""
        if self.blocks_per_chunk < 1:
            msg = f"blocks_per_chunk is {self.blocks_per_chunk}, not at least 1"
            raise LayoutError(msg)
        if self.area_offset < 0 or self.area_offset + self.area_bytes > self.slot_bytes:
            msg = (
                f"the rank's area [{self.area_offset}, {self.area_offset + self.area_bytes}) "
                f"does not fit a slot of {self.slot_bytes} bytes"
            )
            raise LayoutError(msg)
        needed = sum(self.tensor_page_bytes) * self.blocks_per_chunk
        if needed > self.area_bytes:
            msg = (
                f"the KV tensors need {needed} bytes per chunk and rank, "
                f"the scheduler reserved {self.area_bytes}"
            )
            raise LayoutError(msg)
        for group_index, refs in enumerate(self.groups):
            for ref in refs:
                self._check_ref(group_index, ref)

    def _check_ref(self, group_index: int, ref: PageRef) -> None:
        if not 0 <= ref.tensor_index < len(self.tensor_page_bytes):
            msg = (
                f"group {group_index} names tensor {ref.tensor_index} "
                f"of {len(self.tensor_page_bytes)}"
            )
            raise LayoutError(msg)
        padded = self.tensor_page_bytes[ref.tensor_index]
        if ref.page_offset < 0 or not 0 < ref.page_bytes <= padded - ref.page_offset:
            msg = (
                f"group {group_index} copies {ref.page_bytes} bytes at {ref.page_offset} per block "
                f"of tensor {ref.tensor_index}, whose pages have {padded}"
            )
            raise LayoutError(msg)

    def tensor_offset(self, tensor_index: int) -> int:
        """Offset of a tensor's first page from the start of the slot."""
        before = sum(self.tensor_page_bytes[:tensor_index])
        return self.area_offset + before * self.blocks_per_chunk

    def written(self, group_index: int, sub_blocks: Sequence[int]) -> list[ByteRange]:
        """Ranges, relative to the rank's area, that storing these sub-blocks of a group writes."""
        ranges = []
        for ref in self.groups[group_index]:
            base = self.tensor_offset(ref.tensor_index) - self.area_offset + ref.page_offset
            page = self.tensor_page_bytes[ref.tensor_index]
            ranges += [
                ByteRange(base + sub * page, base + sub * page + ref.page_bytes)
                for sub in sub_blocks
            ]
        return merge(ranges)

    def gaps(self, group_index: int, sub_blocks: Sequence[int]) -> list[ByteRange]:
        """The rest of the rank's area: what has to be zeroed when these sub-blocks are stored."""
        edges = [
            ByteRange(0, 0),
            *self.written(group_index, sub_blocks),
            ByteRange(self.area_bytes, self.area_bytes),
        ]
        return [
            ByteRange(left.stop, right.start)
            for left, right in pairwise(edges)
            if right.start > left.stop
        ]

    def bytes_per_block(self, group_index: int) -> int:
        """Payload bytes of one block of a group."""
        return sum(ref.page_bytes for ref in self.groups[group_index])


def merge(ranges: Sequence[ByteRange]) -> list[ByteRange]:
    """Sort ranges and join those that touch or overlap (groups may alias one tensor)."""
    merged: list[ByteRange] = []
    for item in sorted(ranges, key=lambda r: (r.start, r.stop)):
        if merged and item.start <= merged[-1].stop:
            merged[-1] = ByteRange(merged[-1].start, max(merged[-1].stop, item.stop))
        else:
            merged.append(item)
    return merged


def place_blocks(
    layout: SlotLayout,
    block_ids: IntArray,
    group_sizes: Sequence[int],
    first_blocks: Sequence[int],
    chunk_ids: IntArray,
) -> list[Placement]:
    """Split a job into one :class:`Placement` per group that has blocks.

    `block_ids` and `chunk_ids` hold the groups one after the other; `group_sizes[g]` blocks belong
    to group g, the first of which is block `first_blocks[g]` of its request. Only a group's first
    chunk may start late and only its last may end early. Ids may repeat.

    What this cannot notice: a block left out in the middle of a group. Blocks carry no position of
    their own, so all that follows would land one sub-block early (vLLM drops re-allocated blocks of
    sliding-window groups that way when a chunk holds several blocks). Only a count that no longer
    fits the number of chunks shows here.

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
        skip = first % per_chunk
        positions = np.arange(skip, skip + size, dtype=np.int64)
        count = (skip + size + per_chunk - 1) // per_chunk
        chunks = chunk_ids[chunk_start : chunk_start + count]
        blocks = block_ids[block_start : block_start + size]
        if len(chunks) != count or len(blocks) != size:
            break
        placements.append(
            Placement(
                group_index=group_index,
                block_ids=blocks,
                chunk_ids=chunks[positions // per_chunk],
                sub_blocks=positions % per_chunk,
                chunks=chunks,
            )
        )
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
