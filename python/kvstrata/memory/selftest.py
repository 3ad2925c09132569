"""One synthetic block per group through the real copy path, at start (no request is running yet).

A pattern goes into a chunk's worth of blocks, is stored, compared in the slot byte by byte with
where the layout says it belongs (a copy that swaps bytes on both ways would pass a mere round
trip), the blocks are cleared, loaded and compared; then again with a chunk that starts with its
last block. What the blocks held before is put back, and the slot is zeroed. Ranks that test at the
same time use slots of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.memory.layout import LayoutError
from kvstrata.memory.placement import place_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.memory.layout import Layout, PageRef, PageRun
    from kvstrata.memory.placement import Placement
    from kvstrata.memory.transfer import BlockTransfers

Bytes: TypeAlias = npt.NDArray[np.int8]

_JOB_ID = -1
_UNTOUCHED = -1


def check_copies(
    transfers: BlockTransfers,
    arena: torch.Tensor,
    blocks: Sequence[torch.Tensor],
    start: int,
) -> None:
    """Raise :class:`LayoutError` naming a group whose bytes do not survive the way and back.

    `start` is the first byte of a slot that is large enough for every group; this rank's area of it
    is overwritten and left zeroed. Groups with more blocks per chunk than there are blocks are
    skipped.
    """
    layout = transfers.layout
    per_chunk = layout.blocks_per_chunk
    for group_index, refs in enumerate(layout.groups):
        tensors = sorted({ref.tensor_index for ref in refs})
        if not tensors or min(blocks[t].shape[0] for t in tensors) < per_chunk:
            continue
        row = layout.rows[group_index]
        transfers.check_rows(group_index, np.array([start], dtype=np.int64))
        area = arena[start + row.area.start : start + row.area.stop]
        ids = torch.arange(per_chunk)
        kept = {t: blocks[t][ids.to(blocks[t].device)].clone() for t in tensors}
        try:
            for first in sorted({0, per_chunk - 1}):
                placement = place_group(
                    per_chunk,
                    group_index,
                    np.arange(first, per_chunk, dtype=np.int64),
                    first,
                    np.array([start], dtype=np.int64),
                )
                _check_group(transfers, area, blocks, placement)
        finally:
            for t, before in kept.items():
                blocks[t][ids.to(blocks[t].device)] = before
            area.zero_()


@dataclass(frozen=True)
class _Drawn:
    """A pattern for a chunk: in the blocks of each tensor, and in the rank's area of the slot.

    `stored` is what the slot holds after this rank's store, `whole` after the stores of all ranks,
    as far as this rank loads it. `runs` are the copied bytes with their tensors.
    """

    blocks: dict[int, torch.Tensor]
    stored: Bytes
    whole: Bytes
    runs: tuple[tuple[int, PageRun], ...]


def _draw(layout: Layout, placement: Placement) -> _Drawn:
    """Block and sub-block have the same number here: `place_group` was asked for it."""
    row = layout.rows[placement.group_index]
    generator = np.random.default_rng(placement.group_index + 1)
    stored = np.zeros(row.area.stop - row.area.start, dtype=np.int8)
    whole = stored.copy()
    number = int(placement.rows[0]) // row.slot_bytes * layout.blocks_per_chunk
    blocks: dict[int, torch.Tensor] = {}
    for page in row.pages:
        ref = page.ref
        if ref.tensor_index not in blocks:
            size = (layout.blocks_per_chunk, layout.block_pages[ref.tensor_index])
            blocks[ref.tensor_index] = torch.from_numpy(generator.integers(1, 128, size, np.int8))
        source = blocks[ref.tensor_index].numpy()
        for sub in placement.sub_blocks.tolist():
            start = page.first + sub * page.stride - row.area.start
            if ref.share is not None:  # the rest of the page is other ranks'
                stored[start : start + ref.page_bytes] = _UNTOUCHED
            for run in ref.runs:
                begin = start + run.slot_offset - ref.page_offset
                at = slice(begin, begin + run.size)
                whole[at] = source[sub, _in_block(run)]
                if _stores(ref, number + sub):
                    stored[at] = whole[at]
    runs = tuple(
        (ref.tensor_index, run) for ref in layout.groups[placement.group_index] for run in ref.runs
    )
    return _Drawn(blocks, stored, whole, runs)


def _check_group(
    transfers: BlockTransfers,
    area: torch.Tensor,
    blocks: Sequence[torch.Tensor],
    placement: Placement,
) -> None:
    layout, group_index = transfers.layout, placement.group_index
    per_chunk = layout.blocks_per_chunk
    drawn = _draw(layout, placement)
    patterns = drawn.blocks
    for index, pattern in patterns.items():
        blocks[index][:per_chunk] = pattern.to(blocks[index].device)
    area.fill_(_UNTOUCHED)
    transfers.store(_JOB_ID, [placement])
    transfers.wait({_JOB_ID})
    transfers.finished()
    if not np.array_equal(area.numpy(), drawn.stored):
        msg = f"self-test: a stored block of KV cache group {group_index} is not where it belongs"
        raise LayoutError(msg)
    area.copy_(torch.from_numpy(drawn.whole))
    for index in patterns:
        blocks[index][:per_chunk] = 0
    transfers.load(_JOB_ID, [placement])
    transfers.wait({_JOB_ID})
    transfers.finished()
    first = int(placement.sub_blocks[0])
    for index, run in drawn.runs:
        wanted = patterns[index][first:, _in_block(run)]
        loaded = blocks[index][first:per_chunk, _in_block(run)].cpu()
        if not torch.equal(loaded, wanted) or blocks[index][:first].any():
            msg = (
                f"self-test: a loaded block of KV cache group {group_index} is not what was stored"
            )
            raise LayoutError(msg)


def _in_block(run: PageRun) -> slice:
    return slice(run.block_offset, run.block_offset + run.size)


def _stores(ref: PageRef, number: int) -> bool:
    return ref.share is None or number % ref.share.writers == ref.share.writer
