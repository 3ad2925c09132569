"""Loads that a reset overtook end as failed, on every rank, and hold nothing up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvstrata.vllm.connector import KVStrataConnector
from kvstrata.vllm.staleloads import StaleLoads, StepMetadata, asked_for

PLAIN = OffloadingConnectorMetadata({}, {}, {7})


def loading(**is_store: bool) -> Any:
    """A scheduler with a job per request."""
    jobs = {
        number: SimpleNamespace(req_id=name, is_store=store)
        for number, (name, store) in enumerate(is_store.items())
    }
    return SimpleNamespace(_jobs=jobs)


def received(*names: str, failed: tuple[str, ...] = ()) -> KVConnectorOutput:
    return KVConnectorOutput(finished_recving=set(names) or None, failed_recving=set(failed))


def test_the_report_of_an_overtaken_load_is_held_back_and_asked_for_as_a_failure() -> None:
    loads = StaleLoads()
    loads.at_reset(loading(a=False, b=True))
    assert not loads.is_pending
    assert loads.metadata(PLAIN) is PLAIN
    output = received("a", "b", "c")
    loads.hold_back(output)
    assert output.finished_recving == {"b", "c"}
    assert loads.is_pending
    made = loads.metadata(PLAIN)
    assert isinstance(made, StepMetadata)
    assert (made.jobs_to_flush, made.report_failed) == ({7}, frozenset({"a"}))
    assert loads.metadata(PLAIN) is PLAIN, "asked for once"
    assert loads.is_pending, "an idle engine would not bring the report"
    again = received("a", failed=("a",))
    loads.hold_back(again)
    assert again.finished_recving == {"a"}
    assert not loads.is_pending
    later = received("a")
    loads.hold_back(later)
    assert later.finished_recving == {"a"}, "a load after the reset is none of its business"


def test_a_load_that_failed_by_itself_is_not_held_back() -> None:
    loads = StaleLoads()
    loads.at_reset(loading(a=False))
    output = received("a", failed=("a",))
    loads.hold_back(output)
    assert output.finished_recving == {"a"}
    assert not loads.is_pending


def test_a_request_that_ended_meanwhile_gets_its_blocks_freed() -> None:
    loads = StaleLoads()
    loads.at_reset(loading(a=False))
    loads.request_finished("a")
    output = received("a")
    loads.hold_back(output)
    assert output.finished_recving == {"a"}
    loads.at_reset(loading(b=False))
    loads.hold_back(received("b"))
    loads.request_finished("b")
    assert asked_for(loads.metadata(PLAIN)) == {"b"}, "its report was held back already"


def test_a_second_reset_changes_nothing_of_what_the_first_began() -> None:
    loads = StaleLoads()
    loads.at_reset(loading(a=False))
    loads.at_reset(loading())
    loads.hold_back(received("a"))
    loads.at_reset(loading())
    assert asked_for(loads.metadata(PLAIN)) == {"a"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_reports_it_as_received_and_failed_in_the_same_step(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OffloadingConnector, "start_load_kv", lambda *_, **__: None)
    monkeypatch.setattr(
        OffloadingConnector,
        "get_transfer_results",
        lambda *_: KVConnectorTransferResults(),
        raising=False,
    )
    outputs = []
    for _ in range(ranks):
        worker: Any = SimpleNamespace(take_failed_loads=list)
        connector: Any = object.__new__(KVStrataConnector)
        monkeypatch.setattr(KVStrataConnector, "_row_worker", worker)
        connector._failed_requests = set()
        connector._connector_metadata = StepMetadata({}, {}, None, frozenset({"a"}))
        connector.start_load_kv(None)
        results = connector.get_transfer_results(set())
        assert (results.finished_recving, results.failed_recving) == ({"a"}, {"a"})
        assert connector.get_transfer_results(set()).failed_recving == set()
        output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
        output.kv_connector_output = KVConnectorOutput(
            finished_recving=set(results.finished_recving), failed_recving={"a"}
        )
        outputs.append(output)
    merged = KVOutputAggregator(ranks).aggregate(list(outputs))
    assert merged is not None
    assert merged.kv_connector_output is not None
    assert merged.kv_connector_output.finished_recving == {"a"}
    assert merged.kv_connector_output.failed_recving == {"a"}
