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

import torch

from kvstrata.memory.device import CopyStream, DeviceEvent, PageCopy, device_of
from kvstrata.memory.layout import LayoutError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvstrata.memory.device import CopyDevice
    from kvstrata.memory.layout import Placement, SlotLayout


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
    chunks: frozenset[int]
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
    through views made here.
    """

    def __init__(
        self,
        layout: SlotLayout,
        arena: torch.Tensor,
        blocks: Sequence[torch.Tensor],
        device: CopyDevice | None = None,
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
        self.slot_count = arena.numel() // layout.slot_bytes
        self._slots: list[torch.Tensor] = [
            arena.as_strided(
                (self.slot_count, layout.blocks_per_chunk, page),
                (layout.slot_bytes, page, 1),
                arena.storage_offset() + layout.tensor_offset(index),
            )
            for index, page in enumerate(layout.tensor_page_bytes)
        ]
        self._area: torch.Tensor = arena.as_strided(
            (self.slot_count, layout.area_bytes),
            (layout.slot_bytes, 1),
            arena.storage_offset() + layout.area_offset,
        )
        self._stores = _Lane(self._device.open_stream())
        self._loads = _Lane(self._device.open_stream())
        self._expedited = _Lane(self._device.open_stream())

    def _check_tensors(self) -> None:
        if len(self._blocks) != len(self.layout.tensor_page_bytes):
            msg = f"{len(self._blocks)} tensors, {len(self.layout.tensor_page_bytes)} in the layout"
            raise LayoutError(msg)
        if (
            self._arena.dtype != torch.int8
            or self._arena.dim() != 1
            or self._arena.device.type != "cpu"
        ):
            msg = "the arena has to be a flat int8 tensor on the host"
            raise LayoutError(msg)
        for index, (tensor, page) in enumerate(
            zip(self._blocks, self.layout.tensor_page_bytes, strict=True)
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
        self._check_ids(placements)
        chunks = _chunks(placements)
        self._wait_for_chunks(chunks)
        compute = self._device.mark_compute()
        for placement in placements:
            self._zero_gaps(placement)
        lane = self._stores
        lane.stream.after(compute)
        start = lane.stream.mark()
        for placement in placements:
            for copy in self._copies(placement):
                lane.stream.to_slots(copy)
        self._queue(lane, job_id, Direction.STORE, placements, start)

    def load(
        self, job_id: int, placements: Sequence[Placement], *, expedited: bool = False
    ) -> None:
        """Queue copies from slots to blocks; returns before they are done.

        # Errors
        :class:`LayoutError` where an id is out of range: nothing was copied then.
        """
        self._check_ids(placements)
        lane = self._expedited if expedited else self._loads
        lane.stream.after(self._device.mark_compute())
        start = lane.stream.mark()
        for placement in placements:
            for copy in self._copies(placement):
                lane.stream.to_blocks(copy)
        self._queue(lane, job_id, Direction.LOAD, placements, start)

    def finished(self) -> list[Finished]:
        """Jobs that ended since the last call, each of them once."""
        ended = []
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

    def close(self) -> None:
        """Drain and drop every view, so that the arena can be unmapped and the KV tensors freed."""
        self.drain()
        for lane in self._lanes:
            lane.jobs.clear()
        self._slots.clear()
        self._blocks.clear()
        self._arena = self._area = torch.empty(0, dtype=torch.int8)

    def _copies(self, placement: Placement) -> list[PageCopy]:
        return [
            PageCopy(
                slots=self._slots[ref.tensor_index],
                blocks=self._blocks[ref.tensor_index],
                chunk_ids=placement.chunk_ids,
                sub_blocks=placement.sub_blocks,
                block_ids=placement.block_ids,
                page_bytes=ref.page_bytes,
                page_offset=ref.page_offset,
            )
            for ref in self.layout.groups[placement.group_index]
        ]

    def _zero_gaps(self, placement: Placement) -> None:
        """Zero what this store leaves out of its slots.

        A slot's chunk is written by one job only, so what the job does not cover is nobody's.
        """
        subs_of: dict[int, list[int]] = {int(chunk): [] for chunk in placement.chunks}
        pairs = zip(placement.chunk_ids.tolist(), placement.sub_blocks.tolist(), strict=True)
        for chunk, sub in pairs:
            subs_of[chunk].append(sub)
        chunks_with: dict[tuple[int, ...], list[int]] = {}
        for chunk, subs in subs_of.items():
            chunks_with.setdefault(tuple(sorted(set(subs))), []).append(chunk)
        for covered, chunks in chunks_with.items():
            rows = torch.tensor(chunks, dtype=torch.int64)
            for gap in self.layout.gaps(placement.group_index, covered):
                self._area[rows, gap.start : gap.stop] = 0

    def _queue(
        self,
        lane: _Lane,
        job_id: int,
        direction: Direction,
        placements: Sequence[Placement],
        start: DeviceEvent,
    ) -> None:
        size = sum(
            len(p.block_ids) * self.layout.bytes_per_block(p.group_index) for p in placements
        )
        job = _Job(job_id, direction, _chunks(placements), size, start, lane.stream.mark())
        lane.jobs.append(job)

    def _wait_for_chunks(self, chunks: frozenset[int]) -> None:
        for lane in self._lanes:
            for job in lane.jobs:
                if not job.chunks.isdisjoint(chunks):
                    job.end.wait()

    def _check_ids(self, placements: Sequence[Placement]) -> None:
        for placement in placements:
            _check_range("chunk", placement.chunk_ids.tolist(), self.slot_count)
            for ref in self.layout.groups[placement.group_index]:
                count = self._blocks[ref.tensor_index].shape[0]
                _check_range("block", placement.block_ids.tolist(), count)


def _check_range(what: str, ids: list[int], count: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= count):
        msg = f"{what} ids {min(ids)}..{max(ids)}, where there are {count}"
        raise LayoutError(msg)


def _chunks(placements: Sequence[Placement]) -> frozenset[int]:
    return frozenset(int(chunk) for placement in placements for chunk in placement.chunks)
