"""The byte layout of a slot: where the pages of a group's blocks lie in it.

Units: bytes, unless a name says blocks or chunks. Pure: no torch, no clock, no files.

A *slot* holds one chunk of one KV cache group for all ranks: ``W0|W1|...|padding``. The area of one
rank holds the group's pages tensor by tensor, and of each tensor ``blocks_per_chunk`` pages side by
side. There are two forms, and one way to copy them (:class:`GroupRow`):

* :class:`SlotLayout`: slots of one size for all groups. A page is the tensor's padded page, and the
  tensors of all groups have their place in every slot. That is the order vLLM's own offloading
  worker uses, so rows written under either worker mean the same.
* :class:`ExactLayout`: a slot takes what its group needs, its unpadded pages and nothing else.

A model with one group whose pages have no padding has equal rows in both.

What a store does not cover of its rank's area (tensors of other groups, page padding, blocks a
partial chunk leaves out) is a *gap*, and gaps are zeroed when a slot is stored.

With *shared pages* (vLLM's canonical layout) the ranks do not lie side by side: the area is the
slot, the same for all, and every rank copies its share of each page. Gaps are then nobody's bytes,
and every rank zeroes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class LayoutError(ValueError):
    """Sizes or counts that do not fit each other. The message names both."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """`size` bytes at `block_offset` of a block's page, at `slot_offset` of the slot's page."""

    block_offset: int
    slot_offset: int
    size: int


@dataclass(frozen=True, slots=True)
class PageShare:
    """One rank's bytes of a page that several ranks keep together.

    Of ranks that hold the same bytes each stores every `writers`-th page, the one whose number
    (chunk id times blocks per chunk plus sub-block) leaves the rest `writer`. All ranks load all
    pages.
    """

    runs: tuple[PageRun, ...]
    writers: int = 1
    writer: int = 0


@dataclass(frozen=True, slots=True)
class PageRef:
    """The page of one layer of a group: in which tensor, and which of its bytes matter.

    `page_bytes` is the unpadded size; the padded one belongs to the tensor. `page_offset` is not
    zero where a tensor's page holds several layers side by side (vLLM's packed layouts). Where
    `share` is given, both are about the whole page in the slot.
    """

    tensor_index: int
    page_bytes: int
    page_offset: int = 0
    share: PageShare | None = None

    @property
    def runs(self) -> tuple[PageRun, ...]:
        """The bytes that this rank copies."""
        if self.share is not None:
            return self.share.runs
        return (PageRun(self.page_offset, self.page_offset, self.page_bytes),)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``[start, stop)`` of a rank's area in a slot."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RowPage:
    """The pages of one reference in a slot: that of sub-block `s` begins at ``first + s * stride``.

    Both count from the slot's first byte, and a page begins with the reference's own bytes.
    """

    ref: PageRef
    first: int
    stride: int


@dataclass(frozen=True, slots=True)
class GroupRow:
    """The slot of one group as one rank sees it: all of it, the rank's area, the pages in it."""

    slot_bytes: int
    area: ByteRange
    pages: tuple[RowPage, ...]


