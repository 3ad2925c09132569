"""Slots, blocks and layouts for tests of the copy path, with bytes that name where they belong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.memory.layout import PageRef, SlotLayout
from kvstrata.memory.placement import place_blocks
from kvstrata.memory.transfer import BlockTransfers

if TYPE_CHECKING:
    from kvstrata.memory.device import CopyDevice

STALE = 0x5A


def layout(
    *,
    pages: tuple[int, ...] = (64, 64),
    groups: tuple[tuple[tuple[int, int], ...], ...] = (((0, 64), (1, 64)),),
    blocks_per_chunk: int = 1,
    area_offset: int = 0,
    slack: int = 0,
    slot_bytes: int | None = None,
) -> SlotLayout:
    area = sum(pages) * blocks_per_chunk + slack
    return SlotLayout(
        slot_bytes=area_offset + area if slot_bytes is None else slot_bytes,
        area_offset=area_offset,
        area_bytes=area,
        blocks_per_chunk=blocks_per_chunk,
        tensor_page_bytes=pages,
        groups=tuple(tuple(PageRef(*ref) for ref in refs) for refs in groups),
    )


@dataclass
class Bench:
    """Transfers over random bytes, and an arena full of an earlier request's."""

    transfers: BlockTransfers
    arena: torch.Tensor
    blocks: list[torch.Tensor]

    @property
    def layout(self) -> SlotLayout:
        layout = self.transfers.layout
        assert isinstance(layout, SlotLayout)
        return layout

    def slot(self, chunk: int) -> torch.Tensor:
        size = self.layout.slot_bytes
        return self.arena[chunk * size : (chunk + 1) * size]

    def page(self, chunk: int, tensor: int, sub: int) -> torch.Tensor:
        page = self.layout.tensor_page_bytes[tensor]
        start = self.layout.tensor_offset(tensor) + sub * page
        return self.slot(chunk)[start : start + page]

    def store(
        self, job: int, blocks: list[int], chunks: list[int], sizes: list[int], first: list[int]
    ) -> None:
        self.transfers.store(
            job, place_blocks(self.layout, _ids(blocks), sizes, first, _ids(chunks))
        )

    def load(
        self, job: int, chunks: list[int], blocks: list[int], sizes: list[int], first: list[int]
    ) -> None:
        self.transfers.load(
            job, place_blocks(self.layout, _ids(blocks), sizes, first, _ids(chunks))
        )

    def clear_blocks(self) -> list[torch.Tensor]:
        before = [tensor.clone() for tensor in self.blocks]
        for tensor in self.blocks:
            tensor.zero_()
        return before


def bench(
    slots: SlotLayout,
    *,
    chunks: int = 6,
    blocks: int = 16,
    device: CopyDevice | None = None,
    block_stride: int | None = None,
) -> Bench:
    generator = torch.Generator().manual_seed(7)
    tensors = []
    for page in slots.tensor_page_bytes:
        stride = page if block_stride is None else block_stride
        raw = torch.randint(1, 127, (blocks * stride,), dtype=torch.int8, generator=generator)
        tensors.append(raw.as_strided((blocks, page), (stride, 1)))
    arena = torch.full((chunks * slots.slot_bytes,), STALE, dtype=torch.int8)
    return Bench(BlockTransfers(slots, arena, tensors, device), arena, tensors)


def _ids(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)
