"""Rows in vLLM's canonical layout: stored by any number of ranks, loaded by any other.

Ranks are doubles in one process: real tensors, vLLM's own registration and mappings, our workers,
vLLM's shared region and the real tier.
"""

from __future__ import annotations

import dataclasses
import uuid
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from plugin_support.configs import offloading_config
from plugin_support.models import make_model, vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.worker.utils import allocate_kv_cache

import kvstrata
from kvstrata.memory.layout import LayoutError, PageRun
from kvstrata.vllm import bytemap, canonical, facts, handshake, manifest
from kvstrata.vllm.handshake import WorkerFacts
from kvstrata.vllm.spec import KVStrataSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built"
)

BLOCKS, TOKENS, VALUES = 12, 16, 32
LAYERS = {"full": ["l.0", "l.1"], "window": ["l.2"]}
KEYS = [bytes([number]) * 32 + bytes(4) for number in range(4)]


@dataclasses.dataclass(frozen=True)
class Model:
    """What a checkpoint fixes, whatever the number of ranks."""

    heads: int = 4
    layout: str = "LBHNC"
    is_latent: bool = False
    halves: bool = False
    window: bool = False
    blocks_per_chunk: int = 1

    def spec(self, tp: int, *, window: bool = False) -> Any:
        common: dict[str, Any] = {
            "block_size": TOKENS,
            "num_kv_heads": 1 if self.is_latent else max(1, self.heads // tp),
            "head_size": VALUES,
            "dtype": torch.bfloat16,
        }
        if self.is_latent:
            return MLAAttentionSpec(**common)
        return (
            SlidingWindowSpec(**common, sliding_window=64)
            if window
            else FullAttentionSpec(**common)
        )

    def config(self, tp: int) -> KVCacheConfig:
        groups = [KVCacheGroupSpec(LAYERS["full"], self.spec(tp))]
        if self.window:
            groups.append(KVCacheGroupSpec(LAYERS["window"], self.spec(tp, window=True)))
        page = self.spec(tp).page_size_bytes
        tensors = [
            KVCacheTensor(
                size=len(LAYERS["full"]) * page * BLOCKS,
                layers=list(group.layer_names),
                layer_stride=page * BLOCKS,
                block_stride=page,
            )
            for group in groups
        ]
        return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=groups)

    def shape(self) -> tuple[int, ...]:
        """A layer's tensor for all heads, by meaning: blocks, (halves,) heads, tokens, values."""
        if self.is_latent:
            return (BLOCKS, 1, TOKENS, VALUES)
        return (
            (BLOCKS, 2, TOKENS, self.heads, VALUES)
            if self.halves
            else (BLOCKS, self.heads, TOKENS, 2 * VALUES)
        )

    def share(self, whole: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
        """The part of a layer's tensor that a rank holds."""
        if self.is_latent:
            return whole
        local, copies = max(1, self.heads // tp), max(1, tp // self.heads)
        first = rank // copies * local
        return whole.narrow(3 if self.halves else 1, first, local)


class Engine:
    """All ranks of one engine, and its tier."""

    def __init__(self, model: Model, tp: int, root: Path, model_dir: Path) -> None:
        self.model, self.tp, self.is_closed = model, tp, False
        self.caches: list[dict[str, torch.Tensor]] = []
        self.workers: list[Any] = []
        told = {}
        name = f"kvstrata-test-{uuid.uuid4().hex}"
        for rank in range(tp):
            spec, config, of_vllm = self._rank(name, rank, model_dir)
            caches = self._allocate(config)
            made = OffloadingConnectorWorker(spec, of_vllm, config)
            made.register_kv_caches(caches)
            worker: Any = made.worker
            selected = list(range(len(config.kv_cache_groups)))
            byte_map = bytemap.describe(
                caches, config, selected, worker.layout, worker.addresses, rank=rank
            )
            told[(0, rank)] = WorkerFacts.of(rank, byte_map)
            self.caches.append(caches)
            self.workers.append(worker)
        self.byte_map = handshake.agreed(told, tp)
        sizes = canonical.bytes_per_block(config, selected, 1 if model.is_latent else model.heads)
        handshake.check_sides(self.byte_map, sizes)
        gathered = facts.gather(of_vllm, config)
        spec.extra_config[facts.KEY] = gathered
        self.fields = manifest.build(spec, None, self.byte_map)
        self.slot_bytes = spec.kv_bytes_per_chunk
        self.row_bytes = manifest.row_bytes(self.byte_map, self.slot_bytes)
        self.arena = memoryview(self.workers[0]._region.base_tensor.numpy()).cast("B")
        self.tier = kvstrata.open_tier(
            root,
            manifest=self.fields,
            row_bytes=dict.fromkeys(selected, self.row_bytes),
            arena=self.arena,
            capacity="64MiB",
            min_free=0,
        )

    def _rank(self, name: str, rank: int, model_dir: Path) -> tuple[KVStrataSpec, Any, Any]:
        model, tp = self.model, self.tp
        config = model.config(tp)
        of_vllm = vllm_config(model_dir)
        parallel = of_vllm.parallel_config
        parallel.rank, parallel.world_size, parallel.tensor_parallel_size = rank, tp, tp
        parallel.prefill_context_parallel_size = parallel.decode_context_parallel_size = 1
        of_vllm.model_config.get_total_num_kv_heads = lambda: model.heads
        page = model.spec(tp).page_size_bytes
        made = offloading_config(
            name,
            [],
            group_ids=tuple(range(len(config.kv_cache_groups))),
            bytes_per_block=len(LAYERS["full"]) * page,
            blocks_per_chunk=model.blocks_per_chunk,
            world_size=tp,
            rank=rank,
            chunks=8,
            canonical_layout=True,
            # As vLLM's configuration says of latent pages in this layout.
            replicated_layout=model.is_latent,
            kv_cache_layout=model.layout,
            parallel={"is_parallelism_agnostic": True},
        )
        return KVStrataSpec(made), config, of_vllm

    def _allocate(self, config: KVCacheConfig) -> dict[str, torch.Tensor]:
        if self.model.halves:
            whole = torch.empty(self.model.shape(), dtype=torch.bfloat16)
            shape = self.model.share(whole, self.tp, 0).shape
            return {layer: torch.zeros(shape, dtype=torch.bfloat16) for layer in LAYERS["full"]}
        return allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[self.model.layout])

    def fill(self, values: dict[str, torch.Tensor]) -> None:
        """Put each rank's heads of these tensors of all heads into its own."""
        for rank, caches in enumerate(self.caches):
            for layer in LAYERS["full"]:  # the window's layer overlays the first
                caches[layer].copy_(self.model.share(values[layer], self.tp, rank))

    def holds(self, values: dict[str, torch.Tensor], ours: list[int], theirs: list[int]) -> bool:
        """Whether blocks `ours` of every rank are its heads of blocks `theirs`, bit for bit."""
        return all(
            torch.equal(
                caches[layer][ours].view(torch.int16),
                self.model.share(values[layer], self.tp, rank)[theirs].view(torch.int16),
            )
            for rank, caches in enumerate(self.caches)
            for layer in LAYERS["full"]
        )

    def copy(self, what: str, blocks: list[int], chunks: list[int]) -> None:
        """Between blocks of the first group and chunks, on every rank."""
        groups = len(self.byte_map["groups"])
        of_gpu = GPULoadStoreSpec(blocks, [len(blocks)] + [0] * (groups - 1), [0] * groups)
        for worker in self.workers:
            if what == "store":
                assert worker.submit_store(1, of_gpu, CPULoadStoreSpec(chunks))
            else:
                assert worker.submit_load(1, CPULoadStoreSpec(chunks), of_gpu)
            assert [result.job_id for result in worker.get_finished()] == [1]

    def persist(self, what: str, chunks: list[int]) -> list[str]:
        """Between chunks and the tier."""
        offsets = [chunk * self.slot_bytes for chunk in chunks]
        submit = self.tier.store if what == "store" else self.tier.load
        submit(1, KEYS[: len(chunks)], offsets)
        (result,) = self.tier.wait(20)
        return list(result.outcomes)

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.tier.close(10)
        self.arena.release()
        for worker in self.workers:
            worker.shutdown()


@pytest.fixture
def engines(root: Path, tmp_path: Path) -> Iterator[Any]:
    """Makes engines on one root, and closes them."""
    made: list[Engine] = []
    model_dir = make_model(tmp_path / "m")

    def make(model: Model, tp: int) -> Engine:
        made.append(Engine(model, tp, root, model_dir))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def random_values(model: Model, seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        layer: torch.randint(
            -(2**15), 2**15, model.shape(), dtype=torch.int16, generator=generator
        ).view(torch.bfloat16)
        for layer in LAYERS["full"]
    }


SHARED = {
    "heads first": Model(),
    "tokens first": Model(layout="LBNHC"),
    "keys and values apart": Model(layout="LBNHC", halves=True),
    "several blocks in a chunk": Model(blocks_per_chunk=2),
    "two groups in one tensor": Model(window=True),
    "fewer heads than ranks": Model(heads=2),
    "one copy of latent pages": Model(is_latent=True),
}


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (4, 2), (1, 4)])
@pytest.mark.parametrize("name", SHARED)
def test_rows_stored_under_one_number_of_ranks_are_loaded_under_another_bit_for_bit(
    name: str, first: int, second: int, engines: Any
) -> None:
    model = SHARED[name]
    values = random_values(model)
    writer = engines(model, first)
    writer.fill(values)
    per_chunk = model.blocks_per_chunk
    count = len(KEYS) * per_chunk
    stored, loaded = list(range(2, 2 + count)), list(range(BLOCKS - count, BLOCKS))
    writer.copy("store", stored, [1, 2, 5, 7])
    assert writer.persist("store", [1, 2, 5, 7]) == ["ok"] * len(KEYS)
    identity = writer.fields
    writer.close()
    reader = engines(model, second)
    assert reader.fields == identity
    assert reader.row_bytes == writer.row_bytes
    reader.fill(random_values(model, seed=4))
    assert reader.tier.lookup(KEYS) == [True] * len(KEYS)
    assert reader.persist("load", [0, 4, 3, 6]) == ["ok"] * len(KEYS)
    reader.copy("load", loaded, [0, 4, 3, 6])
    assert reader.holds(values, loaded, stored)