@dataclass(frozen=True)
class Layout(ABC):
    """The geometry of the slots as one rank sees them. `groups[g]` are the pages of group g.

    Invariants (checked by :meth:`check`): a rank's area lies within the slot, the pages fit the
    area, every reference is to a tensor that exists and is not larger than that tensor's page, and
    every run lies in both pages.
    """

    blocks_per_chunk: int
    groups: tuple[tuple[PageRef, ...], ...]

    @property
    @abstractmethod
    def block_pages(self) -> tuple[int, ...]:
        """Bytes of a block's page in each tensor."""

    @abstractmethod
    def _row(self, refs: tuple[PageRef, ...]) -> GroupRow:
        """The slot of a group with these references."""

    @cached_property
    def rows(self) -> tuple[GroupRow, ...]:
        """The slot of each group."""
        return tuple(self._row(refs) for refs in self.groups)

    def check(self) -> None:
        """Raise :class:`LayoutError` where an invariant does not hold."""
        if self.blocks_per_chunk < 1:
            msg = f"blocks_per_chunk is {self.blocks_per_chunk}, not at least 1"
            raise LayoutError(msg)
        for group_index, refs in enumerate(self.groups):
            for ref in refs:
                if not 0 <= ref.tensor_index < len(self.block_pages):
                    msg = (
                        f"group {group_index} names tensor {ref.tensor_index} "
                        f"of {len(self.block_pages)}"
                    )
                    raise LayoutError(msg)
                self._check_ref(group_index, ref)
        for group_index, row in enumerate(self.rows):
            self._check_row(group_index, row)

    def _check_ref(self, group_index: int, ref: PageRef) -> None:
        block_page = self.block_pages[ref.tensor_index]
        room = block_page if ref.share is None else ref.page_bytes
        if ref.page_offset < 0 or not 0 < ref.page_bytes <= room - ref.page_offset:
            msg = (
                f"group {group_index} copies {ref.page_bytes} bytes at {ref.page_offset} per block "
                f"of tensor {ref.tensor_index}, whose pages have {room}"
            )
            raise LayoutError(msg)
        for run in ref.runs:
            in_block = 0 <= run.block_offset <= block_page - run.size
            slot_end = ref.page_offset + ref.page_bytes
            in_slot = ref.page_offset <= run.slot_offset <= slot_end - run.size
            if run.size < 1 or not in_block or not in_slot:
                msg = (
                    f"group {group_index} copies {run.size} bytes from {run.block_offset} of a "
                    f"block's page of {block_page} to {run.slot_offset} of a page of "
                    f"{ref.page_bytes} in the slot"
                )
                raise LayoutError(msg)

    def _check_row(self, group_index: int, row: GroupRow) -> None:
        if not 0 <= row.area.start <= row.area.stop <= row.slot_bytes:
            msg = (
                f"the rank's area [{row.area.start}, {row.area.stop}) does not fit a slot of "
                f"{row.slot_bytes} bytes"
            )
            raise LayoutError(msg)
        for page in row.pages:
            last = page.first + (self.blocks_per_chunk - 1) * page.stride + page.ref.page_bytes
            if page.first < row.area.start or last > row.area.stop:
                msg = (
                    f"the pages [{page.first}, {last}) of group {group_index} do not lie in the "
                    f"rank's area [{row.area.start}, {row.area.stop})"
                )
                raise LayoutError(msg)

    def written(self, group_index: int, sub_blocks: Sequence[int]) -> list[ByteRange]:
        """Ranges, relative to the rank's area, that storing these sub-blocks of a group writes."""
        row = self.rows[group_index]
        ranges = []
        for page in row.pages:
            base = page.first - row.area.start
            ranges += [
                ByteRange(base + sub * page.stride, base + sub * page.stride + page.ref.page_bytes)
                for sub in sub_blocks
            ]
        return merge(ranges)

    def gaps(self, group_index: int, sub_blocks: Sequence[int]) -> list[ByteRange]:
        """The rest of the rank's area: what has to be zeroed when these sub-blocks are stored."""
        area = self.rows[group_index].area
        size = area.stop - area.start
        edges = [
            ByteRange(0, 0),
            *self.written(group_index, sub_blocks),
            ByteRange(size, size),
        ]
        return [
            ByteRange(left.stop, right.start)
            for left, right in pairwise(edges)
            if right.start > left.stop
        ]

    def bytes_per_block(self, group_index: int) -> int:
        """Payload bytes of one block of a group in a slot."""
        return sum(ref.page_bytes for ref in self.groups[group_index])


