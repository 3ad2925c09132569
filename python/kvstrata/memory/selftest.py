"""One synthetic block per group through the real copy path, at start (no request is running yet).

A pattern goes into a chunk's worth of blocks, is stored, compared in the slot byte by byte with
where the layout says it belongs (a copy that swaps bytes on both ways would pass a mere round
trip), the blocks are cleared, loaded and compared. What the blocks held before is put back, and the
slot is zeroed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.memory.layout import LayoutError, Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.memory.layout import PageRef
    from kvstrata.memory.transfer import BlockTransfers

_JOB_ID = -1


def check_copies(
    transfers: BlockTransfers,
    arena: torch.Tensor,
    blocks: Sequence[torch.Tensor],
    slot: int,
) -> None:
    """Raise :class:`LayoutError` naming a group whose bytes do not survive the way and back.

    `slot` is overwritten and left zeroed. Groups with more blocks per chunk than there are blocks
    are skipped.
    """
    layout = transfers.layout
    per_chunk = layout.blocks_per_chunk
    row = arena[slot * layout.slot_bytes : (slot + 1) * layout.slot_bytes]
    area = row[layout.area_offset : layout.area_offset + layout.area_bytes]
    for group_index, refs in enumerate(layout.groups):
        tensors = sorted({ref.tensor_index for ref in refs})
        if not tensors or min(blocks[t].shape[0] for t in tensors) < per_chunk:
            continue
        ids = torch.arange(per_chunk)
        kept = {t: blocks[t][ids.to(blocks[t].device)].clone() for t in tensors}
        try:
            _check_group(transfers, area, blocks, slot, group_index)
        finally:
            for t, before in kept.items():
                blocks[t][ids.to(blocks[t].device)] = before
            area.zero_()


def _check_group(
    transfers: BlockTransfers,
    area: torch.Tensor,
    blocks: Sequence[torch.Tensor],
    slot: int,
    group_index: int,
) -> None:
    layout = transfers.layout
    per_chunk = layout.blocks_per_chunk
    refs = layout.groups[group_index]
    generator = np.random.default_rng(group_index + 1)
    expected = np.zeros(layout.area_bytes, dtype=np.int8)
    patterns: dict[int, torch.Tensor] = {}
    for ref in refs:
        page = layout.tensor_page_bytes[ref.tensor_index]
        if ref.tensor_index not in patterns:
            data = generator.integers(1, 128, (per_chunk, page), dtype=np.int8)
            patterns[ref.tensor_index] = torch.from_numpy(data)
        base = layout.tensor_offset(ref.tensor_index) - layout.area_offset
        source = patterns[ref.tensor_index].numpy()
        for sub in range(per_chunk):
            start = base + sub * page + ref.page_offset
            expected[start : start + ref.page_bytes] = source[sub, _bytes_of(ref)]
    for index, pattern in patterns.items():
        blocks[index][:per_chunk] = pattern.to(blocks[index].device)
    area.fill_(-1)
    placement = Placement(
        group_index=group_index,
        block_ids=np.arange(per_chunk, dtype=np.int64),
        chunk_ids=np.full(per_chunk, slot, dtype=np.int64),
        sub_blocks=np.arange(per_chunk, dtype=np.int64),
        chunks=np.array([slot], dtype=np.int64),
    )
    transfers.store(_JOB_ID, [placement])
    transfers.wait({_JOB_ID})
    transfers.finished()
    if not np.array_equal(area.numpy(), expected):
        msg = f"self-test: a stored block of KV cache group {group_index} is not where it belongs"
        raise LayoutError(msg)
    for index in patterns:
        blocks[index][:per_chunk] = 0
    transfers.load(_JOB_ID, [placement])
    transfers.wait({_JOB_ID})
    transfers.finished()
    for ref in refs:
        wanted = patterns[ref.tensor_index][:, _bytes_of(ref)]
        loaded = blocks[ref.tensor_index][:per_chunk, _bytes_of(ref)].cpu()
        if not torch.equal(loaded, wanted):
            msg = (
                f"self-test: a loaded block of KV cache group {group_index} is not what was stored"
            )
            raise LayoutError(msg)


def _bytes_of(ref: PageRef) -> slice:
    return slice(ref.page_offset, ref.page_offset + ref.page_bytes)
