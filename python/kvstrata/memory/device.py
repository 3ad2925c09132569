"""The few things a transfer needs of a device: streams, events, and copies put on a stream.

Behind two small protocols, so that the order in which a transfer records and waits for events can
be checked with a double, on a machine without a GPU. Events and streams exist only on the device
that made them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstrata.memory.placement import IntArray


@dataclass(frozen=True)
class PageCopy:
    """Pieces of equal size of one tensor that move between its blocks and the arena.

    `arena` is flat and on the host, `blocks` is ``(blocks, page)``, both int8 with bytes at stride
    1. Piece `i` is `size` bytes at `positions[i]` of the arena on one side, and at `block_offset`
    of block `block_ids[i]` on the other.
    """

    arena: torch.Tensor
    blocks: torch.Tensor
    positions: IntArray
    block_ids: IntArray
    size: int
    block_offset: int = 0

    @property
    def total(self) -> int:
        """Bytes of all pieces."""
        return self.size * len(self.block_ids)

    def cut(self, every: int) -> list[PageCopy]:
        """The same bytes in pieces none of which crosses a multiple of `every` in the arena."""
        ends = (self.positions + self.size - 1) // every
        crossing = np.flatnonzero(ends != self.positions // every)
        if not len(crossing):
            return [self]
        whole = np.setdiff1d(np.arange(len(self.positions)), crossing)
        cuts = [
            replace(self, positions=self.positions[whole], block_ids=self.block_ids[whole])
        ] * bool(len(whole))
        for index in crossing.tolist():
            start, stop = int(self.positions[index]), int(self.positions[index]) + self.size
            edges = [start, *range((start // every + 1) * every, stop, every), stop]
            cuts += [
                replace(
                    self,
                    positions=np.array([left], dtype=np.int64),
                    block_ids=self.block_ids[index : index + 1],
                    size=right - left,
                    block_offset=self.block_offset + left - start,
                )
                for left, right in pairwise(edges)
            ]
        return cuts


class DeviceEvent(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether everything before the point has happened. Never waits."""

    def wait(self) -> None:
        """Block the caller until it has."""

    def seconds_since(self, start: DeviceEvent) -> float:
        """Device time between two points that are done."""


class CopyStream(Protocol):
    """A queue of copies, in order."""

    def after(self, event: DeviceEvent) -> None:
        """Let nothing queued from now on start before `event`."""

    def to_slots(self, copies: Sequence[PageCopy]) -> None:
        """Queue copies from blocks to slots."""

    def to_blocks(self, copies: Sequence[PageCopy]) -> None:
        """Queue copies from slots to blocks."""

    def mark(self) -> DeviceEvent:
        """Record a point behind everything queued so far."""


class CopyDevice(Protocol):
    """A device that holds KV tensors."""

    def open_stream(self) -> CopyStream:
        """Make a stream of our own, never the one the model computes on."""

    def mark_compute(self) -> DeviceEvent:
        """Record a point behind all the model's work that has been launched so far."""


class HostEvent:
    """A point that has passed: on the host everything happens at once."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def done(self) -> bool:
        """Whether everything before the point has happened."""
        return True

    def wait(self) -> None:
        """Block until it has."""
        return

    def seconds_since(self, start: DeviceEvent) -> float:
        """Time between two points that are done, in seconds."""
        return self.at - start.at if isinstance(start, HostEvent) else 0.0


class HostStream:
    """Copies at once, on the caller's thread."""

    def after(self, event: DeviceEvent) -> None:
        """Let nothing queued from now on start before `event`."""
        event.wait()

    def to_slots(self, copies: Sequence[PageCopy]) -> None:
        """Copy pieces from blocks to slots."""
        for copy in copies:
            arena, blocks = copy.arena.numpy(), copy.blocks.numpy()
            size, first = copy.size, copy.block_offset
            for position, block in _pieces(copy):
                arena[position : position + size] = blocks[block, first : first + size]

    def to_blocks(self, copies: Sequence[PageCopy]) -> None:
        """Copy pieces from slots to blocks."""
        for copy in copies:
            arena, blocks = copy.arena.numpy(), copy.blocks.numpy()
            size, first = copy.size, copy.block_offset
            for position, block in _pieces(copy):
                blocks[block, first : first + size] = arena[position : position + size]

    def mark(self) -> DeviceEvent:
        """A point behind everything queued so far."""
        return HostEvent()


def _pieces(copy: PageCopy) -> Iterable[tuple[int, int]]:
    return zip(copy.positions.tolist(), copy.block_ids.tolist(), strict=True)


class HostDevice:
    """KV tensors in CPU memory.

    The model runs on the caller's thread, so its work is done when we are called.
    """

    def open_stream(self) -> CopyStream:
        """A stream of our own."""
        return HostStream()

    def mark_compute(self) -> DeviceEvent:
        """A point behind the model's work so far."""
        return HostEvent()


