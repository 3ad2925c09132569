"""Each fact alone makes another namespace, and `kvstrata ls --diff` says which fact it was."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from plugin_support.models import kv_cache_config, make_model, vllm_config
from plugin_support.namespaces import (
    BYTE_MAP,
    HF,
    identity,
    make_namespace,
    set_at,
)

import kvstrata
from kvstrata.cli import main as entry
from kvstrata.vllm import facts, manifest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built"
)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_model(tmp_path / "my-model")


@pytest.fixture(autouse=True)
def no_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def differences(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The fields that `kvstrata ls --diff` prints."""
    capsys.readouterr()
    status = entry.main(["ls", "--diff", str(a), str(b)])
    lines = capsys.readouterr().out.splitlines()
    assert status == (1 if lines else 0)
    return [line.partition(": ")[0] for line in lines]


def in_map(path: str, value: Any) -> dict[str, Any]:
    return {"byte_map": set_at(BYTE_MAP, path, value)}


def draft(model: str) -> SimpleNamespace:
    hf_config = SimpleNamespace(_commit_hash="c1", to_dict=lambda: {"layers": 1})
    config = SimpleNamespace(
        model=model, model_weights="", hf_config=hf_config, hf_overrides={}, seed=0
    )
    return SimpleNamespace(method="eagle", draft_model_config=config)


