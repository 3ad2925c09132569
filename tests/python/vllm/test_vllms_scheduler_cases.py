"""vLLM's own scheduler tests with our connector, manager, row specs and worker in its harness."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from plugin_support import vllms_cases

from kvstrata.vllm import compat

if TYPE_CHECKING:
    from pathlib import Path

UNIT = "tests/v1/kv_connector/unit"
SUITE = f"{UNIT}/offloading_connector/test_scheduler.py"
NO_RUNNER = "drives vLLM's scheduler over a manager of its own making, without the harness"
MADE_UP = "has the manager report hits of rows that nobody stored"
TWICE = "has rows stored a second time while they are being stored or read"
NOT_APPLICABLE = {
    "test_abort_before_hit_uses_placeholder_then_later_hit_heals_removal": MADE_UP,
    "test_eagle_verified_prevents_double_pop": MADE_UP,
    "test_external_cache_hit_sources_reconcile_different_group_chunk_sizes": MADE_UP,
    "test_fence_at_update_state_after_alloc": MADE_UP,
    "test_full_attn_lookup_pops_one_block": MADE_UP,
    "test_loads_do_not_populate_fence_index": MADE_UP,
    "test_non_eagle_tighten_clears_eagle_verified": MADE_UP,
    "test_sw_lookup_inflates_query_max": MADE_UP,
    "test_sw_lookup_requires_extra_window_block": MADE_UP,
    "test_sw_lookup_w_plus_one_hits_returns_w_blocks": MADE_UP,
    "test_request_finished_mixed_full_attn_and_sliding_window": TWICE,
    "test_sliding_window_chunk_with_null_block_is_not_stored": TWICE,
}
# How many functions and cases pass, per release.
PASSING = {"0.32": (45, 88), "0.33": (52, 100)}


@pytest.mark.timeout(600)
def test_vllms_harness_finds_stores_loads_and_flushes_as_expected_with_our_parts(
    tmp_path: Path,
) -> None:
    known = vllms_cases.functions((vllms_cases.sources() / SUITE).read_text())
    alone = {name for name, arguments in known.items() if "request_runner" not in arguments}
    reasons = {**dict.fromkeys(alone, NO_RUNNER), **NOT_APPLICABLE}
    reasons = {name: reason for name, reason in reasons.items() if name in known}
    vllms_cases.lay_out(
        tmp_path,
        {
            f"{UNIT}/utils.py": "",
            f"{UNIT}/offloading_connector/conftest.py": "",
            f"{UNIT}/offloading_connector/test_config.py": "",
            f"{UNIT}/offloading_connector/utils.py": (
                "\nimport plugin_support.harness as _ours\n\n_ours.install(globals())\n"
            ),
            SUITE: vllms_cases.skips(reasons),
        },
    )
    passed, skipped, counts = vllms_cases.run(tmp_path, SUITE, 580)
    assert skipped == set(reasons)
    assert passed == set(known) - set(reasons)
    assert (len(passed), counts["passed"]) == PASSING[compat.release_name()]