# Copies `sizes[i]` bytes from address `sources[i]` to `targets[i]`, for all `i`, on the current
# stream, in one call; three int64 tensors on the host.
BatchCopy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class AcceleratorEvent:
    """A timed event of torch's device module (CUDA, and what has the same interface)."""

    def __init__(self, module: Any, stream: Any, kept: Sequence[torch.Tensor] = ()) -> None:
        # What copies before this point read on the host, alive as long as someone asks for it.
        self.kept = tuple(kept)
        self.event: Any = module.Event(enable_timing=True)
        self.event.record(stream)

    def done(self) -> bool:
        """Whether everything before the point has happened."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Block until it has."""
        self.event.synchronize()

    def seconds_since(self, start: DeviceEvent) -> float:
        """Time between two points that are done, in seconds."""
        if not isinstance(start, AcceleratorEvent):
            return 0.0
        return float(start.event.elapsed_time(self.event)) * 1e-3


class AcceleratorStream:
    """A stream of torch's device module.

    With `batch` all pieces of a job are one call, without it each is an asynchronous copy of its
    own. Every piece is one contiguous run on both sides: a strided copy between devices would go
    through temporaries, whose lifetime and blocking behaviour are torch's, not ours.
    """

    def __init__(self, module: Any, device: torch.device, batch: BatchCopy | None = None) -> None:
        self.module = module
        self.stream: Any = module.Stream(device=device)
        self._batch = batch
        self._kept: list[torch.Tensor] = []

    def after(self, event: DeviceEvent) -> None:
        """Let nothing queued from now on start before `event`."""
        if isinstance(event, AcceleratorEvent):
            self.stream.wait_event(event.event)
        else:
            event.wait()

    def to_slots(self, copies: Sequence[PageCopy]) -> None:
        """Copy pieces from blocks to slots."""
        with self.module.stream(self.stream):
            if self._batch is not None and copies:
                slots, blocks, sizes = addresses(copies)
                self._kept += [slots, blocks, sizes]
                self._batch(blocks, slots, sizes)
                return
            for slot, block in _views(copies):
                slot.copy_(block, non_blocking=True)

    def to_blocks(self, copies: Sequence[PageCopy]) -> None:
        """Copy pieces from slots to blocks."""
        with self.module.stream(self.stream):
            if self._batch is not None and copies:
                slots, blocks, sizes = addresses(copies)
                self._kept += [slots, blocks, sizes]
                self._batch(slots, blocks, sizes)
                return
            for slot, block in _views(copies):
                block.copy_(slot, non_blocking=True)

    def mark(self) -> DeviceEvent:
        """A point behind everything queued so far."""
        kept, self._kept = self._kept, []
        return AcceleratorEvent(self.module, self.stream, kept)


def addresses(copies: Sequence[PageCopy]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Addresses of all pieces in the arena, in the blocks, and their sizes, as int64 tensors."""
    slots = [copy.positions + copy.arena.data_ptr() for copy in copies]
    blocks = [
        copy.block_ids * copy.blocks.stride(0) + (copy.blocks.data_ptr() + copy.block_offset)
        for copy in copies
    ]
    sizes = [np.full(len(copy.block_ids), copy.size, dtype=np.int64) for copy in copies]
    parts = [torch.from_numpy(np.concatenate(each)) for each in (slots, blocks, sizes)]
    return parts[0], parts[1], parts[2]


def _views(copies: Sequence[PageCopy]) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    for copy in copies:
        size, first = copy.size, copy.block_offset
        for position, block in _pieces(copy):
            yield (
                copy.arena[position : position + size],
                copy.blocks[block, first : first + size],
            )


class AcceleratorDevice:
    """KV tensors on an accelerator."""

    def __init__(self, device: torch.device, batch: BatchCopy | None = None) -> None:
        self.device = device
        self.module: Any = torch.get_device_module(device)
        self._batch = batch

    def open_stream(self) -> CopyStream:
        """A stream of our own."""
        return AcceleratorStream(self.module, self.device, self._batch)

    def mark_compute(self) -> DeviceEvent:
        """A point behind the model's work so far."""
        return AcceleratorEvent(self.module, self.module.current_stream(self.device))


def device_of(tensors: Sequence[torch.Tensor], batch: BatchCopy | None = None) -> CopyDevice:
    """The device all of `tensors` are on; :class:`ValueError` where they are on several.

    `batch` is how an accelerator copies many pieces at once, where someone knows how.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        msg = f"KV tensors on {len(devices)} devices: {sorted(map(str, devices))}"
        raise ValueError(msg)
    device = devices.pop()
    return HostDevice() if device.type == "cpu" else AcceleratorDevice(device, batch)