# What a table row changes -> the one field that differs then.
FIELDS: dict[str, dict[str, Any]] = {
    "revision": {"vllm": {"model": {"revision": "v2"}}},
    "config.full.rope_scaling.factor": {
        "vllm": {"hf": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}}
    },
    "config.full.hidden_act": {"vllm": {"hf": {"hidden_act": "gelu"}}},
    "config.full.head_dim": {"vllm": {"hf": {"head_dim": 64}}},
    "config.full.layer_types.1": {
        "vllm": {"hf": {"layer_types": ["full_attention", "sliding_attention"]}}
    },
    "config.full.sliding_window": {"vllm": {"hf": {"sliding_window": 128}}},
    "config.full.quantization_config.bits": {"vllm": {"hf": {"quantization_config": {"bits": 4}}}},
    "config.list": {"fact": ("config/list", 99)},
    "overrides.rope_theta": {"vllm": {"model": {"hf_overrides": {"rope_theta": 1e6}}}},
    "dtype": {"vllm": {"model": {"dtype": torch.float16}}},
    "quantization": {"vllm": {"model": {"quantization": "awq"}}},
    "settings.code_revision": {"vllm": {"model": {"code_revision": "r2"}}},
    "settings.disable_sliding_window": {"vllm": {"model": {"disable_sliding_window": True}}},
    "settings.model_class_overrides": {"vllm": {"model": {"model_class_overrides": {"A": "m:B"}}}},
    "settings.model_impl": {"vllm": {"model": {"model_impl": "transformers"}}},
    "settings.quantization_config": {"vllm": {"model": {"quantization_config": {"ignore": ["a"]}}}},
    "weights.loading.format": {"vllm": {"load_format": "safetensors"}},
    "draft": {"vllm": {"speculative": draft("org/draft")}},
    "adapters": {"vllm": {"lora": SimpleNamespace(lora_dtype="auto")}},
    "cache.dtype": {"vllm": {"cache": {"cache_dtype": "fp8_e5m2"}}},
    "cache.calculate_kv_scales": {"vllm": {"cache": {"calculate_kv_scales": True}}},
    "cache.skip_layers": {"vllm": {"cache": {"kv_cache_dtype_skip_layers": ["0"]}}},
    "cache.mamba_cache_dtype": {"vllm": {"cache": {"mamba_cache_dtype": "float32"}}},
    "cache.mamba_ssm_cache_dtype": {"vllm": {"cache": {"mamba_ssm_cache_dtype": "float16"}}},
    "cache.layout": {"vllm": {"cache": {"kv_cache_layout": "LBNHC"}}},
    "hash.algorithm": {"vllm": {"cache": {"prefix_caching_hash_algo": "sha256_cbor"}}},
    "attention.backend": {"fact": ("attention/backend", "FLASH_ATTN")},
    "attention.platform": {"fact": ("attention/platform", "cuda")},
    "attention.device": {"fact": ("attention/device", "another")},
    "attention.per_kind.mla": {"fact": ("attention/per_kind", {"mla": "FLASHMLA"})},
    "groups.0.layers.0": {"fact": ("groups/0/layers/0", "l.9")},
    "groups.0.spec.kind": {"fact": ("groups/0/spec/kind", "MLAAttentionSpec")},
    "groups.0.spec.dtype": {"fact": ("groups/0/spec/dtype", "torch.float16")},
    "groups.0.spec.block_size": {"fact": ("groups/0/spec/block_size", 32)},
    "groups.0.spec.num_kv_heads": {"fact": ("groups/0/spec/num_kv_heads", 4)},
    "groups.0.spec.page_bytes": {"fact": ("groups/0/spec/page_bytes", 1)},
    "groups.1.spec.sliding_window": {"groups": kv_cache_config(window=128)},
    "tokens_per_hash": {"spec": {"tokens_per_hash": 32}},
    "tokens_per_block.0": {"spec": {"tokens_per_block": 32}},
    "blocks_per_chunk": {"spec": {"blocks_per_chunk": 2}},
    "bytes_per_block_and_rank": {"spec": {"bytes_per_block": 4096}},
    "canonical_layout": {"spec": {"canonical_layout": True}},
    "parallel.row": {"replicated": True},
    "parallel.world_size": {"spec": {"parallel": {"world_size": 2}}},
    "parallel.tensor": {"spec": {"parallel": {"tp_size": 2}}},
    "parallel.pipeline": {"spec": {"parallel": {"pp_size": 2}}},
    "parallel.prefill_context": {"spec": {"parallel": {"pcp_size": 2}}},
    "parallel.decode_context": {"spec": {"parallel": {"dcp_size": 2}}},
    "parallel.pipeline_split": {"fact": ("parallel/pipeline_split", [[0, 21], [21, 44]])},
    "parallel.interleave": {"fact": ("parallel/interleave", 16)},
    "byte_map.version": in_map("version", 2),
    "byte_map.order": in_map("order", "tensors, ranks"),
    "byte_map.rank_bytes": in_map("rank_bytes", 4096),
    "byte_map.groups.0.layers.0.0": in_map("groups/0/layers/0/0", 4096),
    "byte_map.groups.0.bytes.0": in_map("groups/0/bytes/0", 4096),
    "byte_map.groups.0.pages.0.dtype": in_map("groups/0/pages/0/dtype", "float16"),
    "byte_map.groups.0.pages.0.shape": in_map("groups/0/pages/0/shape", [2, 32, 32, 2]),
    "byte_map.groups.0.pages.0.strides.1": in_map("groups/0/pages/0/strides/1", 64),
    "byte_map": {"byte_map": None},
    "tenant": {"extra": {"tenant": "acme"}},
    "model_identity": {"model_identity": "mine"},
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and a root that every row of the tables shares."""
    model_dir = make_model(tmp_path_factory.mktemp("models") / "my-model")
    return model_dir, tmp_path_factory.mktemp("table")


@pytest.mark.parametrize("field", FIELDS)
def test_each_fact_alone_makes_another_namespace_and_the_difference_names_it(
    table: tuple[Path, Path], capsys: pytest.CaptureFixture[str], field: str
) -> None:
    model_dir, root = table
    base = make_namespace(root, identity(model_dir))
    other = make_namespace(root, identity(model_dir, **FIELDS[field]))
    assert other != base
    found = differences(base, other, capsys)
    if field == "byte_map":  # what nobody has seen is named by release, runner and placement
        assert found == ["byte_map", "engine.runner", "engine.version", "tensors"]
    else:
        assert found == [field]


def test_a_weight_an_id_a_seed_and_a_row_size_are_facts_too(
    model_dir: Path,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = make_namespace(root, identity(model_dir))
    larger = make_namespace(root, identity(model_dir), row_bytes=3 * 4096)
    assert differences(base, larger, capsys) == ["row_bytes.0"]
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    seeded = make_namespace(root, identity(model_dir))
    assert differences(base, seeded, capsys) == ["hash.seed"]
    monkeypatch.delenv("PYTHONHASHSEED")
    one = make_namespace(root, identity(model_dir, extra={"weights_id": "r1"}))
    two = make_namespace(root, identity(model_dir, extra={"weights_id": "r2"}))
    assert differences(one, two, capsys) == ["weights.id"]
    file = model_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    changed = make_namespace(root, identity(model_dir))
    assert differences(base, changed, capsys) == ["weights.files.model.safetensors.blake3"]
    renamed = model_dir.rename(model_dir.with_name("other-model"))
    named = make_namespace(root, identity(renamed))
    assert differences(changed, named, capsys) == ["model"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format_version", 2),
        ("checksum", "another"),
        ("endianness", "big"),
        ("facts_version", 1),
        ("engine.release", "0.1"),
        ("engine.name", "another"),
    ],
)
def test_facts_no_configuration_changes_are_part_of_the_name_as_well(
    model_dir: Path, root: Path, capsys: pytest.CaptureFixture[str], field: str, value: object
) -> None:
    base = make_namespace(root, identity(model_dir))
    fields = json.loads((base / "namespace.json").read_text())["manifest"]
    changed = set_at(fields, field.replace(".", "/"), value)
    digest = kvstrata.manifest_digest(changed)
    assert digest != kvstrata.manifest_digest(fields)
    other = root / f"my-model-{digest[:32]}"
    other.mkdir()
    (other / "namespace.json").write_text(json.dumps({"digest": digest, "manifest": changed}))
    assert differences(base, other, capsys) == [field]


NON_FIELDS: dict[str, dict[str, Any]] = {
    "where the configuration came from": {"vllm": {"hf": {"_name_or_path": "/elsewhere"}}},
    "the release of transformers": {"vllm": {"hf": {"transformers_version": "9"}}},
    "defaults of generation": {"vllm": {"hf": {"temperature": 0.2, "top_p": 0.5}}},
    "the longest length, where the rotation does not depend on it": {
        "vllm": {"model": {"max_model_len": 4096}}
    },
    "the seed, where the weights are not drawn from it": {"vllm": {"model": {"seed": 3}}},
    "the size of the CPU tier": {"spec": {"chunks": 64}},
    "the rank that asks": {"spec": {"rank": 1}},
    "events": {"spec": {"events": True}},
    "data parallelism": {"spec": {"parallel": {"data_parallel_size": 4, "data_parallel_index": 3}}},
    "other options of the connector": {"extra": {"on_reset": "cpu", "require_salt": True}},
}


@pytest.mark.parametrize("what", NON_FIELDS)
def test_what_changes_no_byte_changes_no_name(table: tuple[Path, Path], what: str) -> None:
    model_dir, root = table
    base = make_namespace(root, identity(model_dir))
    assert make_namespace(root, identity(model_dir, **NON_FIELDS[what])) == base


def test_paths_logging_and_space_change_no_name(
    model_dir: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_namespace(root, identity(model_dir))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    (model_dir / "README.md").write_text("other words")
    (tmp_path / "elsewhere").mkdir()
    moved = model_dir.rename(tmp_path / "elsewhere" / model_dir.name)
    options: dict[str, Any] = {"capacity": "9MiB", "deadline_s": 7.0, "io_backend": "threads"}
    assert make_namespace(root, identity(moved), **options) == base


def test_the_longest_length_is_a_fact_where_the_rotation_depends_on_it(model_dir: Path) -> None:
    def named(kind: str, length: int) -> str:
        hf = {"rope_scaling": {"rope_type": kind, "factor": 2.0}}
        vllm = {"hf": hf, "model": {"max_model_len": length}}
        return kvstrata.manifest_digest(identity(model_dir, vllm=vllm))

    assert named("longrope", 2048) != named("longrope", 4096)
    assert named("llama3", 2048) == named("llama3", 4096)


@pytest.mark.parametrize(
    ("scheduler", "worker"), [("fp8", "fp8_ds_mla"), ("fp8", "fp8_e4m3"), ("auto", "bfloat16")]
)
def test_what_a_worker_rewrites_in_its_own_process_does_not_split_a_namespace(
    model_dir: Path, scheduler: str, worker: str
) -> None:
    """In one process the scheduler sees the rewritten name, in two it does not."""
    one, two = (
        identity(model_dir, vllm={"cache": {"cache_dtype": name}}) for name in (scheduler, worker)
    )
    assert one == two


def test_an_automatic_cache_type_is_the_models(model_dir: Path) -> None:
    types = {
        json.dumps(
            identity(
                model_dir,
                vllm={"cache": {"cache_dtype": "auto"}, "model": {"dtype": dtype}},
            )["cache"]["dtype"]
        )
        for dtype in (torch.float16, torch.bfloat16)
    }
    assert types == {'"float16"', '"bfloat16"'}


def test_an_unproved_namespace_carries_release_runner_and_placement(model_dir: Path) -> None:
    fields = identity(model_dir, byte_map=None)
    gathered = facts.gather(vllm_config(model_dir), kv_cache_config())
    assert fields["byte_map"] == manifest.UNPROVED
    assert fields["engine"]["version"] == gathered["build"]["version"]
    assert fields["engine"]["runner"] == "v1"
    assert fields["attention"]["platform"] == gathered["attention"]["platform"]
    assert fields["cache"]["layout"] == "LBHNC"


def test_a_long_part_of_the_configuration_stands_as_its_digest(model_dir: Path) -> None:
    names = [f"model.layers.{index}.mlp.down_proj" for index in range(4000)]
    long = {"vllm": {"hf": {"quantization_config": {"ignore": names}}}}
    longer = {"vllm": {"hf": {"quantization_config": {"ignore": [*names, "lm_head"]}}}}
    one, two = identity(model_dir, **long), identity(model_dir, **longer)
    assert set(one["config"]["full"]["quantization_config"]) == {"sha256"}
    assert one["config"] != two["config"]
    assert len(json.dumps(one)) < 64 << 10


@pytest.mark.parametrize("tenant", ["", " ", 7, ["a"]])
def test_a_tenant_is_a_text(model_dir: Path, tenant: object) -> None:
    with pytest.raises(kvstrata.ConfigError, match="tenant"):
        identity(model_dir, extra={"tenant": tenant})


def test_the_manifest_has_no_secret_and_no_path(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "271828182")
    text = json.dumps(identity(model_dir, vllm={"hf": {"_name_or_path": str(model_dir)}}))
    assert "271828182" not in text
    assert str(model_dir) not in text
    assert os.uname().nodename not in text


def test_one_row_alike_in_every_way_but_tensor_parallelism_is_shared_only_for_replicated_pages(
    model_dir: Path,
) -> None:
    latent = ("parallel/replicated_pages", True)
    two = {"spec": {"parallel": {"world_size": 2, "tp_size": 2}}}
    assert identity(model_dir, fact=latent) == identity(
        model_dir, fact=latent, replicated=True, **two
    )
    assert identity(model_dir, fact=latent) != identity(model_dir, fact=latent, **two)
    assert identity(model_dir) != identity(model_dir, replicated=True, **two)
    unproved = {"fact": latent, "byte_map": None}
    assert identity(model_dir, **unproved) != identity(
        model_dir, replicated=True, **unproved, **two
    )


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_rows_of_all_ranks_have_a_name_per_number_of_ranks(model_dir: Path, tensor: int) -> None:
    fields = identity(model_dir, spec={"parallel": {"world_size": tensor, "tp_size": tensor}})
    assert fields["parallel"]["portable"] is False
    assert fields["parallel"]["tensor"] == tensor


def test_the_base_of_the_table_is_what_it_says() -> None:
    assert HF["hidden_act"] == "silu"
    assert len(FIELDS) + len(NON_FIELDS) >= 60
