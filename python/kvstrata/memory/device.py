"""The few things a transfer needs of a device: streams, events, and copies put on a stream.

Behind two small protocols, so that the order in which a transfer records and waits for events can
be checked with a double, on a machine without a GPU. Events and streams exist only on the device
that made them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from kvstrata.memory.layout import IntArray


@dataclass(frozen=True)
class PageCopy:
    """Pages of one tensor that move between blocks and slots.

    `slots` is ``(chunks, blocks_per_chunk, page)``, `blocks` is ``(blocks, page)``, both int8 with
    bytes at stride 1. Page `i` is ``slots[chunk_ids[i], sub_blocks[i]]`` on one side and
    ``blocks[block_ids[i]]`` on the other; `page_bytes` bytes are copied.
    """

    slots: torch.Tensor
    blocks: torch.Tensor
    chunk_ids: IntArray
    sub_blocks: IntArray
    block_ids: IntArray
    page_bytes: int
    page_offset: int = 0

    @property
    def span(self) -> slice:
        """The bytes of a page that are copied."""
        return slice(self.page_offset, self.page_offset + self.page_bytes)


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

    def to_slots(self, copy: PageCopy) -> None:
        """Queue a copy from blocks to slots."""

    def to_blocks(self, copy: PageCopy) -> None:
        """Queue a copy from slots to blocks."""

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

    def to_slots(self, copy: PageCopy) -> None:
        """Copy pages from blocks to slots."""
        chunks, subs, blocks = _host_indices(copy)
        copy.slots[chunks, subs, copy.span] = copy.blocks[blocks, copy.span]

    def to_blocks(self, copy: PageCopy) -> None:
        """Copy pages from slots to blocks."""
        chunks, subs, blocks = _host_indices(copy)
        copy.blocks[blocks, copy.span] = copy.slots[chunks, subs, copy.span]

    def mark(self) -> DeviceEvent:
        """A point behind everything queued so far."""
        return HostEvent()


def _host_indices(copy: PageCopy) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.from_numpy(copy.chunk_ids),
        torch.from_numpy(copy.sub_blocks),
        torch.from_numpy(copy.block_ids),
    )


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


class AcceleratorEvent:
    """A timed event of torch's device module (CUDA, and what has the same interface)."""

    def __init__(self, module: Any, stream: Any) -> None:
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
    """A stream of torch's device module; one asynchronous copy per page.

    Every copy is of one contiguous run on both sides: a strided copy between devices would go
    through temporaries, whose lifetime and blocking behaviour are torch's, not ours.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self.module = module
        self.stream: Any = module.Stream(device=device)

    def after(self, event: DeviceEvent) -> None:
        """Let nothing queued from now on start before `event`."""
        if isinstance(event, AcceleratorEvent):
            self.stream.wait_event(event.event)
        else:
            event.wait()

    def to_slots(self, copy: PageCopy) -> None:
        """Copy pages from blocks to slots."""
        with self.module.stream(self.stream):
            for slot, block in _pages(copy):
                slot.copy_(block, non_blocking=True)

    def to_blocks(self, copy: PageCopy) -> None:
        """Copy pages from slots to blocks."""
        with self.module.stream(self.stream):
            for slot, block in _pages(copy):
                block.copy_(slot, non_blocking=True)

    def mark(self) -> DeviceEvent:
        """A point behind everything queued so far."""
        return AcceleratorEvent(self.module, self.stream)


def _pages(copy: PageCopy) -> list[tuple[torch.Tensor, torch.Tensor]]:
    indices = zip(
        copy.chunk_ids.tolist(), copy.sub_blocks.tolist(), copy.block_ids.tolist(), strict=True
    )
    span = copy.span
    return [
        (copy.slots[chunk, sub, span], copy.blocks[block, span]) for chunk, sub, block in indices
    ]


class AcceleratorDevice:
    """KV tensors on an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = torch.get_device_module(device)

    def open_stream(self) -> CopyStream:
        """A stream of our own."""
        return AcceleratorStream(self.module, self.device)

    def mark_compute(self) -> DeviceEvent:
        """A point behind the model's work so far."""
        return AcceleratorEvent(self.module, self.module.current_stream(self.device))


def device_of(tensors: list[torch.Tensor]) -> CopyDevice:
    """The device all of `tensors` are on; :class:`ValueError` where they are on several."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        msg = f"KV tensors on {len(devices)} devices: {sorted(map(str, devices))}"
        raise ValueError(msg)
    device = devices.pop()
    return HostDevice() if device.type == "cpu" else AcceleratorDevice(device)
