"""All ranks of an engine with one arena, next to a model of them in plain bytes.

The model knows nothing of layouts, views or tensors: it moves bytes of `bytearray`s one piece at a
time, as a :class:`Shape` says. After every job, all bytes of the arena and of every rank's storage
are those of the model. Nothing is zero at first.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.memory.device import device_of
from kvstrata.memory.layout import ExactLayout, Layout, SlotLayout
from kvstrata.memory.placement import Placement, place_group
from kvstrata.memory.transfer import BlockTransfers
from memory_support.shapes import BLOCKS, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

POISON = 0x5A
MARGIN = 64


@dataclass
class Part:
    """One group's part of a job: its slots, and its blocks from sub-block `skip` of the first."""

    group: int
    skip: int
    blocks: list[int]
    slots: list[int]

    def placed(self, per_chunk: int) -> Iterator[tuple[int, int, int]]:
        """Slot, sub-block and block."""
        for number, block in enumerate(self.blocks, self.skip):
            yield self.slots[number // per_chunk], number % per_chunk, block


@dataclass
class Engine:
    """`exact` slots, or slots of one size."""

    shape: Shape
    per_chunk: int
    arena_bytes: int
    device: torch.device
    exact: bool = True
    seed: int = 0
    never_across: int | None = None
    workers: list[BlockTransfers] = field(init=False)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        size = MARGIN + max(t.start + t.stride * BLOCKS for t in self.shape.tensors)
        self.arena = torch.full((self.arena_bytes,), POISON, dtype=torch.int8)
        self.model_arena = bytearray([POISON]) * self.arena_bytes
        self.models = [bytearray(draw.randbytes(size)) for _ in range(self.shape.ranks)]
        self.storages = [
            torch.frombuffer(bytearray(model), dtype=torch.int8).to(self.device)
            for model in self.models
        ]
        self.workers = [self._worker(rank) for rank in range(self.shape.ranks)]
        self.jobs = 0

    def _worker(self, rank: int) -> BlockTransfers:
        views = [
            self.storages[rank].as_strided((BLOCKS, t.page), (t.stride, 1), t.start)
            for t in self.shape.tensors
        ]
        return BlockTransfers(
            self.layout(rank),
            self.arena,
            views,
            device_of(views),
            never_across=self.never_across,
        )

    def layout(self, rank: int) -> Layout:
        pages = tuple(tensor.page for tensor in self.shape.tensors)
        if self.exact:
            return ExactLayout(
                blocks_per_chunk=self.per_chunk,
                groups=self.shape.refs(rank),
                block_page_bytes=pages,
                rank=self.shape.part(rank),
                ranks=self.shape.parts,
            )
        in_slot = tuple(self.slot_page(index) for index in range(len(pages)))
        area = sum(in_slot) * self.per_chunk
        return SlotLayout(
            blocks_per_chunk=self.per_chunk,
            groups=self.shape.refs(rank),
            slot_bytes=self.slot_bytes(0),
            area_offset=self.shape.part(rank) * area,
            area_bytes=area,
            tensor_page_bytes=in_slot,
            block_page_bytes=pages,
        )

    def slot_page(self, tensor: int) -> int:
        """Bytes of a tensor's page in slots of one size."""
        layers = [each for group in self.shape.groups for each in group if each.tensor == tensor]
        if self.shape.is_shared:
            return max(layer.row_size for layer in layers)
        return self.shape.tensors[tensor].page

    def slot_bytes(self, group: int) -> int:
        """What a row of a group takes of the arena."""
        if self.exact:
            return self.shape.row_bytes(group, self.per_chunk)
        pages = sum(self.slot_page(index) for index in range(len(self.shape.tensors)))
        return self.shape.parts * pages * self.per_chunk

    def page_at(self, group: int, position: int, rank: int, sub: int) -> int:
        """Where, in a slot, the page of a layer begins."""
        layers = self.shape.groups[group]
        if self.exact:
            part = self.shape.row_bytes(group, self.per_chunk) // self.shape.parts
            before = sum(layer.row_size for layer in layers[:position]) * self.per_chunk
            inside = sub * layers[position].row_size
        else:
            part = self.slot_bytes(group) // self.shape.parts
            tensor = layers[position].tensor
            before = sum(self.slot_page(index) for index in range(tensor)) * self.per_chunk
            inside = sub * self.slot_page(tensor) + layers[position].offset
        return self.shape.part(rank) * part + before + inside

    def place(self, part: Part) -> Placement:
        return place_group(
            self.per_chunk,
            part.group,
            np.array(part.blocks, dtype=np.int64),
            part.skip,
            np.array(part.slots, dtype=np.int64),
        )

    def store(self, parts: list[Part]) -> None:
        self.jobs += 1
        placements = [self.place(part) for part in parts]
        for rank, worker in enumerate(self.workers):
            if not self.shape.is_replicated or rank == 0:
                worker.store(self.jobs, placements)
        self._settle()
        for part in parts:
            size = self.slot_bytes(part.group)
            for slot in part.slots:
                self.model_arena[slot : slot + size] = bytes(size)
            for slot, sub, block in part.placed(self.per_chunk):
                self._model_store(part.group, slot, sub, block)

    def _model_store(self, group: int, slot: int, sub: int, block: int) -> None:
        for position, layer in enumerate(self.shape.groups[group]):
            number = slot // self.slot_bytes(group) * self.per_chunk + sub
            for rank in range(self.shape.ranks):
                if self.shape.writes(layer, rank, number):
                    for here, there, size in self._pieces(
                        group, position, rank, sub=sub, block=block
                    ):
                        self.model_arena[slot + there : slot + there + size] = self.models[rank][
                            here : here + size
                        ]

    def load(self, parts: list[Part]) -> None:
        self.jobs += 1
        placements = [self.place(part) for part in parts]
        for worker in self.workers:
            worker.load(self.jobs, placements)
        self._settle()
        for part in parts:
            for slot, sub, block in part.placed(self.per_chunk):
                for position in range(len(self.shape.groups[part.group])):
                    for rank, model in enumerate(self.models):
                        for here, there, size in self._pieces(
                            part.group, position, rank, sub=sub, block=block
                        ):
                            model[here : here + size] = self.model_arena[
                                slot + there : slot + there + size
                            ]

    def _pieces(
        self, group: int, position: int, rank: int, *, sub: int, block: int
    ) -> Iterator[tuple[int, int, int]]:
        """Of one layer of one block: place in the rank's storage, place in the slot, size."""
        layer = self.shape.groups[group][position]
        tensor = self.shape.tensors[layer.tensor]
        page = self.page_at(group, position, rank, sub)
        for in_block, in_row, size in self.shape.pieces(layer, rank):
            yield tensor.start + block * tensor.stride + in_block, page + in_row, size

    def _settle(self) -> None:
        for worker in self.workers:
            worker.wait({self.jobs})
            assert all(job.job_id == self.jobs for job in worker.finished())

    def scramble(self, seed: int) -> None:
        """New bytes in every block, as a model would leave them."""
        draw = random.Random(seed)
        for rank, model in enumerate(self.models):
            model[:] = draw.randbytes(len(model))
            self.storages[rank].copy_(torch.frombuffer(bytearray(model), dtype=torch.int8))

    def check(self) -> None:
        assert self.arena.numpy().tobytes() == bytes(self.model_arena), "the arena"
        for rank, (storage, model) in enumerate(zip(self.storages, self.models, strict=True)):
            assert storage.cpu().numpy().tobytes() == bytes(model), f"the blocks of rank {rank}"
