"""Whether the blocks of a job are those of its rows: nothing is copied on a guess.

vLLM says of the blocks of a group how many there are and where the first one stands. It sends no
block that was freed and re-allocated (a sliding window's, say), nor one that nothing will reach:
what follows would move up into its place. The rows say how many chunks there should be.

* Of a **store** every chunk ends with its last block, as vLLM stores no chunk whose last block is
  gone. So the blocks reach from the first one's place to the end of the last chunk exactly where
  none is missing; with one or more missing, wherever, they are too few.
* Blocks may be missing at the **head** of a store's first chunk. Where a load can ask for them the
  row is left out: it would give zeroes for what was computed.
* A **load** names every block from its first one on, and may end within a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvstrata.memory.layout import LayoutError
from kvstrata.memory.placement import place_group
from kvstrata.memory.spans import Spans
from kvstrata.vllm.rowspec import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    from kvstrata.memory.placement import IntArray, Placement
    from kvstrata.memory.transfer import BlockTransfers
    from kvstrata.vllm.rowspec import RowSpec


@dataclass(frozen=True)
class StoreFit:
    """What of a store fits, and the keys that do not, with a reason for each group that does not.

    A row without its head is no fault, and none of the reasons.
    """

    placements: tuple[Placement, ...]
    refused: tuple[bytes, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class _Group:
    """One group's part of a job."""

    index: int
    blocks: IntArray
    first: int
    rows: IntArray
    chunks: IntArray
    keys: tuple[bytes, ...]


def store(
    transfers: BlockTransfers,
    blocks: GPULoadStoreSpec,
    rows: RowSpec,
    spare_heads: Sequence[int] | None = None,
) -> StoreFit:
    """Take the groups one by one: those that fit are placed, the rows of the others refused.

    `spare_heads` says of each group how many blocks at the head of a chunk no load asks for; `None`
    where any number of them may be missing.
    """
    placements: list[Placement] = []
    refused: list[bytes] = []
    reasons: list[str] = []
    try:
        groups = list(_groups(transfers, blocks, rows))
    except LayoutError as error:
        return StoreFit((), rows.keys, (str(error),))
    for group in groups:
        try:
            _check_store(transfers, group)
            whole = group if spare_heads is None else _with_heads(transfers, group, spare_heads)
            if len(whole.rows):
                placements.append(_place(transfers, whole))
        except LayoutError as error:
            refused += group.keys
            reasons.append(str(error))
        else:
            refused += group.keys[: len(group.keys) - len(whole.keys)]
    sizes = [(each.rows, transfers.layout.rows[each.group_index].slot_bytes) for each in placements]
    if not Spans.of(sizes).disjoint():
        return StoreFit((), rows.keys, ("two rows of the job would share bytes of the arena",))
    return StoreFit(tuple(placements), tuple(refused), tuple(reasons))


def load(transfers: BlockTransfers, blocks: GPULoadStoreSpec, rows: RowSpec) -> list[Placement]:
    """Place all groups of a load.

    # Errors
    :class:`LayoutError` where one does not fit: the request would run on wrong blocks.
    """
    placements = []
    for group in _groups(transfers, blocks, rows):
        if not len(group.blocks) and not len(group.rows):
            continue
        per_chunk = transfers.layout.blocks_per_chunk
        wanted = group.first // per_chunk + np.arange(len(group.rows), dtype=np.int64)
        _check_chunks(group, wanted)
        placements.append(_place(transfers, group))
    return placements


def _groups(transfers: BlockTransfers, blocks: GPULoadStoreSpec, rows: RowSpec) -> Iterator[_Group]:
    count = len(transfers.layout.groups)
    sizes = [int(size) for size in blocks.group_sizes]
    firsts = [int(first) for first in blocks.block_indices]
    ids = np.array(blocks.block_ids, dtype=np.int64)
    if len(sizes) != count or len(firsts) != count or sum(sizes) != len(ids):
        msg = (
            f"{len(ids)} blocks in groups of {sizes} with {len(firsts)} positions, where {count} "
            "groups are known"
        )
        raise LayoutError(msg)
    if min(sizes, default=0) < 0 or min(firsts, default=0) < 0:
        msg = f"groups of {sizes} blocks, the first ones at {firsts}"
        raise LayoutError(msg)
    if len(rows) and not 0 <= int(rows.groups.min()) <= int(rows.groups.max()) < count:
        msg = f"rows of groups {sorted(set(rows.groups.tolist()))}, where {count} are known"
        raise LayoutError(msg)
    start = 0
    for index, (size, first) in enumerate(zip(sizes, firsts, strict=True)):
        mine = np.flatnonzero(rows.groups == index)
        keys = tuple(rows.keys[number] for number in mine.tolist())
        yield _Group(
            index, ids[start : start + size], first, rows.offsets[mine], rows.chunks[mine], keys
        )
        start += size


def _check_store(transfers: BlockTransfers, group: _Group) -> None:
    if not len(group.blocks) and not len(group.rows):
        return
    per_chunk = transfers.layout.blocks_per_chunk
    end = group.first % per_chunk + len(group.blocks)
    if end != len(group.rows) * per_chunk:
        msg = (
            f"{len(group.blocks)} blocks of group {group.index}, the first one at {group.first}, "
            f"do not fill {len(group.rows)} chunks of {per_chunk}: a block between them is missing"
        )
        raise LayoutError(msg)
    known = group.chunks[group.chunks != UNKNOWN]
    if (np.diff(known) <= 0).any():
        msg = f"chunks {group.chunks.tolist()} of group {group.index} are not in order"
        raise LayoutError(msg)
    _check_chunks(group, np.array([group.first // per_chunk], dtype=np.int64))


def _with_heads(transfers: BlockTransfers, group: _Group, spare_heads: Sequence[int]) -> _Group:
    """The group without its first row, where that lacks blocks that a load can ask for."""
    per_chunk = transfers.layout.blocks_per_chunk
    missing = group.first % per_chunk
    if not len(group.rows) or missing <= spare_heads[group.index]:
        return group
    return replace(
        group,
        blocks=group.blocks[per_chunk - missing :],
        first=0,
        rows=group.rows[1:],
        chunks=group.chunks[1:],
        keys=group.keys[1:],
    )


def _check_chunks(group: _Group, wanted: IntArray) -> None:
    found = group.chunks[: len(wanted)]
    wanted = wanted[: len(found)]
    if ((found != UNKNOWN) & (found != wanted)).any():
        msg = (
            f"rows of chunks {group.chunks.tolist()} for blocks of group {group.index}, the first "
            f"of which is block {group.first} of its request"
        )
        raise LayoutError(msg)


def _place(transfers: BlockTransfers, group: _Group) -> Placement:
    per_chunk = transfers.layout.blocks_per_chunk
    placement = place_group(per_chunk, group.index, group.blocks, group.first, group.rows)
    transfers.check_rows(group.index, group.rows)
    transfers.check_blocks(group.index, group.blocks)
    return placement
