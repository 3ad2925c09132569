"""Runs test files of vLLM's, from an unpacked source archive, with parts of ours in them.

KVSTRATA_TEST_VLLM_SOURCES=DIRECTORY    holds 0.32.0/tests/... and 0.33.0/tests/...

Only the named files are copied, to a folder of the test's own; text of ours is put behind them.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstrata.vllm import compat

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "KVSTRATA_TEST_VLLM_SOURCES"
HERE = Path(__file__).parents[1]
# The model that vLLM's tests name; nothing of it but its configuration is read.
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "do_layer_norm_before": True,
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}


def sources() -> Path:
    """The unpacked archive of the vLLM that is imported; skips the test where there is none."""
    named = os.environ.get(VARIABLE)
    if named is None:
        pytest.skip(f"{VARIABLE} names no unpacked source archive of vLLM")
    return Path(named) / f"{compat.release_name()}.0"


def functions(source: str) -> dict[str, set[str]]:
    """Test functions of a file, methods too, with the names of their arguments."""
    return {
        node.name: {argument.arg for argument in node.args.args}
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def skips(reasons: Mapping[str, str]) -> str:
    """Text that skips tests of the file it is put behind, each with its reason."""
    return f"""

import json as _json
_reasons = _json.loads({json.dumps(json.dumps(dict(reasons)))})


def _skip(names):
    for _name, _test in list(names.items()):
        if _name in _reasons:
            yield _name, pytest.mark.skip(reason=_reasons[_name])(_test)


globals().update(dict(_skip(globals())))
for _class in [_value for _name, _value in globals().items() if _name.startswith("Test")]:
    for _name, _test in list(_skip(vars(_class))):
        setattr(_class, _name, _test)
"""


def lay_out(folder: Path, files: Mapping[str, str]) -> None:
    """Copy files of vLLM's, by their path in its archive, each with the text behind it."""
    for name, behind in files.items():
        text = (sources() / name).read_text()
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        for parent in target.relative_to(folder).parents:
            (folder / parent / "__init__.py").touch()
        target.write_text(text + behind)
    (folder / "__init__.py").unlink()
    model = folder / "facebook" / "opt-125m"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(OPT))


def cases(folder: Path, timeout: float, *arguments: str) -> list[tuple[str, bool]]:
    """Run pytest in a folder, in a process of its own; the cases, and whether each was skipped."""
    path = [str(folder), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    report = folder / "report.xml"
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="),
            *(f"--rootdir={folder}", f"--junit-xml={report}", *arguments),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    return [
        (case.get("name", ""), case.find("skipped") is not None)
        for case in ET.parse(report).iter("testcase")  # noqa: S314 -- pytest wrote it just now
    ]


def run(folder: Path, name: str, timeout: float) -> tuple[set[str], set[str], Counter[str]]:
    """Run one file; functions that ran, those that were skipped, and how many cases of each."""
    passed, skipped = set(), set()
    counts: Counter[str] = Counter()
    for case, was_skipped in cases(folder, timeout, "--tb=short", str(folder / name)):
        function = re.split(r"[\[ ]", case)[0]
        (skipped if was_skipped else passed).add(function)
        counts["skipped" if was_skipped else "passed"] += 1
    return passed, skipped, counts
