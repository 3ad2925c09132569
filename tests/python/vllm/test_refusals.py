"""What a worker refused reaches the manager before the job counts as done, from every rank."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
from plugin_support.rows import PAGE, Rank, gpu, row_spec
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvstrata.memory.arena import Arena
from kvstrata.memory.layout import PageRef
from kvstrata.vllm.connector import KVStrataConnector
from kvstrata.vllm.refusals import RowReports

if TYPE_CHECKING:
    from collections.abc import Iterator

ONE = ((PageRef(0, PAGE),),)
GOOD = TransferJob("good", gpu([3], [1], [0]), row_spec([0], [0], [0]))
HOLE = TransferJob("hole", gpu([3, 4], [2], [0]), row_spec([0], [0], [0]))


class Engine:
    """Connectors as vLLM's workers hold them, one per rank, driven step by step."""

    def __init__(self, arena: Arena, ranks: int = 1) -> None:
        self.connectors: list[Any] = []
        self.workers: list[Any] = []
        for _ in range(ranks):
            spec = MagicMock(spec=OffloadingSpec)
            spec.replicated_layout = False
            spec.config = MagicMock(canonical_layout=False)
            made = OffloadingConnectorWorker(
                spec, MagicMock(), KVCacheConfig(0, kv_cache_tensors=[], kv_cache_groups=[])
            )
            made.worker = Rank(arena, ONE).worker
            connector: Any = object.__new__(KVStrataConnector)
            connector.connector_worker, connector.connector_scheduler = made, None
            connector._connector_metadata, connector._failed_requests = None, set()
            self.connectors.append(connector)
            self.workers.append(made.worker)

    def step(
        self,
        *,
        loads: dict[int, TransferJob] | None = None,
        stores: dict[int, TransferJob] | None = None,
    ) -> KVConnectorOutput:
        outputs = []
        for connector in self.connectors:
            metadata = OffloadingConnectorMetadata(
                load_jobs=dict(loads or {}), store_jobs=dict(stores or {})
            )
            connector.handle_preemptions(metadata)
            connector.bind_connector_metadata(metadata)
            connector.start_load_kv(None)
            connector.wait_for_save()
            results = connector.get_transfer_results(set())
            told = KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                kv_connector_worker_meta=connector.build_connector_worker_meta(),
            )
            outputs.append(
                ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=told)
            )
        merged = KVOutputAggregator(len(outputs)).aggregate(outputs)
        assert merged is not None
        assert merged.kv_connector_output is not None
        return merged.kv_connector_output


@pytest.fixture
def arena(engine_id: str) -> Iterator[Arena]:
    with contextlib.closing(Arena.create(1 << 12, engine_id)) as made:
        yield made


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_that_does_not_fit_ends_as_received_and_failed(arena: Arena, ranks: int) -> None:
    engine = Engine(arena, ranks)
    bad = TransferJob("hole", HOLE.dst_spec, HOLE.src_spec)
    good = TransferJob("good", GOOD.dst_spec, GOOD.src_spec)
    told = engine.step(loads={1: bad, 2: good})
    assert told.finished_recving == {"hole", "good"}
    assert told.failed_recving == {"hole"}
    meta = told.kv_connector_worker_meta
    assert isinstance(meta, RowReports)
    assert meta.completed_jobs == {1: ranks, 2: ranks}
    assert meta.refused == set(HOLE.dst_spec.keys)
    told = engine.step(loads={3: TransferJob("hole", GOOD.dst_spec, GOOD.src_spec)})
    assert told.finished_recving == {"hole"}
    assert not told.failed_recving, "an old failure was told again"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_refused_store_is_told_with_its_acknowledgement(arena: Arena, ranks: int) -> None:
    engine = Engine(arena, ranks)
    told = engine.step(stores={1: HOLE, 2: GOOD})
    assert told.kv_connector_worker_meta is None, "vLLM submits stores a step later"
    told = engine.step()
    meta = told.kv_connector_worker_meta
    assert isinstance(meta, RowReports)
    assert meta.completed_jobs == {1: ranks, 2: ranks}
    assert meta.refused == set(HOLE.dst_spec.keys)
    assert engine.step().kv_connector_worker_meta is None


def test_one_rank_is_enough_to_refuse_a_row(arena: Arena) -> None:
    engine = Engine(arena, 3)
    engine.workers[1]._refused.add(b"k")
    meta = engine.step().kv_connector_worker_meta
    assert isinstance(meta, RowReports)
    assert meta.refused == {b"k"}
    assert meta.completed_jobs == {}


def test_reports_are_merged_with_plain_ones_whichever_comes_first() -> None:
    plain, ours = (
        OffloadingWorkerMetadata({1: 1}),
        RowReports({1: 1, 2: 1}, refused=frozenset({b"k"})),
    )
    merged = ours.aggregate(plain)
    assert merged.completed_jobs == {1: 2, 2: 1}
    assert merged.refused == {b"k"}
    other = RowReports({2: 1}, refused=frozenset({b"l"}))
    assert ours.aggregate(other).refused == {b"k", b"l"}


def test_the_manager_hears_of_refused_rows_before_their_job_completes() -> None:
    heard: list[Any] = []
    manager = SimpleNamespace(rows_refused=lambda keys: heard.append(("refused", keys)))
    connector: Any = object.__new__(KVStrataConnector)
    connector.connector_scheduler = SimpleNamespace(
        manager=manager, update_connector_output=lambda told: heard.append(("completed", told))
    )
    told = KVConnectorOutput(kv_connector_worker_meta=RowReports({1: 1}, refused=frozenset({b"k"})))
    connector.update_connector_output(told)
    assert heard == [("refused", {b"k"}), ("completed", told)]
    heard.clear()
    plain = KVConnectorOutput(kv_connector_worker_meta=RowReports({1: 1}))
    connector.update_connector_output(plain)
    assert heard == [("completed", plain)]


def test_a_worker_of_vllms_tells_what_it_always_told() -> None:
    connector: Any = object.__new__(KVStrataConnector)
    told = OffloadingWorkerMetadata({1: 1})
    connector.connector_worker = SimpleNamespace(
        worker=object(), build_connector_worker_meta=lambda: told
    )
    assert connector.build_connector_worker_meta() is told
