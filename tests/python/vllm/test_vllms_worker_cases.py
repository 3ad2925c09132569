"""vLLM's own test_worker.py with our worker, from an unpacked source archive of the same release.

KVSTRATA_TEST_VLLM_SOURCES=DIRECTORY    holds 0.32.0/tests/... and 0.33.0/tests/...
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from plugin_support import vllms_cases
from plugin_support.retarget import NOT_APPLICABLE, retarget

if TYPE_CHECKING:
    from pathlib import Path

SUITE = "tests/v1/kv_connector/unit/offloading_connector/test_worker.py"


@pytest.mark.timeout(300)
def test_vllms_own_cases_pass_with_our_worker(tmp_path: Path) -> None:
    source = (vllms_cases.sources() / SUITE).read_text()
    (tmp_path / "test_retargeted.py").write_text(retarget(source))
    cases = dict(vllms_cases.cases(tmp_path, 280, str(tmp_path)))
    functions = set(re.findall(r"^def (test_\w+)\(", source, re.MULTILINE))
    assert {name.partition("[")[0] for name in cases} == functions
    skipped = {name for name, was_skipped in cases.items() if was_skipped}
    assert skipped == set(NOT_APPLICABLE)
