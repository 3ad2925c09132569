"""Our spec's worker over vLLM's shared region, with vLLM's own job descriptions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from plugin_support.configs import PAGE, disk_entry, offloading_config
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

import kvstrata
from kvstrata.memory.layout import LayoutError
from kvstrata.vllm import packed
from kvstrata.vllm.spec import KVStrataSpec
from kvstrata.vllm.worker import KVStrataWorker

if TYPE_CHECKING:
    from plugin_support.stand_in import Opener

pytestmark = pytest.mark.usefixtures("registered", "opener")

BLOCKS = 12


def kv_caches(seed: int = 1, pages: tuple[int, ...] = (PAGE, PAGE)) -> CanonicalKVCaches:
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randint(1, 127, (BLOCKS, page), dtype=torch.int8, generator=generator)
        for page in pages
    ]
    return CanonicalKVCaches(
        tensors=[
            CanonicalKVCacheTensor(tensor=tensor, page_size_bytes=page)
            for tensor, page in zip(tensors, pages, strict=True)
        ],
        group_data_refs=[
            [CanonicalKVCacheRef(tensor_idx=i, page_size_bytes=p) for i, p in enumerate(pages)]
        ],
    )


def make_spec(engine_id: str, **config: Any) -> KVStrataSpec:
    made = offloading_config(
        engine_id,
        [disk_entry("file:///unused")],
        extra={"spec_name": "KVStrataSpec", **config.pop("extra", {})},
        **config,
    )
    spec = OffloadingSpecFactory.create_spec(made)
    assert isinstance(spec, KVStrataSpec)
    return spec


def blocks(ids: list[int], first: int = 0) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(ids, group_sizes=[len(ids)], block_indices=[first])


def test_a_row_written_by_two_ranks_goes_down_and_comes_back_to_both(
    engine_id: str, opener: Opener
) -> None:
    caches = [kv_caches(seed=rank + 1) for rank in range(2)]
    specs = [make_spec(engine_id, world_size=2, rank=rank) for rank in range(2)]
    workers = [spec.get_worker(cache) for spec, cache in zip(specs, caches, strict=True)]
    manager: Any = make_spec(engine_id, world_size=2).get_manager()
    context = ReqContext(req_id="a")
    manager.on_new_request(context)
    key = make_offload_key(b"k" * 32, 0)
    stored = manager.prepare_store([key], context)
    for worker in workers:
        assert worker.submit_store(1, blocks([5]), stored.store_spec)
        assert [(r.job_id, r.success) for r in worker.get_finished()] == [(1, True)]
        assert not worker.get_finished()
    manager.complete_store({key}, context)
    end = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
    manager.reset_cache()
    # 0.33 holds promotions back until the workers have let go of what the reset freed.
    getattr(manager, "on_reset_flushed", lambda: None)()
    manager.primary_tier.get_kv_memoryview().cast("B")[:] = bytes(
        manager.primary_tier.get_kv_memoryview().nbytes
    )
    other = ReqContext(req_id="b")
    manager.on_new_request(other)
    assert manager.lookup(key, other) is LookupResult.HIT_PENDING
    manager.on_schedule_end(end)
    assert manager.lookup(key, other) is LookupResult.HIT
    source = manager.prepare_load([key], other)
    for worker, cache in zip(workers, caches, strict=True):
        expected = [tensor.tensor[5].clone() for tensor in cache.tensors]
        for tensor in cache.tensors:
            tensor.tensor.zero_()
        assert worker.submit_load(2, source, blocks([9]))
        worker.wait({2, 12345})
        for tensor, row in zip(cache.tensors, expected, strict=True):
            assert torch.equal(tensor.tensor[9], row)
    for worker in workers:
        worker.shutdown()
        worker.shutdown()
    manager.shutdown()


BLOCKS_FIRST = {"kv_cache_layout": "BLHNC"}


def packed_caches(groups: int) -> CanonicalKVCaches:
    tensor = torch.randint(1, 127, (BLOCKS, 2 * PAGE), dtype=torch.int8)
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor=tensor, page_size_bytes=2 * PAGE)],
        group_data_refs=[[CanonicalKVCacheRef(0, 2 * PAGE)] for _ in range(groups)],
    )


def test_a_packed_block_gives_each_group_its_own_bytes_and_none_of_anothers(engine_id: str) -> None:
    pages = [[[0, PAGE], [PAGE, 512]], [[64, 1024]]]
    spec = make_spec(engine_id, group_ids=(0, 1), extra={packed.KEY: pages}, **BLOCKS_FIRST)
    caches = packed_caches(2)
    worker: Any = spec.get_worker(caches)
    job = GPULoadStoreSpec([3, 5], group_sizes=[1, 1], block_indices=[0, 0])
    worker.submit_store(1, job, CPULoadStoreSpec([0, 1]))
    arena = worker._region.base_tensor.view(-1, 2 * PAGE)
    block = caches.tensors[0].tensor
    assert torch.equal(arena[0, : PAGE + 512], block[3, : PAGE + 512])
    assert not arena[0, PAGE + 512 :].any()
    assert torch.equal(arena[1, 64:1088], block[5, 64:1088])
    assert not arena[1, :64].any()
    assert not arena[1, 1088:].any(), "another group's bytes went into the slot"
    before = block.clone()
    block.fill_(9)
    worker.submit_load(2, CPULoadStoreSpec([1]), GPULoadStoreSpec([7], [0, 1], [0, 0]))
    assert torch.equal(block[7, 64:1088], before[5, 64:1088])
    assert set(block[7, :64].tolist() + block[7, 1088:].tolist()) == {9}
    worker.shutdown()


def test_groups_in_a_packed_block_are_refused_where_nobody_says_whose_is_what(
    engine_id: str,
) -> None:
    with pytest.raises(kvstrata.ConfigError, match="KVStrataConnector"):
        make_spec(engine_id, group_ids=(0, 1), **BLOCKS_FIRST).get_worker(packed_caches(2))
    make_spec(engine_id, **BLOCKS_FIRST).get_worker(packed_caches(1)).shutdown()


def test_groups_of_one_layer_that_overlay_one_tensor_are_not_taken_for_a_packed_block(
    engine_id: str,
) -> None:
    spec = make_spec(engine_id, group_ids=(0, 1), kv_cache_layout="LBHNC")
    caches = packed_caches(2)
    worker: Any = spec.get_worker(caches)
    job = GPULoadStoreSpec([3, 5], group_sizes=[1, 1], block_indices=[0, 0])
    worker.submit_store(1, job, CPULoadStoreSpec([0, 1]))
    arena = worker._region.base_tensor.view(-1, 2 * PAGE)
    assert torch.equal(arena[:2], caches.tensors[0].tensor[[3, 5]])
    worker.shutdown()


def test_nothing_of_ours_stays_in_shared_memory(engine_id: str) -> None:
    spec = make_spec(engine_id)
    worker = spec.get_worker(kv_caches())
    manager = make_spec(engine_id).get_manager()
    assert list(Path("/dev/shm").glob(f"*{engine_id}*"))
    manager.shutdown()
    worker.shutdown()
    assert not list(Path("/dev/shm").glob(f"*{engine_id}*"))


def test_loads_are_accepted_with_and_without_the_newer_keyword(engine_id: str) -> None:
    worker: Any = make_spec(engine_id).get_worker(kv_caches())
    slots = CPULoadStoreSpec([0])
    assert worker.submit_store(1, blocks([1]), slots)
    assert worker.submit_load(2, slots, blocks([2]))
    assert worker.submit_load(3, slots, blocks([3]), expedited=True)
    assert {result.job_id for result in worker.get_finished()} == {1, 2, 3}
    worker.shutdown()


def test_a_job_whose_counts_do_not_fit_is_refused_and_never_half_done(engine_id: str) -> None:
    spec = make_spec(engine_id, blocks_per_chunk=2)
    worker = spec.get_worker(kv_caches())
    assert isinstance(worker, KVStrataWorker)
    with pytest.raises(LayoutError):
        worker.submit_store(1, blocks([1, 2, 3]), CPULoadStoreSpec([0]))
    assert worker.refused == 1
    assert not worker.get_finished()
    worker.shutdown()


def test_new_tensors_replace_the_old_ones(engine_id: str) -> None:
    spec = make_spec(engine_id)
    old, new = kv_caches(1), kv_caches(2)
    worker = spec.get_worker(old)
    slots = CPULoadStoreSpec([3])
    worker.submit_store(1, blocks([4]), slots)
    assert spec.get_worker(new) is worker
    before = old.tensors[0].tensor.clone()
    worker.submit_load(2, slots, blocks([7]))
    assert torch.equal(new.tensors[0].tensor[7], before[4])
    assert torch.equal(old.tensors[0].tensor, before), "a load wrote into tensors that are gone"
    worker.shutdown()


def test_tensors_larger_than_the_reserved_slot_are_refused_naming_both_sizes(
    engine_id: str,
) -> None:
    spec = make_spec(engine_id, bytes_per_block=2 * PAGE)
    with pytest.raises(kvstrata.ConfigError, match=r"12288.*8192"):
        spec.get_worker(kv_caches(pages=(PAGE, PAGE, PAGE)))


def test_ranks_that_disagree_about_a_chunk_are_refused(engine_id: str) -> None:
    first = make_spec(engine_id, world_size=2, rank=0).get_worker(kv_caches())
    second = make_spec(engine_id, world_size=2, rank=1, bytes_per_block=PAGE, chunks=9)
    with pytest.raises(kvstrata.ConfigError, match="disagree"):
        second.get_worker(kv_caches(pages=(PAGE,)))
    first.shutdown()


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        ({"canonical_layout": True, "world_size": 2, "chunks": 1}, "canonical_layout"),
        ({"parallel": {"pp_size": 2}}, "pipeline"),
        ({"extra": {"cpu_bytes_to_use": 100}}, "cpu_bytes_to_use"),
    ],
)
def test_what_is_not_certified_is_refused_at_start(
    engine_id: str, config: dict[str, Any], setting: str
) -> None:
    with pytest.raises(kvstrata.ConfigError, match=setting):
        make_spec(engine_id, **config)


def test_replicated_pages_stored_by_one_rank_alone_are_loaded_by_two_and_the_other_way_round(
    engine_id: str,
) -> None:
    """One copy in a slot, whatever the number of ranks: the row of TP=1 is the row of TP=2."""
    caches = kv_caches(seed=5)
    alone = make_spec(f"{engine_id}-1")
    pair = [
        make_spec(f"{engine_id}-2", world_size=2, rank=rank, replicated_layout=True, chunks=16)
        for rank in range(2)
    ]
    assert {spec.kv_bytes_per_chunk for spec in [alone, *pair]} == {2 * PAGE}
    one: Any = alone.get_worker(caches)
    two: list[Any] = [spec.get_worker(kv_caches(seed=5)) for spec in pair]
    slots = CPULoadStoreSpec([3])
    one.submit_store(1, blocks([4]), slots)
    two[0].submit_store(1, blocks([4]), slots)
    rows = [w._region.base_tensor.view(-1, 2 * PAGE)[3] for w in (one, two[0], two[1])]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[1], rows[2]), "both ranks see the one copy"
    expected = [item.tensor[4].clone() for item in caches.tensors]
    rows[1].copy_(rows[0].clone())
    for worker in two:
        assert worker.submit_load(2, slots, blocks([9]))
    rows[0].copy_(rows[2].clone())
    one.submit_load(2, slots, blocks([9]))
    for worker in (one, *two):
        for tensor, page in zip(worker._transfers._blocks, expected, strict=True):
            assert torch.equal(tensor[9], page)
        worker.shutdown()
