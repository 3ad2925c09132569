"""Pieces and batches: what a device is asked to copy, as addresses."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_support.reference import Engine, Part
from memory_support.shapes import SHAPES

from kvstrata.memory.device import (
    AcceleratorDevice,
    AcceleratorEvent,
    AcceleratorStream,
    HostEvent,
    HostStream,
    PageCopy,
    addresses,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


def piece(positions: list[int], size: int) -> PageCopy:
    arena = torch.zeros(512, dtype=torch.int8)
    blocks = torch.arange(4 * 64, dtype=torch.int64).to(torch.int8).view(4, 64)
    return PageCopy(
        arena,
        blocks,
        np.array(positions, dtype=np.int64),
        np.arange(len(positions), dtype=np.int64) % 4,
        size,
        block_offset=3,
    )


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 400), max_size=6, unique=True),
    st.integers(1, 61),
    st.integers(1, 200),
)
def test_a_cut_copy_moves_the_same_bytes_and_crosses_nothing(
    positions: list[int], size: int, every: int
) -> None:
    copy = piece(positions, size)
    cuts = copy.cut(every)
    pairs = [
        (position + byte, block, part.block_offset + byte)
        for part in cuts
        for position, block in zip(part.positions.tolist(), part.block_ids.tolist(), strict=True)
        for byte in range(part.size)
    ]
    assert sorted(pairs) == sorted(
        (position + byte, number % 4, 3 + byte)
        for number, position in enumerate(positions)
        for byte in range(size)
    )
    assert sum(part.total for part in cuts) == copy.total
    for part in cuts:
        for position in part.positions.tolist():
            assert position // every == (position + part.size - 1) // every


class _Batching(HostStream):
    """Copies the addresses that an accelerator would get in one call."""

    def __init__(self, arena: torch.Tensor) -> None:
        self.calls = 0
        self.arena = arena

    def _move(self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
        self.calls += 1
        for tensor in (sources, targets, sizes):
            assert tensor.dtype == torch.int64
            assert tensor.device.type == "cpu"
            assert tensor.is_contiguous()
        for source, target, size in zip(
            sources.tolist(), targets.tolist(), sizes.tolist(), strict=True
        ):
            ctypes.memmove(target, source, size)
        for addresses_, total in ((sources, sizes), (targets, sizes)):
            offsets = addresses_ - self.arena.data_ptr()
            inside = (offsets >= 0) & (offsets < len(self.arena))
            first, last = offsets[inside], (offsets + total - 1)[inside]
            assert torch.equal(first // 24, last // 24), "a piece crosses two registrations"

    def to_slots(self, copies: object) -> None:
        slots, blocks, sizes = addresses(copies)  # type: ignore[arg-type]
        self._move(blocks, slots, sizes)

    def to_blocks(self, copies: object) -> None:
        slots, blocks, sizes = addresses(copies)  # type: ignore[arg-type]
        self._move(slots, blocks, sizes)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_batch_names_the_addresses_of_exactly_the_pieces_and_is_one_call_for_a_job(
    shape: object,
) -> None:
    engine = Engine(shape, 2, 4096, torch.device("cpu"), never_across=24)  # type: ignore[arg-type]
    streams = []
    for worker in engine.workers:
        for lane in worker._lanes:
            lane.stream = _Batching(engine.arena)
            streams.append(lane.stream)
    parts = [Part(0, 1, [7, 2, 9], [64, 2048])]
    engine.store(parts)
    engine.check()
    engine.scramble(3)
    engine.load([Part(0, 1, [1, 4, 0], [64, 2048])])
    engine.check()
    stored = len(
        [rank for rank in range(engine.shape.ranks) if not rank or not engine.shape.is_replicated]
    )
    assert sum(stream.calls for stream in streams) == stored + engine.shape.ranks


class _Module:
    """torch's device module, as far as it is used: what it is asked, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "compute"

    def Stream(self, **_: object) -> str:  # noqa: N802 -- torch's name
        return "ours"

    def current_stream(self, *_: object) -> str:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def Event(self, *, enable_timing: bool) -> _Event:  # noqa: N802
        assert enable_timing
        return _Event(self)


class _Event:
    def __init__(self, module: _Module) -> None:
        self.module = module

    def record(self, stream: str) -> None:
        self.module.log.append(f"record on {stream}")

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: _Event) -> float:
        assert end.module is self.module
        return 2500.0


@pytest.mark.parametrize("batched", [True, False])
def test_an_accelerator_copies_on_a_stream_of_its_own_and_marks_come_behind(batched: bool) -> None:
    module = _Module()

    def batch(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
        module.log.append(f"{len(sizes)} pieces on {module.current}")
        for source, target, size in zip(
            sources.tolist(), targets.tolist(), sizes.tolist(), strict=True
        ):
            ctypes.memmove(target, source, size)

    stream = AcceleratorStream.__new__(AcceleratorStream)
    stream.module, stream.stream = module, module.Stream(device=None)
    stream._batch, stream._kept = batch if batched else None, []
    copies = [piece([7, 200], 20), piece([40], 5)]
    before = [copy.blocks.clone() for copy in copies]
    start = stream.mark()
    stream.to_slots(copies)
    end = stream.mark()
    for copy, blocks in zip(copies, before, strict=True):
        for number, position in enumerate(copy.positions.tolist()):
            wanted = blocks[number, 3 : 3 + copy.size]
            assert torch.equal(copy.arena[position : position + copy.size], wanted)
    moved = ["3 pieces on ours"] if batched else []
    assert module.log == ["record on ours", *moved, "record on ours"]
    assert isinstance(end, AcceleratorEvent)
    assert isinstance(start, AcceleratorEvent)
    # What the call read on the host lives until the copies are done.
    assert [len(each) for each in end.kept] == ([3, 3, 3] if batched else [])
    assert not start.kept
    assert not end.done()
    assert end.seconds_since(start) == 2.5
    for copy in copies:
        copy.blocks.zero_()
    stream.to_blocks(copies)
    for copy, blocks in zip(copies, before, strict=True):
        for number in range(len(copy.positions)):
            here = slice(3, 3 + copy.size)
            assert torch.equal(copy.blocks[number, here], blocks[number, here])


def test_an_accelerators_stream_waits_for_the_point_of_the_models_stream() -> None:
    module, waited = _Module(), []
    device = AcceleratorDevice.__new__(AcceleratorDevice)
    device.module, device.device, device._batch = module, None, None  # type: ignore[assignment]
    stream = device.open_stream()
    stream.stream = SimpleNamespace(wait_event=waited.append)  # type: ignore[attr-defined]
    point = device.mark_compute()
    assert isinstance(point, AcceleratorEvent)
    assert module.log == ["record on compute"]
    stream.after(point)
    assert waited == [point.event], "the host waited, or nobody did"


def test_what_happened_on_the_host_is_timed() -> None:
    first, second = HostEvent(), HostEvent()
    assert second.seconds_since(first) >= 0