@dataclass(frozen=True)
class SlotLayout(Layout):
    """Slots of one size, in which every tensor of every group has its place.

    `tensor_page_bytes` are the pages in the slot; those of the blocks are equally large unless
    `block_page_bytes` says otherwise (shared pages).
    """

    slot_bytes: int
    area_offset: int
    area_bytes: int
    tensor_page_bytes: tuple[int, ...]
    block_page_bytes: tuple[int, ...] | None = None

    @property
    def block_pages(self) -> tuple[int, ...]:
        """Bytes of a block's page in each tensor."""
        return self.tensor_page_bytes if self.block_page_bytes is None else self.block_page_bytes

    def _row(self, refs: tuple[PageRef, ...]) -> GroupRow:
        pages = tuple(
            RowPage(
                ref,
                self.tensor_offset(ref.tensor_index) + ref.page_offset,
                self.tensor_page_bytes[ref.tensor_index],
            )
            for ref in refs
        )
        area = ByteRange(self.area_offset, self.area_offset + self.area_bytes)
        return GroupRow(self.slot_bytes, area, pages)

    def check(self) -> None:
        """Raise :class:`LayoutError` where an invariant does not hold."""
        needed = sum(self.tensor_page_bytes) * self.blocks_per_chunk
        if needed > self.area_bytes:
            msg = (
                f"the KV tensors need {needed} bytes per chunk and rank, "
                f"the scheduler reserved {self.area_bytes}"
            )
            raise LayoutError(msg)
        super().check()

    def _check_ref(self, group_index: int, ref: PageRef) -> None:
        super()._check_ref(group_index, ref)
        padded = self.tensor_page_bytes[ref.tensor_index]
        if ref.page_bytes > padded - ref.page_offset:
            msg = (
                f"group {group_index} copies {ref.page_bytes} bytes at {ref.page_offset} per block "
                f"of tensor {ref.tensor_index}, whose pages have {padded} in the slot"
            )
            raise LayoutError(msg)

    def tensor_offset(self, tensor_index: int) -> int:
        """Offset of a tensor's first page from the start of the slot."""
        before = sum(self.tensor_page_bytes[:tensor_index])
        return self.area_offset + before * self.blocks_per_chunk


@dataclass(frozen=True)
class ExactLayout(Layout):
    """Slots that take what their group needs: its unpadded pages, of `ranks` ranks side by side.

    A rank's part begins at ``rank * rank_bytes(group)``. Where all ranks keep one copy together
    (replicated or shared pages), `ranks` is 1 and `rank` 0 for every one of them.
    """

    block_page_bytes: tuple[int, ...]
    rank: int = 0
    ranks: int = 1

    @property
    def block_pages(self) -> tuple[int, ...]:
        """Bytes of a block's page in each tensor."""
        return self.block_page_bytes

    def _row(self, refs: tuple[PageRef, ...]) -> GroupRow:
        part = sum(ref.page_bytes for ref in refs) * self.blocks_per_chunk
        pages = []
        at = self.rank * part
        for ref in refs:
            pages.append(RowPage(ref, at, ref.page_bytes))
            at += ref.page_bytes * self.blocks_per_chunk
        area = ByteRange(self.rank * part, (self.rank + 1) * part)
        return GroupRow(self.ranks * part, area, tuple(pages))

    def rank_bytes(self, group_index: int) -> int:
        """Bytes of one rank's part of a group's row."""
        area = self.rows[group_index].area
        return area.stop - area.start

    def row_bytes(self, group_index: int) -> int:
        """Bytes of a group's row, all ranks': the payload of its slot."""
        return self.rows[group_index].slot_bytes


def merge(ranges: Sequence[ByteRange]) -> list[ByteRange]:
    """Sort ranges and join those that touch or overlap (groups may alias one tensor)."""
    merged: list[ByteRange] = []
    for item in sorted(ranges, key=lambda r: (r.start, r.stop)):
        if merged and item.start <= merged[-1].stop:
            merged[-1] = ByteRange(merged[-1].start, max(merged[-1].stop, item.stop))
        else:
            merged.append(item)
    return merged
