"""vLLM's own test_worker.py with our worker, from an unpacked source archive of the same release.

KVSTRATA_TEST_VLLM_SOURCES=DIRECTORY    holds 0.32.0/tests/... and 0.33.0/tests/...
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from plugin_support.retarget import NOT_APPLICABLE, retarget

from kvstrata.vllm import compat

SUITE = "tests/v1/kv_connector/unit/offloading_connector/test_worker.py"


@pytest.fixture
def source() -> str:
    sources = os.environ.get("KVSTRATA_TEST_VLLM_SOURCES")
    if sources is None:
        pytest.skip("KVSTRATA_TEST_VLLM_SOURCES names no unpacked source archive of vLLM")
    return (Path(sources) / f"{compat.release_name()}.0" / SUITE).read_text()


@pytest.mark.timeout(300)
def test_vllms_own_cases_pass_with_our_worker(source: str, tmp_path: Path) -> None:
    (tmp_path / "test_retargeted.py").write_text(retarget(source))
    here = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    report = tmp_path / "report.xml"
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="),
            *(f"--rootdir={tmp_path}", f"--junit-xml={report}", str(tmp_path)),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    cases = {
        case.get("name", ""): case.find("skipped") is None
        for case in ET.parse(report).iter("testcase")  # noqa: S314 -- pytest wrote it just now
    }
    functions = set(re.findall(r"^def (test_\w+)\(", source, re.MULTILINE))
    assert {name.partition("[")[0] for name in cases} == functions
    skipped = {name for name, ran_it in cases.items() if not ran_it}
    assert skipped == set(NOT_APPLICABLE)