def test_a_row_has_the_size_of_the_models_pages_under_any_number_of_ranks(engines: Any) -> None:
    for model, pages in ((Model(), 2 * 4), (Model(heads=2), 2 * 2), (Model(is_latent=True), 1)):
        wanted = 2 * pages * TOKENS * VALUES * 2
        for tp in (1, 2, 4):
            engine = engines(model, tp)
            assert engine.row_bytes == -(-wanted // 4096) * 4096
            assert engine.byte_map["groups"][0]["bytes_per_block"] == wanted
            engine.close()


def test_another_order_of_a_canonical_page_is_another_namespace(engines: Any) -> None:
    names = ["heads first", "tokens first", "keys and values apart"]
    maps = []
    for name in names:
        engine = engines(SHARED[name], 2)
        maps.append(engine.byte_map["groups"][0]["pages"])
        engine.close()
    head, token, half = TOKENS * 2 * VALUES * 2, 2 * VALUES * 2, TOKENS * 4 * VALUES * 2
    assert maps[0] == [
        {"dtype": "bfloat16", "shape": [4, TOKENS, 2 * VALUES], "strides": [head, token, 2]}
    ]
    assert maps[1] == [
        {"dtype": "bfloat16", "shape": [4, TOKENS, 2 * VALUES], "strides": [token, 4 * token, 2]}
    ]
    assert maps[2] == [
        {
            "dtype": "bfloat16",
            "shape": [2, TOKENS, 4, VALUES],
            "strides": [half, 4 * VALUES * 2, VALUES * 2, 2],
        }
    ]


def test_ranks_that_hold_the_same_bytes_take_turns_in_storing_them(engines: Any) -> None:
    model = Model(is_latent=True)
    engine = engines(model, 2)
    engine.fill(random_values(model))
    of_gpu = GPULoadStoreSpec([3, 4], [2], [0])
    engine.arena[:] = bytes(len(engine.arena))
    rows = np.frombuffer(engine.arena, np.uint8).reshape(-1, engine.slot_bytes)
    engine.workers[0].submit_store(1, of_gpu, CPULoadStoreSpec([2, 5]))
    assert rows[2].any()
    assert not rows[5].any()
    engine.workers[1].submit_store(1, of_gpu, CPULoadStoreSpec([2, 5]))
    assert rows[5].any()
    del rows


def test_what_no_page_covers_is_zeroed_by_every_rank_alike(engines: Any) -> None:
    model = Model(window=True, heads=2)
    engine = engines(model, 4)
    engine.fill(random_values(model))
    engine.arena[:] = b"\x5a" * len(engine.arena)
    of_gpu = GPULoadStoreSpec([3], [0, 1], [0, 0])
    for worker in engine.workers:
        worker.submit_store(1, of_gpu, CPULoadStoreSpec([2]))
    start = 2 * engine.slot_bytes
    row = bytes(engine.arena[start : start + engine.row_bytes])
    page = engine.byte_map["groups"][1]["bytes_per_block"]
    assert b"\x5a" * 16 not in row
    assert row[page:] == bytes(engine.row_bytes - page)


@pytest.fixture
def seen(engines: Any) -> tuple[torch.Tensor, Any]:
    """A tensor of rank 1 of 2, and its reference."""
    engine = engines(Model(), 2)
    return engine.caches[1]["l.0"], engine.workers[1].layout.groups[0][0]


def test_a_mapping_that_puts_heads_elsewhere_is_refused(seen: tuple[torch.Tensor, Any]) -> None:
    tensor, ref = seen
    assert canonical.describe(tensor, BLOCKS, ref, 1)["shape"] == [4, TOKENS, 2 * VALUES]
    with pytest.raises(LayoutError, match=r"rank 0, .* does not go where its heads belong"):
        canonical.describe(tensor, BLOCKS, ref, 0)
    (run,) = ref.share.runs
    half = run.size // 2
    swapped = (
        PageRun(0, run.slot_offset + half, half),
        PageRun(half, run.slot_offset, half),
    )
    wrong = dataclasses.replace(ref, share=dataclasses.replace(ref.share, runs=swapped))
    with pytest.raises(LayoutError, match="heads belong"):
        canonical.describe(tensor, BLOCKS, wrong, 1)
    short = (PageRun(0, run.slot_offset, half),)
    wrong = dataclasses.replace(ref, share=dataclasses.replace(ref.share, runs=short))
    with pytest.raises(LayoutError, match="go nowhere"):
        canonical.describe(tensor, BLOCKS, wrong, 1)
    turned = dataclasses.replace(ref, share=dataclasses.replace(ref.share, writer=1, writers=2))
    with pytest.raises(LayoutError, match="heads belong"):
        canonical.describe(tensor, BLOCKS, turned, 0)


def test_tokens_out_of_order_are_refused(seen: tuple[torch.Tensor, Any]) -> None:
    tensor, ref = seen
    token = 2 * VALUES * 2
    (run,) = ref.share.runs
    pieces = [PageRun(at, run.slot_offset + at, token) for at in range(0, run.size, token)]
    pieces[3], pieces[4] = (
        dataclasses.replace(pieces[3], slot_offset=pieces[4].slot_offset),
        dataclasses.replace(pieces[4], slot_offset=pieces[3].slot_offset),
    )
    wrong = dataclasses.replace(ref, share=dataclasses.replace(ref.share, runs=tuple(pieces)))
    with pytest.raises(LayoutError, match="heads belong"):
        canonical.describe(tensor, BLOCKS, wrong, 1)


def test_pages_that_vllm_does_not_certify_are_refused_naming_group_and_setting() -> None:
    mapping = SimpleNamespace(parallelism_agnostic=False)
    ref = SimpleNamespace(tensor_idx=0, mapping=mapping)
    caches: Any = SimpleNamespace(tensors=[None], group_data_refs=[[], [ref]])
    with pytest.raises(LayoutError, match=r"group 1 .*remove canonical_layout"):
        canonical.pages(caches)
    ref.mapping = None
    with pytest.raises(LayoutError, match="group 1"):
        canonical.pages(caches)
