"""Moves KV blocks between the device's tensors and the slots, as jobs.

Ordering, on a device with streams:

* every job records the compute stream when it is submitted, and its copies wait for that point. A
  store then reads what the model wrote, and a load comes after the zeroing or the use of the blocks
  it overwrites;
* stores run in the order of submission on one stream, loads on a second, expedited loads on a
  third;
* the gaps of a stored slot are zeroed by the host before its copies are queued. A slot that a job
  still in flight touches (possible only after a reset took it away) is waited for first, so that
  neither job's bytes end up in the other's slot.

Not thread-safe: one caller, the thread that runs the model.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.memory.device import CopyStream, DeviceEvent, PageCopy, device_of
from kvstrata.memory.layout import LayoutError
from kvstrata.memory.spans import Spans

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvstrata.memory.device import CopyDevice
    from kvstrata.memory.layout import ByteRange, Layout
    from kvstrata.memory.placement import IntArray, Placement


class Direction(StrEnum):
    """Which way a job copies."""

    STORE = "store"
    LOAD = "load"


@dataclass(frozen=True)
class Finished:
    """A job whose copies are done. `seconds` is device time, `size_bytes` what was copied."""

    job_id: int
    direction: Direction
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class _Job:
    job_id: int
    direction: Direction
    spans: Spans
    size_bytes: int
    start: DeviceEvent
    end: DeviceEvent


class _Lane:
    """One stream and its jobs in order."""

    def __init__(self, stream: CopyStream) -> None:
        self.stream = stream
        self.jobs: deque[_Job] = deque()


class BlockTransfers:
    """Copies between `blocks`, one int8 ``(blocks, page)`` per KV tensor, and slots of `arena`.

    `arena` is the flat int8 tensor of all slots, on the host. Both are only read and written
    through views made here. Where the arena is registered with the device piece by piece,
    `never_across` is a distance such that no multiple of it is crossed by one copy.
    """

    def __init__(
        self,
        layout: Layout,
        arena: torch.Tensor,
        blocks: Sequence[torch.Tensor],
        device: CopyDevice | None = None,
        *,
        never_across: int | None = None,
    ) -> None:
        """Make the views.

        # Errors
        :class:`LayoutError` where a tensor is not what the layout says it is.
        """
        layout.check()
        self.layout = layout
        self._arena: torch.Tensor = arena
        self._blocks: list[torch.Tensor] = list(blocks)
        self._check_tensors()
        self._device: CopyDevice = device_of(self._blocks) if device is None else device
        self._bytes: npt.NDArray[np.int8] = arena.numpy()
        self._never_across = never_across
        self._stores = _Lane(self._device.open_stream())
        self._loads = _Lane(self._device.open_stream())
        self._expedited = _Lane(self._device.open_stream())
        self._ended: list[Finished] = []

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where block 0 of each KV tensor lies in memory."""
        return tuple(int(tensor.data_ptr()) for tensor in self._blocks)

    @property
    def arena_bytes(self) -> int:
        """Bytes of all slots together."""
        return int(self._arena.numel())

    @property
    def block_counts(self) -> tuple[int, ...]:
        """Blocks of each KV tensor."""
        return tuple(int(tensor.shape[0]) for tensor in self._blocks)

    def _check_tensors(self) -> None:
        if len(self._blocks) != len(self.layout.block_pages):
            msg = f"{len(self._blocks)} tensors, {len(self.layout.block_pages)} in the layout"
            raise LayoutError(msg)
        if (
            self._arena.dtype != torch.int8
            or self._arena.dim() != 1
            or self._arena.device.type != "cpu"
        ):
            msg = "the arena has to be a flat int8 tensor on the host"
            raise LayoutError(msg)
        for index, (tensor, page) in enumerate(
            zip(self._blocks, self.layout.block_pages, strict=True)
        ):
            fits = tensor.dtype == torch.int8 and tensor.dim() == 2 and tensor.shape[1] == page  # noqa: PLR2004
            if not fits or tensor.stride(1) != 1:
                msg = (
                    f"KV tensor {index} is {tensor.dtype} {tuple(tensor.shape)} with strides "
                    f"{tensor.stride()}, not int8 (blocks, {page}) with bytes side by side"
                )
                raise LayoutError(msg)

    @property
    def _lanes(self) -> tuple[_Lane, _Lane, _Lane]:
        return (self._stores, self._loads, self._expedited)

    def store(self, job_id: int, placements: Sequence[Placement]) -> None:
        """Queue copies from blocks to slots; returns before they are done.

        # Errors
        :class:`LayoutError` where an id is out of range: nothing was copied then.
        """
        self._check(placements)
        spans = self._spans(placements)
        self._wait_for(spans)
        compute = self._device.mark_compute()
        for placement in placements:
            self._zero_gaps(placement)
        lane = self._stores
        lane.stream.after(compute)
        start = lane.stream.mark()
        copies = [copy for p in placements for copy in self._copies(p, Direction.STORE)]
        lane.stream.to_slots(copies)
        size = sum(copy.total for copy in copies)
        job = _Job(job_id, Direction.STORE, spans, size, start, lane.stream.mark())
        lane.jobs.append(job)

    def load(
        self, job_id: int, placements: Sequence[Placement], *, expedited: bool = False
    ) -> None:
        """Queue copies from slots to blocks; returns before they are done.

        # Errors
        :class:`LayoutError` where an id is out of range: nothing was copied then.
        """
        self._check(placements)
        lane = self._expedited if expedited else self._loads
        lane.stream.after(self._device.mark_compute())
        start = lane.stream.mark()
        copies = [copy for p in placements for copy in self._copies(p, Direction.LOAD)]
        lane.stream.to_blocks(copies)
        size, end = sum(copy.total for copy in copies), lane.stream.mark()
        lane.jobs.append(_Job(job_id, Direction.LOAD, self._spans(placements), size, start, end))

    def finished(self) -> list[Finished]:
        """Jobs that ended since the last call, each of them once."""
        ended, self._ended = self._ended, []
        for lane in self._lanes:
            while lane.jobs and lane.jobs[0].end.done():
                job = lane.jobs.popleft()
                seconds = job.end.seconds_since(job.start)
                ended.append(Finished(job.job_id, job.direction, job.size_bytes, seconds))
        return ended

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until these jobs' copies are done. Ids that are not in flight are ignored."""
        for lane in self._lanes:
            for job in lane.jobs:
                if job.job_id in job_ids:
                    job.end.wait()

    def drain(self) -> None:
        """Block until no copy is in flight. Results stay to be collected."""
        for lane in self._lanes:
            for job in lane.jobs:
                job.end.wait()

    def succeed(self, other: BlockTransfers) -> None:
        """Finish what another one has in flight, report it from here, and close the other."""
        other.drain()
        self._ended += other.finished()
        other.close()

    def close(self) -> None:
        """Drain and drop every view, so that the arena can be unmapped and the KV tensors freed."""
        self.drain()
        for lane in self._lanes:
            lane.jobs.clear()
        self._blocks.clear()
        self._arena = torch.empty(0, dtype=torch.int8)
        self._bytes = np.empty(0, dtype=np.int8)

    def _copies(self, placement: Placement, direction: Direction) -> list[PageCopy]:
        copies = []
        row = self.layout.rows[placement.group_index]
        for page in row.pages:
            ref, share = page.ref, page.ref.share
            slots, subs, blocks = placement.slots, placement.sub_blocks, placement.block_ids
            if direction is Direction.STORE and share is not None and share.writers > 1:
                numbers = slots // row.slot_bytes * self.layout.blocks_per_chunk + subs
                mine = numbers % share.writers == share.writer
                slots, subs, blocks = slots[mine], subs[mine], blocks[mine]
            if not len(blocks):
                continue
            pages = slots + page.first + subs * page.stride
            copies += [
                PageCopy(
                    arena=self._arena,
                    blocks=self._blocks[ref.tensor_index],
                    positions=pages + (run.slot_offset - ref.page_offset),
                    block_ids=blocks,
                    size=run.size,
                    block_offset=run.block_offset,
                )
                for run in ref.runs
            ]
        every = self._never_across
        return copies if every is None else [part for copy in copies for part in copy.cut(every)]

    def _zero_gaps(self, placement: Placement) -> None:
        """Zero what this store leaves out of its slots.

        A slot's chunk is written by one job only, so what the job does not cover is nobody's. Of a
        page that ranks share, other ranks' bytes are covered by the same job.
        """
        group, area = placement.group_index, self.layout.rows[placement.group_index].area
        covered: dict[int, set[int]] = {int(row): set() for row in placement.rows}
        for slot, sub in zip(placement.slots.tolist(), placement.sub_blocks.tolist(), strict=True):
            covered[slot].add(sub)
        gaps_of: dict[tuple[int, ...], list[ByteRange]] = {}
        for slot, subs in covered.items():
            key = tuple(sorted(subs))
            if key not in gaps_of:
                gaps_of[key] = self.layout.gaps(group, key)
            start = slot + area.start
            for gap in gaps_of[key]:
                self._bytes[start + gap.start : start + gap.stop] = 0

    def _wait_for(self, spans: Spans) -> None:
        for lane in self._lanes:
            for job in lane.jobs:
                if job.spans.overlap(spans):
                    job.end.wait()

    def _spans(self, placements: Sequence[Placement]) -> Spans:
        return Spans.of(
            [
                (placement.rows, self.layout.rows[placement.group_index].slot_bytes)
                for placement in placements
            ]
        )

    def _check(self, placements: Sequence[Placement]) -> None:
        for placement in placements:
            self.check_rows(placement.group_index, placement.rows)
            self.check_blocks(placement.group_index, placement.block_ids)

    def check_rows(self, group_index: int, rows: IntArray) -> None:
        """Raise :class:`LayoutError` where a slot of a group does not lie in the arena."""
        limit = self.arena_bytes - self.layout.rows[group_index].slot_bytes
        _check_range("slots at", rows, limit + 1)

    def check_blocks(self, group_index: int, block_ids: IntArray) -> None:
        """Raise :class:`LayoutError` where a tensor of a group has no such block."""
        for ref in self.layout.groups[group_index]:
            _check_range("block ids", block_ids, int(self._blocks[ref.tensor_index].shape[0]))


def _check_range(what: str, ids: IntArray, count: int) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= count):
        msg = f"{what} {int(ids.min())}..{int(ids.max())}, where they have to be below {count}"
        raise LayoutError(msg)
