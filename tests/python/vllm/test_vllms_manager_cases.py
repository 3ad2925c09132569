"""vLLM's own tests of its CPU manager with ours behind an adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from plugin_support import vllms_cases

from kvstrata.vllm import compat

if TYPE_CHECKING:
    from pathlib import Path

SUITE = "tests/v1/kv_offload/cpu/test_manager.py"
PARTS = "looks into attributes of vLLM's manager or policy"
ARC = "is about the lists of vLLM's ARC object"
METRIC = "names metrics of vLLM's manager; ours has its own"
TOUCH = "orders rows by `touch`, which vLLM's scheduler has not called since 0.31"
COUNTS = "looks into how vLLM's manager counts requests for `store_threshold`"
# How many functions and cases pass, per release.
PASSING = {"0.32": (8, 10), "0.33": (16, 25)}
NOT_APPLICABLE = {
    "test_adaptive_target": ARC,
    "test_already_stored_chunk_not_evicted_during_prepare_store": TOUCH,
    "test_arc_counts_reuse_once_and_keeps_insertions_in_t1": ARC,
    "test_arc_ghost_hit_adapts_once_per_request_before_insertion": ARC,
    "test_arc_pending_chunk_is_not_a_frequency_hit": ARC,
    "test_arc_reuse_wins_if_same_request_later_reinserts_key": ARC,
    "test_basic": ARC,
    "test_batch_eviction_failure_is_atomic": ARC,
    "test_batch_eviction_falls_back_after_t1_iterator_exhausted": ARC,
    "test_batch_eviction_scans_t1_and_t2_once": ARC,
    "test_cpu_manager": TOUCH,
    "test_cpu_manager_clears_write_usage_after_failed_store": METRIC,
    "test_cpu_manager_reports_allocation_size_histogram": METRIC,
    "test_cpu_manager_reports_allocation_size_on_allocation_failure": METRIC,
    "test_cpu_manager_reports_allocation_size_on_eviction_failure": METRIC,
    "test_cpu_manager_reports_cache_usage_gauge": METRIC,
    "test_cpu_manager_reports_cache_write_and_read_usage_gauges": METRIC,
    "test_eviction_with_load": ARC,
    "test_evictable_cache_chunk_count": PARTS,
    "test_failed_store": ARC,
    "test_failed_store_records_access_once_and_uses_store_miss_hook": PARTS,
    "test_filter_reused_manager": COUNTS,
    "test_filter_reused_manager_reports_stores_skipped_counter": METRIC,
    "test_full_scenario": ARC,
    "test_ghost_list_bounds": ARC,
    "test_lru_batch_eviction_failure_is_atomic": PARTS,
    "test_lru_incremental_stores_do_not_rescan_the_prefix": PARTS,
    "test_lru_repeated_pin_cycles_compact_lazy_heap_entries": PARTS,
    "test_request_finish_forwards_grouped_deduplicated_accesses": PARTS,
    "test_reset_discards_stale_request_access_classification": ARC,
    "test_store_falls_back_to_t1_when_t2_cannot_satisfy_eviction": ARC,
    "test_store_threshold_does_not_hide_ready_reuse": COUNTS,
    "test_t1_t2_eviction_policy": ARC,
    "test_t1_to_t2_promotion": ARC,
    "test_take_events_prunes_retried_cleanup_and_drains_once": (
        "expects an event that takes back what was announced of a store that failed"
    ),
    "test_touch_forwards_req_context_to_policy": PARTS,
    "test_touch_ordering": ARC,
}


@pytest.mark.timeout(300)
def test_our_manager_does_what_vllms_tests_ask_of_its_cpu_manager(tmp_path: Path) -> None:
    known = set(vllms_cases.functions((vllms_cases.sources() / SUITE).read_text()))
    reasons = {name: reason for name, reason in NOT_APPLICABLE.items() if name in known}
    names = "make_cpu_manager, make_offload_key, to_key"
    vllms_cases.lay_out(
        tmp_path,
        {
            SUITE: (
                f"\nfrom plugin_support.cpu_manager_adapter import {names}\n"
                + vllms_cases.skips(reasons)
            )
        },
    )
    passed, skipped, counts = vllms_cases.run(tmp_path, SUITE, 280)
    assert skipped == set(reasons)
    assert passed == known - set(reasons)
    assert (len(passed), counts["passed"]) == PASSING[compat.release_name()]
