"""Our worker over our arena: what fits is copied, what does not is reported and never found."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from plugin_support.rows import PAGE, Rank, gpu, row_spec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvstrata.memory.arena import Arena
from kvstrata.memory.layout import LayoutError, PageRef
from kvstrata.memory.mapping import large_page_bytes
from kvstrata.vllm.rowspec import UNKNOWN, RowSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec

ONE = ((PageRef(0, PAGE), PageRef(1, PAGE)),)
TWO = (*ONE, (PageRef(1, 40),))


@pytest.fixture
def arena(engine_id: str) -> Iterator[Arena]:
    with contextlib.closing(Arena.create(1 << 16, engine_id)) as made:
        made.tensor.fill_(0x5A)
        yield made


def ended(rank: Rank) -> list[tuple[int, bool, int | None]]:
    return [(r.job_id, r.success, r.transfer_size) for r in rank.worker.get_finished()]


def test_rows_of_two_groups_go_where_the_manager_says_and_come_back(arena: Arena) -> None:
    rank = Rank(arena, TWO)
    assert rank.worker.submit_store(
        1, gpu([3, 4, 7], [2, 1], [0, 5]), row_spec([0, 0, 1], [0, 1, 5], [640, 64, 1000])
    )
    assert ended(rank) == [(1, True, 4 * PAGE + 40)]
    assert not ended(rank)
    row = arena.tensor.view(torch.int8)
    assert torch.equal(row[640 : 640 + PAGE], rank.blocks[0][3])
    assert torch.equal(row[64 + PAGE : 64 + 2 * PAGE], rank.blocks[1][4])
    assert torch.equal(row[1000:1040], rank.blocks[1][7, :40])
    assert set(row[:64].tolist() + row[192:640].tolist() + row[1040:].tolist()) == {0x5A}
    before = [tensor.clone() for tensor in rank.blocks]
    for tensor in rank.blocks:
        tensor.zero_()
    assert rank.worker.submit_load(
        2, row_spec([0, 1], [1, 5], [64, 1000]), gpu([9, 2], [1, 1], [1, 5])
    )
    rank.worker.wait({2, 99})
    assert ended(rank) == [(2, True, 2 * PAGE + 40)]
    assert torch.equal(rank.blocks[0][9], before[0][4])
    assert torch.equal(rank.blocks[1][2, :40], before[1][7, :40])
    assert not rank.worker.take_refused()
    assert not rank.worker.take_failed_loads()


def test_ranks_write_their_parts_of_one_row_side_by_side(engine_id: str) -> None:
    with contextlib.closing(Arena.create(1 << 14, engine_id)) as arena:
        ranks = [Rank(Arena.join(engine_id, 5), ONE, rank=rank, ranks=2) for rank in range(2)]
        for rank in ranks:
            rank.worker.submit_store(1, gpu([5], [1], [0]), row_spec([0], [0], [128]))
        part = 2 * PAGE
        row = arena.tensor.view(torch.int8)[128 : 128 + 2 * part]
        for number, rank in enumerate(ranks):
            for tensor in range(2):
                start = number * part + tensor * PAGE
                assert torch.equal(row[start : start + PAGE], rank.blocks[tensor][5])
            rank.worker.shutdown()
            rank.worker.shutdown()


# What a store may look like whose blocks are not all there: blocks, first one, chunks of four.
HOLES = {
    "one in the middle": ([11, 13, 14], 0, 1),
    "the first and one behind it": ([12, 14], 1, 1),
    "in the second chunk": ([11, 12, 13, 14, 15, 17, 18], 0, 2),
    "at the start of the second chunk": ([11, 12, 13, 14, 17, 18], 0, 2),
    "all of a chunk": ([11, 12, 13, 14], 0, 2),
    "at the end": ([11, 12, 13], 0, 1),
    "one too many": ([11, 12, 13, 14, 15], 0, 1),
    "none there": ([], 0, 1),
}


@pytest.mark.parametrize("hole", HOLES)
def test_a_row_with_a_hole_is_dropped_not_wrong(hole: str, arena: Arena) -> None:
    blocks, first, chunks = HOLES[hole]
    rank = Rank(arena, TWO, blocks_per_chunk=4)
    before = arena.tensor.clone()
    offsets = [0, 4096][:chunks]
    spec = row_spec([0] * chunks, range(chunks), offsets)
    assert rank.worker.submit_store(1, gpu(blocks, [len(blocks), 0], [first, 0]), spec)
    assert ended(rank) == [(1, True, 0)]
    assert rank.worker.take_refused() == frozenset(spec.keys)
    assert not rank.worker.take_refused(), "told twice"
    assert torch.equal(arena.tensor, before)


def test_the_other_groups_of_the_job_are_stored_all_the_same(arena: Arena) -> None:
    rank = Rank(arena, TWO, blocks_per_chunk=4)
    spec = row_spec([0, 1], [0, 0], [0, 8192])
    rank.worker.submit_store(1, gpu([11, 13, 14, 2, 3, 4, 5], [3, 4], [0, 0]), spec)
    assert rank.worker.take_refused() == {spec.keys[0]}
    assert ended(rank) == [(1, True, 4 * 40)]
    stored = arena.tensor.view(torch.int8)[8192 : 8192 + 160].view(4, 40)
    assert torch.equal(stored, rank.blocks[1][2:6, :40])


def test_a_chunk_that_starts_late_is_whole_and_its_rest_is_zero(arena: Arena) -> None:
    rank = Rank(arena, ONE, blocks_per_chunk=4)
    rank.worker.submit_store(1, gpu([7, 8], [2], [6]), row_spec([0], [1], [512]))
    assert not rank.worker.take_refused()
    rows = arena.tensor.view(torch.int8)[512 : 512 + 8 * PAGE].view(2, 4, PAGE)
    for tensor in range(2):
        assert not rows[tensor, :2].any(), "an earlier request's bytes stayed in the slot"
        assert torch.equal(rows[tensor, 2:], rank.blocks[tensor][[7, 8]])


def test_only_the_row_without_its_head_is_dropped(arena: Arena) -> None:
    rank = Rank(arena, TWO, blocks_per_chunk=4, spare_heads=[1, 2])
    before = arena.tensor.clone()
    spec = row_spec([0, 0, 1], [1, 5, 0], [0, 4096, 8192])
    job = gpu([7, 8, 11, 12, 13, 14, 2, 3], [6, 2], [6, 2])
    rank.worker.submit_store(1, job, spec)
    assert rank.worker.take_refused() == {spec.keys[0]}
    assert ended(rank) == [(1, True, 4 * PAGE * len(TWO[0]) + 2 * 40)]
    assert torch.equal(arena.tensor[:4096], before[:4096])
    stored = arena.tensor.view(torch.int8)[4096 : 4096 + 4 * PAGE].view(4, PAGE)
    assert torch.equal(stored, rank.blocks[TWO[0][0].tensor_index][11:15])
    assert rank.worker.faults.total == 0


MISFITS: dict[str, tuple[GPULoadStoreSpec, RowSpec]] = {
    "no such block": (gpu([12], [1, 0], [0, 0]), row_spec([0], [0], [0])),
    "a slot outside the arena": (gpu([1], [1, 0], [0, 0]), row_spec([0], [0], [(1 << 16) - 10])),
    "a slot before it": (gpu([1], [1, 0], [0, 0]), row_spec([0], [0], [-64])),
    "another chunk": (gpu([1], [1, 0], [3, 0]), row_spec([0], [2], [0])),
    "a group that is none": (gpu([1], [1, 0], [0, 0]), row_spec([2], [0], [0])),
    "more rows than blocks": (gpu([1], [1, 0], [0, 0]), row_spec([0, 0], [0, 1], [0, 640])),
    "rows of a group without blocks": (
        gpu([1], [1, 0], [0, 0]),
        row_spec([0, 1], [0, 0], [0, 640]),
    ),
    "groups nobody knows": (gpu([1], [1], [0]), row_spec([0], [0], [0])),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_store_that_does_not_fit_is_acknowledged_and_its_rows_are_refused(
    misfit: str, arena: Arena
) -> None:
    blocks, spec = MISFITS[misfit]
    rank = Rank(arena, TWO)
    before = arena.tensor.clone()
    assert rank.worker.submit_store(7, blocks, spec)
    refused = rank.worker.take_refused()
    assert refused
    assert refused <= set(spec.keys)
    assert [(job, ok) for job, ok, _ in ended(rank)] == [(7, True)]
    if refused == set(spec.keys):
        assert torch.equal(arena.tensor, before)


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_load_that_does_not_fit_copies_nothing_and_is_named(misfit: str, arena: Arena) -> None:
    blocks, spec = MISFITS[misfit]
    rank = Rank(arena, TWO)
    before = [tensor.clone() for tensor in rank.blocks]
    assert rank.worker.submit_load(7, spec, blocks)
    assert rank.worker.take_failed_loads() == {7}
    assert not rank.worker.take_failed_loads()
    assert rank.worker.take_refused() == set(spec.keys), "the same rows would be found again"
    assert ended(rank) == [(7, True, 0)]
    assert all(torch.equal(a, b) for a, b in zip(rank.blocks, before, strict=True))
    with pytest.raises(LayoutError):
        rank.worker.submit_load(8, spec, blocks, expedited=True)


def test_rows_that_would_share_bytes_are_refused(arena: Arena) -> None:
    rank = Rank(arena, ONE)
    spec = row_spec([0, 0], [0, 1], [0, PAGE])
    rank.worker.submit_store(1, gpu([1, 2], [2], [0]), spec)
    assert rank.worker.take_refused() == set(spec.keys)


def test_chunks_out_of_order_are_refused_and_unknown_ones_are_not(arena: Arena) -> None:
    rank = Rank(arena, ONE)
    for chunks, fits in (([3, 4], True), ([3, 9], True), ([3, 3], False), ([UNKNOWN] * 2, True)):
        rank.worker.submit_store(1, gpu([1, 2], [2], [3]), row_spec([0, 0], chunks, [0, 640]))
        assert (not rank.worker.take_refused()) is fits, chunks
    for chunks, fits in (([3, 4], True), ([3, 9], False), ([3, UNKNOWN], True)):
        rank.worker.submit_load(2, row_spec([0, 0], chunks, [0, 640]), gpu([1, 2], [2], [3]))
        assert (not rank.worker.take_failed_loads()) is fits, chunks


def test_a_load_may_end_within_a_chunk(arena: Arena) -> None:
    rank = Rank(arena, ONE, blocks_per_chunk=4)
    rank.worker.submit_store(
        1, gpu([0, 1, 2, 3, 4, 5, 6, 7], [8], [0]), row_spec([0, 0], [0, 1], [0, 4096])
    )
    before = [tensor.clone() for tensor in rank.blocks]
    rank.worker.submit_load(2, row_spec([0, 0], [0, 1], [0, 4096]), gpu([9, 10, 11, 8], [4], [2]))
    assert not rank.worker.take_failed_loads()
    for tensor, old in zip(rank.blocks, before, strict=True):
        assert torch.equal(tensor[[9, 10, 11, 8]], old[[2, 3, 4, 5]])


def test_a_copy_that_breaks_down_ends_its_job_and_hides_its_rows(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(arena, ONE)
    transfers = rank.worker._transfers
    real = transfers.store

    def broken(job_id: int, placements: Any) -> None:
        if placements:
            msg = "the device went away"
            raise RuntimeError(msg)
        real(job_id, placements)

    monkeypatch.setattr(transfers, "store", broken)
    spec = row_spec([0], [0], [0])
    assert rank.worker.submit_store(3, gpu([1], [1], [0]), spec)
    assert rank.worker.take_refused() == set(spec.keys)
    assert ended(rank) == [(3, True, 0)]
    assert rank.worker.faults.total == 1


def test_slots_of_another_manager_are_no_rows(arena: Arena) -> None:
    rank = Rank(arena, ONE)
    other: LoadStoreSpec = CPULoadStoreSpec([0])
    with pytest.raises(LayoutError, match="CPULoadStoreSpec"):
        rank.worker.submit_store(1, gpu([1], [1], [0]), other)
    rank.worker.submit_load(2, other, gpu([1], [1], [0]))
    assert rank.worker.take_failed_loads() == {2}


def test_new_tensors_replace_the_old_ones(arena: Arena) -> None:
    rank, other = Rank(arena, ONE), Rank(arena, ONE, seed=9)
    rank.worker.submit_store(1, gpu([4], [1], [0]), row_spec([0], [0], [64]))
    rank.worker.rebind(other.caches, ONE)
    old = rank.blocks[0].clone()
    rank.worker.submit_load(2, row_spec([0], [0], [64]), gpu([7], [1], [0]))
    assert torch.equal(other.blocks[0][7], old[4])
    assert torch.equal(rank.blocks[0], old)


def test_jobs_that_end_with_the_old_tensors_are_reported_all_the_same(arena: Arena) -> None:
    rank, other = Rank(arena, ONE), Rank(arena, ONE, seed=9)
    rank.worker.submit_store(1, gpu([4], [1], [0]), row_spec([0], [0], [64]))
    rank.worker.rebind(other.caches, ONE)
    rank.worker.submit_load(2, row_spec([0], [0], [64]), gpu([7], [1], [0]))
    size = 2 * PAGE
    assert ended(rank) == [(1, True, size), (2, True, size)]
    assert ended(rank) == []


def test_after_a_change_of_the_rows_nothing_is_copied(arena: Arena) -> None:
    rank = Rank(arena, ((PageRef(0, PAGE),),))
    rank.worker.rebind(rank.caches, ONE)  # twice as large
    before, blocks = arena.tensor.clone(), rank.blocks[0].clone()
    spec = row_spec([0], [0], [64])
    rank.worker.submit_store(1, gpu([4], [1], [0]), spec)
    assert rank.worker.take_refused() == set(spec.keys)
    rank.worker.submit_load(2, spec, gpu([7], [1], [0]))
    assert rank.worker.take_failed_loads() == {2}
    assert ended(rank) == [(1, True, 0), (2, True, 0)]
    assert torch.equal(arena.tensor, before)
    assert torch.equal(rank.blocks[0], blocks)


def test_the_self_test_runs_through_the_row_of_every_group(arena: Arena) -> None:
    rank = Rank(arena, TWO, blocks_per_chunk=2, self_test_at=128)
    row = arena.tensor.view(torch.int8)
    assert not row[128 : 128 + 4 * PAGE].any()
    assert set(row[:128].tolist()) == {0x5A}
    rank.worker.shutdown()


def test_an_arena_too_small_for_a_row_is_refused_by_the_self_test(engine_id: str) -> None:
    with (
        contextlib.closing(Arena.create(1 << 9, engine_id)) as small,
        pytest.raises(LayoutError, match="have to be below"),
    ):
        Rank(small, TWO, blocks_per_chunk=8, self_test_at=0)


@pytest.mark.parametrize("large", [True, False])
def test_pages_are_taken_in_the_background_where_asked_for(
    engine_id: str, caplog: pytest.LogCaptureFixture, large: bool
) -> None:
    caplog.set_level(logging.INFO, "kvstrata")
    arena = Arena.create(8 << 20, engine_id)
    rank = Rank(arena, ONE, takes_pages=True, large_pages=large)
    assert rank.worker._pinning is not None
    assert rank.worker._pinning.wait(30)
    assert rank.worker.pinned_bytes == 0, "there is no device to register it with"
    assert os.fstat(arena.fd).st_blocks * 512 == 8 << 20
    told = "bytes of the arena are in large pages" in caplog.text
    assert told == (large and large_page_bytes() is not None)
    rank.worker.shutdown()
