"""What vLLM's own file tier calls one place though the bytes differ, and we call two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from plugin_support.models import kv_cache_config, make_model
from plugin_support.namespaces import BYTE_MAP, described, set_at
from vllm.v1.kv_offload.file_mapper import FileMapper

import kvstrata

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built"
)


def page(path: str, value: Any) -> dict[str, Any]:
    return {"byte_map": set_at(BYTE_MAP, f"groups/0/{path}", value)}


# vLLM collapses the parallel sizes where it takes the bytes for the same, and for such rows of its
# direct layout they are not.
COLLAPSED = {"is_parallelism_agnostic": True}
ONE_DIRECTORY: dict[str, dict[str, Any]] = {
    "another revision": {"vllm": {"model": {"revision": "v2"}}},
    "other weights": {"extra": {"weights_id": "r2"}},
    "another rope factor": {
        "vllm": {"hf": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}}
    },
    "another activation by override": {
        "vllm": {"model": {"hf_overrides": {"activation_function": "gelu"}}}
    },
    "another quantisation": {"vllm": {"model": {"quantization": "awq"}}},
    "scales computed at run time": {"vllm": {"cache": {"calculate_kv_scales": True}}},
    "another KV layout": {"vllm": {"cache": {"kv_cache_layout": "LBNHC"}}},
    "another order of a page": page("pages/0/strides", [128, 256, 2]),
    "another backend": {"fact": ("attention/backend", "FLASH_ATTN")},
    "more heads": page("pages/0/shape", [4, 16, 32]),
    "another row": {"spec": {"bytes_per_block": 4096, "parallel": dict(COLLAPSED)}},
    "another window": {"groups": kv_cache_config(window=128)},
    "twice the ranks": {
        "spec": {"parallel": {**COLLAPSED, "world_size": 2, "tp_size": 2}},
    },
    "another hash seed": {"fact": ("hash/seed", "0" * 32)},
}
TWO_DIRECTORIES: dict[str, dict[str, Any]] = {
    "another block size": {
        "spec": {"tokens_per_hash": 32, "tokens_per_block": 32, "parallel": dict(COLLAPSED)}
    },
}


def names(model_dir: Path, **case: Any) -> tuple[str, str]:
    """Our digest, and vLLM's directory."""
    case.setdefault("spec", {"parallel": dict(COLLAPSED)})
    spec, fields = described(model_dir, **case)
    mapper = FileMapper.from_offloading_spec("/r", spec, parallel_agnostic=True)
    return kvstrata.manifest_digest(fields), mapper.base_path


@pytest.mark.parametrize("case", ONE_DIRECTORY)
def test_vllms_file_tier_names_one_directory_where_we_name_two(tmp_path: Path, case: str) -> None:
    model_dir = make_model(tmp_path / "m")
    base = names(model_dir)
    other = names(model_dir, **ONE_DIRECTORY[case])
    assert other[1] == base[1]
    assert other[0] != base[0]


@pytest.mark.parametrize("case", TWO_DIRECTORIES)
def test_where_vllms_file_tier_names_two_directories_so_do_we(tmp_path: Path, case: str) -> None:
    model_dir = make_model(tmp_path / "m")
    base = names(model_dir)
    other = names(model_dir, **TWO_DIRECTORIES[case])
    assert other[1] != base[1]
    assert other[0] != base[0]


def test_one_weight_that_changes_in_place_is_another_name_for_us_alone(tmp_path: Path) -> None:
    model_dir = make_model(tmp_path / "m")
    base = names(model_dir)
    file = model_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    changed = names(model_dir)
    assert changed[1] == base[1]
    assert changed[0] != base[0]
    half = names(model_dir, vllm={"model": {"dtype": torch.float16}})
    assert half[0] != changed[0]
