"""Blocks to slots and back: every byte at its place, and none of an earlier request's."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plugin_support.geometry import STALE, bench, layout
from plugin_support.recording import RecordingDevice

from kvstrata.memory.device import HostStream, PageCopy
from kvstrata.memory.layout import ByteRange, ExactLayout, LayoutError, PageRef, merge
from kvstrata.memory.placement import place_blocks
from kvstrata.memory.selftest import check_copies
from kvstrata.memory.transfer import BlockTransfers

if TYPE_CHECKING:
    from collections.abc import Sequence


def test_stored_blocks_come_back_into_other_blocks() -> None:
    b = bench(layout())
    b.store(1, [3, 9, 4], [5, 0, 2], [3], [0])
    before = b.clear_blocks()
    b.load(2, [5, 0, 2], [1, 2, 8], [3], [0])
    for tensor, old in zip(b.blocks, before, strict=True):
        assert torch.equal(tensor[[1, 2, 8]], old[[3, 9, 4]])
    assert [job.job_id for job in b.transfers.finished()] == [1, 2]
    assert not b.transfers.finished()


def test_only_the_first_and_last_chunk_may_be_partial() -> None:
    b = bench(layout(blocks_per_chunk=3))
    b.store(1, [10, 11, 12, 13, 14], [4, 1], [5], [7])
    for block, (chunk, sub) in zip(
        [10, 11, 12, 13, 14], [(4, 1), (4, 2), (1, 0), (1, 1), (1, 2)], strict=True
    ):
        for tensor in (0, 1):
            assert torch.equal(b.page(chunk, tensor, sub), b.blocks[tensor][block])
    for tensor in (0, 1):
        assert not b.page(4, tensor, 0).any(), "the sub-block nobody wrote was not zeroed"
    before = b.clear_blocks()
    b.load(2, [4, 1], [2, 3], [2], [8])
    for tensor in (0, 1):
        assert torch.equal(b.blocks[tensor][2], before[tensor][11])
        assert torch.equal(b.blocks[tensor][3], before[tensor][12])


def test_a_smaller_group_leaves_no_stale_byte_in_its_slot() -> None:
    slots = layout(pages=(64, 64), groups=(((0, 64), (1, 64)), ((1, 48),)), slack=16)
    b = bench(slots)
    b.store(1, [3, 5], [0, 1], [1, 1], [0, 0])
    assert STALE not in b.slot(0).tolist()
    row = b.slot(1)
    assert torch.equal(row[64:112], b.blocks[1][5, :48])
    assert not row[:64].any()
    assert not row[112:].any(), "page padding or the tail kept an earlier request's bytes"


def test_groups_that_alias_one_tensor_keep_their_blocks_apart() -> None:
    slots = layout(pages=(64,), groups=(((0, 64),), ((0, 64),)))
    b = bench(slots)
    b.store(1, [3, 4, 7], [2, 3, 5], [2, 1], [0, 6])
    before = b.clear_blocks()
    b.load(2, [2, 3, 5], [1, 2, 3], [2, 1], [0, 6])
    assert torch.equal(b.blocks[0][[1, 2, 3]], before[0][[3, 4, 7]])


def test_a_group_without_blocks_takes_no_chunk() -> None:
    slots = layout(pages=(64, 64), groups=(((0, 64),), ((1, 64),)), blocks_per_chunk=2)
    b = bench(slots)
    b.store(1, [3, 4], [2], [0, 2], [0, 4])
    assert torch.equal(b.page(2, 1, 0), b.blocks[1][3])


def test_unpadded_pages_leave_the_padding_of_the_tensor_alone() -> None:
    b = bench(layout(pages=(64,), groups=(((0, 40),),)))
    b.store(1, [3], [0], [1], [0])
    b.clear_blocks()
    b.blocks[0].fill_(9)
    b.load(2, [0], [5], [1], [0])
    assert set(b.blocks[0][5, 40:].tolist()) == {9}


def test_blocks_with_a_stride_of_their_own_are_copied_whole_and_alone() -> None:
    b = bench(layout(pages=(64,), groups=(((0, 64),),)), block_stride=96)
    b.store(1, [3, 9], [0, 1], [2], [0])
    assert torch.equal(b.page(1, 0, 0), b.blocks[0][9])


def test_ranks_write_side_by_side() -> None:
    area = 128
    ranks = [bench(layout(area_offset=rank * area, slot_bytes=4096)) for rank in range(2)]
    for rank in ranks:
        rank.store(1, [3], [2], [1], [0])
    first, second = (rank.slot(2) for rank in ranks)
    assert torch.equal(first[:64], ranks[0].blocks[0][3])
    assert set(first[area:].tolist()) == {STALE}, "a rank wrote outside its area"
    assert torch.equal(second[area : area + 64], ranks[1].blocks[0][3])
    assert set(second[:area].tolist()) == {STALE}


def test_a_block_may_be_named_twice_in_one_store() -> None:
    b = bench(layout())
    b.store(1, [3, 3, 5], [0, 1, 2], [3], [0])
    assert torch.equal(b.page(0, 0, 0), b.page(1, 0, 0))


@pytest.mark.parametrize(
    ("blocks", "chunks", "sizes", "first"),
    [
        ([1, 2, 3], [0, 1], [3], [0]),
        ([1, 2, 3, 4], [0], [4], [0]),
        ([1, 2, 3, 4], [0, 1], [3], [0]),
        ([1], [0], [1, 0], [0, 0]),
        ([11, 13, 14, 15], [0, 1], [4], [0]),
    ],
)
def test_counts_that_do_not_fit_are_refused(
    blocks: list[int], chunks: list[int], sizes: list[int], first: list[int]
) -> None:
    slots = layout(blocks_per_chunk=4 if len(blocks) == 4 and blocks[0] == 11 else 3)
    b = bench(slots)
    before = b.arena.clone()
    with pytest.raises(LayoutError):
        b.store(1, blocks, chunks, sizes, first)
    assert torch.equal(b.arena, before)


@pytest.mark.parametrize(("block", "chunk"), [(16, 0), (-1, 0), (0, 6), (0, -1)])
def test_ids_out_of_range_are_refused_before_a_byte_is_copied(block: int, chunk: int) -> None:
    b = bench(layout())
    before = b.arena.clone()
    with pytest.raises(LayoutError):
        b.store(1, [block], [chunk], [1], [0])
    with pytest.raises(LayoutError):
        b.load(1, [chunk], [block], [1], [0])
    assert torch.equal(b.arena, before)
    assert not b.transfers.finished()


@pytest.mark.parametrize(
    "slots",
    [
        layout(pages=(64,), groups=(((1, 64),),)),
        layout(pages=(64,), groups=(((0, 65),),)),
        layout(pages=(64,), groups=(((0, 0),),)),
        layout(pages=(64,), groups=(((0, 64),),), slot_bytes=63),
        layout(pages=(64,), groups=(((0, 64),),), slack=-1),
        layout(pages=(64,), groups=(((0, 64),),), blocks_per_chunk=0),
    ],
)
def test_a_layout_that_does_not_hold_together_is_refused(slots: object) -> None:
    with pytest.raises(LayoutError):
        slots.check()  # type: ignore[attr-defined]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=8))
def test_merged_ranges_cover_the_same_bytes_and_never_touch(pairs: list[tuple[int, int]]) -> None:
    ranges = [ByteRange(start, start + size) for start, size in pairs]
    merged = merge(ranges)
    covered = {byte for item in ranges for byte in range(item.start, item.stop)}
    assert {byte for item in merged for byte in range(item.start, item.stop)} == covered
    assert all(left.stop < right.start for left, right in itertools.pairwise(merged))


@settings(max_examples=60, deadline=None)
@given(
    blocks_per_chunk=st.integers(1, 4),
    counts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=2, max_size=2),
    data=st.data(),
)
def test_any_job_copies_exactly_its_pages_and_zeroes_the_rest_of_its_slots(
    blocks_per_chunk: int, counts: list[tuple[int, int]], data: st.DataObject
) -> None:
    slots = layout(
        pages=(32, 48),
        groups=(((0, 32), (1, 40)), ((1, 48),)),
        blocks_per_chunk=blocks_per_chunk,
        area_offset=16,
        slack=8,
    )
    b = bench(slots, chunks=24, blocks=12)
    sizes = [size for size, _ in counts]
    first = [index for _, index in counts]
    chunk_counts = [
        -(-(size + index % blocks_per_chunk) // blocks_per_chunk) if size else 0
        for size, index in counts
    ]
    chunks = data.draw(st.permutations(range(24)))[: sum(chunk_counts)]
    blocks = data.draw(st.lists(st.integers(0, 11), min_size=sum(sizes), max_size=sum(sizes)))
    b.store(1, blocks, chunks, sizes, first)
    expected = torch.full_like(b.arena, STALE).view(24, slots.slot_bytes)
    taken = block_at = chunk_at = 0
    for group, (size, index) in enumerate(counts):
        for chunk in chunks[chunk_at : chunk_at + chunk_counts[group]]:
            expected[chunk, 16:] = 0
        for n in range(size):
            position = index % blocks_per_chunk + n
            chunk = chunks[chunk_at + position // blocks_per_chunk]
            for ref in slots.groups[group]:
                page = slots.tensor_page_bytes[ref.tensor_index]
                start = slots.tensor_offset(ref.tensor_index) + position % blocks_per_chunk * page
                source = b.blocks[ref.tensor_index][blocks[block_at + n], : ref.page_bytes]
                expected[chunk, start : start + ref.page_bytes] = source
                taken += ref.page_bytes
        block_at += size
        chunk_at += chunk_counts[group]
    assert torch.equal(b.arena.view(24, -1), expected)
    (job,) = b.transfers.finished()
    assert job.size_bytes == taken


class _Swapping(HostStream):
    """Swaps the halves of every page on both ways, as a copy that mixes up two heads would."""

    def to_slots(self, copies: Sequence[PageCopy]) -> None:
        super().to_slots(copies)
        for copy in copies:
            for position in copy.positions.tolist():
                page = copy.arena[position : position + copy.size]
                page.copy_(page.roll(copy.size // 2))

    def to_blocks(self, copies: Sequence[PageCopy]) -> None:
        super().to_blocks(copies)
        for copy in copies:
            for block in copy.block_ids.tolist():
                page = copy.blocks[block, copy.block_offset : copy.block_offset + copy.size]
                page.copy_(page.roll(copy.size // 2))


class _SwappingLoads(_Swapping):
    """Stores as it should."""

    def to_slots(self, copies: Sequence[PageCopy]) -> None:
        HostStream.to_slots(self, copies)


class _SwappingDevice:
    def __init__(self, stream: type[HostStream]) -> None:
        self.open_stream = stream

    def mark_compute(self) -> object:
        return HostStream().mark()


def test_the_self_test_passes_and_leaves_blocks_as_they_were_and_the_slot_zeroed() -> None:
    b = bench(layout(pages=(64, 32), groups=(((0, 64), (1, 30)), ((1, 32),)), blocks_per_chunk=2))
    before = [tensor.clone() for tensor in b.blocks]
    check_copies(b.transfers, b.arena, b.blocks, 4 * b.layout.slot_bytes)
    for tensor, old in zip(b.blocks, before, strict=True):
        assert torch.equal(tensor, old)
    assert not b.slot(4).any()
    assert set(b.slot(3).tolist()) == {STALE}


@pytest.mark.parametrize("stream", [_Swapping, _SwappingLoads])
def test_the_self_test_notices_a_copy_that_swaps_heads(stream: type[HostStream]) -> None:
    b = bench(layout(), device=_SwappingDevice(stream))  # type: ignore[arg-type]
    before = [tensor.clone() for tensor in b.blocks]
    with pytest.raises(LayoutError, match="group 0"):
        check_copies(b.transfers, b.arena, b.blocks, 0)
    for tensor, old in zip(b.blocks, before, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("stream", [_Swapping, _SwappingLoads])
@pytest.mark.parametrize("per_chunk", [1, 3])
def test_the_self_test_notices_it_in_exact_rows_too(
    stream: type[HostStream], per_chunk: int
) -> None:
    whole = ExactLayout(per_chunk, (), (64, 32))
    groups = ((PageRef(0, 64), PageRef(1, 30)), (PageRef(1, 32),))
    slots = dataclasses.replace(whole, groups=groups, rank=1, ranks=2)
    arena = torch.full((4096,), STALE, dtype=torch.int8)
    blocks = [torch.randint(1, 127, (8, page), dtype=torch.int8) for page in (64, 32)]
    check_copies(BlockTransfers(slots, arena, blocks), arena, blocks, 128)
    # The second rank's parts of the rows of both groups, and nothing of the first rank's.
    touched = [*range(94, 188), *range(32, 64)]
    zero = {128 + at * per_chunk + byte for at in touched for byte in range(per_chunk)}
    assert set(np.flatnonzero(arena.numpy() == 0).tolist()) == zero
    assert set(arena[arena != 0].tolist()) == {STALE}
    wrong = BlockTransfers(slots, arena, blocks, _SwappingDevice(stream))  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="group 0"):
        check_copies(wrong, arena, blocks, 128)


def test_a_store_reads_what_the_model_wrote_though_the_device_has_not_run_it_yet() -> None:
    device = RecordingDevice()
    b = bench(layout(), device=device)
    device.launch(lambda: b.blocks[0].fill_(42))
    b.store(1, [3], [0], [1], [0])
    assert device.log.index("stores after compute.1") < device.log.index("stores to_slots")
    device.run()
    assert set(b.page(0, 0, 0).tolist()) == {42}


def test_a_load_comes_after_pending_writes_to_its_blocks() -> None:
    device = RecordingDevice()
    b = bench(layout(), device=device)
    b.slot(0).fill_(7)
    device.launch(b.blocks[0].zero_)
    b.load(1, [0], [3], [1], [0])
    assert device.log.index("loads after compute.1") < device.log.index("loads to_blocks")
    device.run()
    assert set(b.blocks[0][3].tolist()) == {7}


def test_jobs_end_only_when_their_copies_did_and_each_of_them_once() -> None:
    device = RecordingDevice()
    b = bench(layout(), device=device)
    b.store(1, [3], [0], [1], [0])
    b.store(2, [4], [1], [1], [0])
    assert not b.transfers.finished()
    b.transfers.wait({1, 77})
    assert [job.job_id for job in b.transfers.finished()] == [1]
    device.run()
    assert [job.job_id for job in b.transfers.finished()] == [2]
    assert not b.transfers.finished()


def test_a_slot_another_job_still_writes_is_waited_for_before_it_is_zeroed() -> None:
    device = RecordingDevice()
    slots = layout(blocks_per_chunk=2)
    b = bench(slots, device=device)
    b.store(1, [3, 4], [0], [2], [0])
    b.store(2, [5], [0], [1], [1])
    device.run()
    for tensor in (0, 1):
        assert not b.page(0, tensor, 0).any(), "the first job's bytes are in the second one's slot"
        assert torch.equal(b.page(0, tensor, 1), b.blocks[tensor][5])


def test_an_expedited_load_does_not_queue_behind_others() -> None:
    device = RecordingDevice()
    b = bench(layout(), device=device)
    b.load(1, [0], [3], [1], [0])
    placements = place_blocks(b.layout, np.array([4]), [1], [0], np.array([1]))
    b.transfers.load(2, placements, expedited=True)
    b.transfers.wait({2})
    assert {job.job_id for job in b.transfers.finished()} >= {2}
    assert "expedited to_blocks" in device.log


def test_closing_waits_for_copies_and_drops_every_view() -> None:
    device = RecordingDevice()
    b = bench(layout(), device=device)
    b.store(1, [3], [0], [1], [0])
    b.transfers.close()
    assert torch.equal(b.page(0, 0, 0), b.blocks[0][3])
    assert not b.transfers.finished()
