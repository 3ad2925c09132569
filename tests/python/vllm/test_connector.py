"""The connector: its spec, its facts, what it refuses; and the documented configurations."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import vllm
from plugin_support.configs import disk_entry, offloading_config
from plugin_support.models import kv_cache_config, make_model, vllm_config
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvstrata
from kvstrata.vllm import (
    connector,
    exact,
    facts,
    manifest,
    modelconfig,
    packed,
    stackconfig,
    startup,
)
from kvstrata.vllm.spec import KVStrataSpec
from kvstrata.vllm.tiers import KVStrataDiskTier, KVStrataObjectTier

if TYPE_CHECKING:
    from plugin_support.stand_in import Opener

TOP = Path(__file__).parents[3]
DOCUMENTED = {
    f"{page}: {way}": text
    for page in ("README.md", "docs/VLLM.md")
    for way, text in re.findall(
        r"<!-- kv-transfer-config: (\S+) -->\n```json\n(.*?)```",
        (TOP / page).read_text(),
        re.DOTALL,
    )
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_model(tmp_path / "my-model")


def test_a_spec_name_that_is_given_is_kept(model_dir: Path) -> None:
    config = vllm_config(model_dir, extra={"spec_name": "TieringOffloadingSpec"})
    assert startup.choose_spec(config) == {"spec_name": "TieringOffloadingSpec"}


def test_without_one_our_spec_is_set_in_the_configuration_vllm_reads(model_dir: Path) -> None:
    config = vllm_config(model_dir)
    startup.choose_spec(config)
    extra = config.kv_transfer_config.kv_connector_extra_config
    assert OffloadingSpecFactory.get_spec_cls(extra) is KVStrataSpec


def test_the_metrics_declared_are_those_of_the_spec_that_runs(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        OffloadingConnector,
        "build_prom_metrics",
        classmethod(
            lambda _cls, config, *_: seen.append(
                config.kv_transfer_config.kv_connector_extra_config["spec_name"]
            )
        ),
    )
    connector.KVStrataConnector.build_prom_metrics(vllm_config(model_dir), {}, [], {})
    assert seen == ["KVStrataSpec"]


def test_an_engine_over_several_nodes_is_refused(model_dir: Path) -> None:
    with pytest.raises(kvstrata.ConfigError, match="2 nodes"):
        connector.KVStrataConnector(
            vllm_config(model_dir, nodes=2), connector.KVConnectorRole.WORKER, kv_cache_config()
        )


def test_a_misspelt_option_beside_the_tiers_fails_the_start(model_dir: Path) -> None:
    config = vllm_config(model_dir, extra={"require_slat": True})
    with pytest.raises(kvstrata.ConfigError, match=r"require_slat.*require_salt"):
        connector.KVStrataConnector(config, connector.KVConnectorRole.WORKER, kv_cache_config())


@pytest.mark.parametrize("extra", [{"blocks_per_chunk": 2}, {"block_size": 64}])
def test_several_blocks_per_chunk_are_refused_where_a_group_has_a_window(
    model_dir: Path, extra: dict[str, Any]
) -> None:
    extra = {"slots": "uniform", **extra}
    config = vllm_config(model_dir, extra=extra)
    with pytest.raises(kvstrata.ConfigError, match="blocks_per_chunk"):
        connector.KVStrataConnector(
            config, connector.KVConnectorRole.WORKER, kv_cache_config(window=64)
        )
    ours = {**extra, "spec_name": "KVStrataSpec"}
    startup.refuse_unsupported(config, kv_cache_config(), ours)
    for allowed in (
        {**ours, "block_size": None, "blocks_per_chunk": 1},
        # The rows say which chunks a job has, so that the worker notices.
        {**ours, "slots": "exact"},
    ):
        startup.refuse_unsupported(config, kv_cache_config(window=64), allowed)
    with pytest.raises(kvstrata.ConfigError, match="blocks_per_chunk"):
        startup.refuse_unsupported(
            config,
            kv_cache_config(window=64),
            {**ours, "slots": "exact", "spec_name": "TieringOffloadingSpec"},
        )


def test_only_a_packed_layout_has_offsets_and_they_are_those_of_the_layers() -> None:
    config = kv_cache_config(window=64)
    page = config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    tensor = KVCacheTensor(
        size=8 * 3 * page,
        layers=["l.0", "l.1"],
        layer_stride=page,
        block_stride=3 * page,
        offset=page,
    )
    config.kv_cache_tensors.append(tensor)
    assert packed.pages(config, [0, 1]) is None
    config.kv_cache_layout = "BLHNC"
    assert packed.pages(config, [0, 1]) == [[[page, page]], [[2 * page, page]]]


def digest_of(config: Any, groups: KVCacheConfig | None = None) -> str:
    gathered = facts.gather(config, groups or kv_cache_config())
    assert json.loads(json.dumps(gathered)) == gathered, "the facts are not plain JSON"
    return modelconfig.digest(gathered)


@pytest.mark.parametrize(
    "change",
    [
        {"hf": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
        {"hf": {"hidden_act": "gelu"}},
        {"hf": {"sliding_window": 128}},
        {"hf": {"quantization_config": {"bits": 4}}},
        {"hf": {"_commit_hash": "abc"}},
        {"model": {"revision": "v2"}},
        {"model": {"hf_overrides": {"a": 1}}},
        {"model": {"dtype": torch.float16}},
        {"model": {"quantization": "fp8"}},
        {"cache": {"cache_dtype": "fp8"}},
        {"cache": {"calculate_kv_scales": True}},
        {"cache": {"kv_cache_layout": "BLHNC"}},
        {"cache": {"prefix_caching_hash_algo": "sha256_cbor"}},
        {"load_format": "dummy"},
    ],
)
def test_each_fact_alone_changes_the_identity(model_dir: Path, change: dict[str, Any]) -> None:
    assert digest_of(vllm_config(model_dir, **change)) != digest_of(vllm_config(model_dir))


@pytest.mark.parametrize(
    "change",
    [
        {"hf": {"_name_or_path": "/elsewhere"}},
        {"hf": {"transformers_version": "9"}},
        {"hf": {"temperature": 0.2}},
        {"model": {"max_model_len": 4096}},
        {"model": {"seed": 3}},
    ],
)
def test_what_does_not_change_a_byte_does_not_change_the_identity(
    model_dir: Path, change: dict[str, Any]
) -> None:
    assert digest_of(vllm_config(model_dir, **change)) == digest_of(vllm_config(model_dir))


def test_both_spellings_of_a_latent_fp8_cache_are_one(model_dir: Path) -> None:
    """A worker rewrites the name, and only in a process of its own the scheduler cannot see it."""
    one = vllm_config(model_dir, cache={"cache_dtype": "fp8"})
    other = vllm_config(model_dir, cache={"cache_dtype": "fp8_ds_mla"})
    assert digest_of(one) == digest_of(other)


def test_the_longest_length_counts_only_where_the_rotation_depends_on_it(model_dir: Path) -> None:
    def longest(kind: str, length: int) -> str:
        hf = {"rope_scaling": {"rope_type": kind, "factor": 2.0}}
        return digest_of(vllm_config(model_dir, hf=hf, model={"max_model_len": length}))

    assert longest("longrope", 2048) != longest("longrope", 4096)
    assert longest("a new kind", 2048) != longest("a new kind", 4096)
    assert longest("llama3", 2048) == longest("llama3", 4096)


def test_groups_and_their_windows_are_part_of_the_identity(model_dir: Path) -> None:
    config = vllm_config(model_dir)
    digests = {digest_of(config, kv_cache_config(window=w)) for w in (None, 64, 128)}
    assert len(digests) == 3


def test_one_changed_weight_changes_the_identity_and_a_changed_readme_does_not(
    model_dir: Path,
) -> None:
    before = digest_of(vllm_config(model_dir))
    (model_dir / "README.md").write_text("other words")
    assert digest_of(vllm_config(model_dir)) == before
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert digest_of(vllm_config(model_dir)) != before


def test_a_moved_model_keeps_its_identity(model_dir: Path, tmp_path: Path) -> None:
    before = digest_of(vllm_config(model_dir))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    assert digest_of(vllm_config(model_dir.rename(moved / model_dir.name))) == before


def test_a_draft_models_weights_are_part_of_the_identity(model_dir: Path) -> None:
    draft = copy.copy(vllm_config(model_dir).model_config)
    config = vllm_config(
        model_dir, speculative=SimpleNamespace(method="eagle", draft_model_config=draft)
    )
    before = digest_of(config)
    draft.model = "hub/unknown"
    assert facts.gather(config, kv_cache_config())["draft"]["weights"] is None
    assert digest_of(config) != before


@pytest.mark.parametrize(
    ("algorithm", "environ", "reproducible"),
    [
        ("sha256", {}, True),
        ("sha256_cbor", {}, True),
        ("xxhash", {}, False),
        ("xxhash_cbor", {}, False),
        ("a_new_one", {}, False),
        ("xxhash", {"PYTHONHASHSEED": "0"}, True),
    ],
)
def test_only_a_seed_every_process_shares_counts_as_reproducible(
    algorithm: str, environ: dict[str, str], reproducible: bool
) -> None:
    assert (facts.hash_identity(algorithm, environ)["seed"] is not None) is reproducible


def test_a_secret_hash_seed_is_not_written_down() -> None:
    assert "hunter2" not in json.dumps(facts.hash_identity("xxhash", {"PYTHONHASHSEED": "hunter2"}))


@pytest.mark.usefixtures("registered")
def test_gathered_facts_reach_the_tiers_manifest_and_need_no_identity_from_the_user(
    opener: Opener, engine_id: str, model_dir: Path
) -> None:
    gathered = facts.gather(vllm_config(model_dir), kv_cache_config())
    entry = disk_entry("file:///x")
    del entry["model_identity"]
    config = offloading_config(engine_id, [entry], extra={facts.KEY: gathered})
    manager: Any = TieringOffloadingSpec(config).get_manager()
    fields = opener.opened[0].manifest
    assert fields["model"] == "my-model"
    assert fields["byte_map"] == manifest.UNPROVED
    assert fields["engine"]["version"] == vllm.__version__
    for name in ("revision", "weights", "config", "cache", "hash", "attention", "groups"):
        assert fields[name] == gathered[name]
    manager.shutdown()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("lost", ["weights", "draft"])
def test_facts_without_weights_persist_nothing_unless_the_user_names_them(
    opener: Opener, engine_id: str, model_dir: Path, lost: str
) -> None:
    gathered = facts.gather(vllm_config(model_dir), kv_cache_config())
    gathered[lost] = None if lost == "weights" else {"method": "eagle", "weights": None}
    entry = disk_entry("file:///x")
    named = TieringOffloadingSpec(
        offloading_config(engine_id, [entry], extra={facts.KEY: gathered})
    )
    assert manifest.build(named, "mine")["model_identity"] == "mine"
    with pytest.raises(manifest.PersistenceError, match="model_identity"):
        manifest.build(named, None)


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
@pytest.mark.usefixtures("registered")
def test_every_documented_configuration_names_things_that_exist(name: str) -> None:
    config = KVTransferConfig(**json.loads(DOCUMENTED[name]))
    assert config.kv_load_failure_policy == "recompute"
    assert issubclass(KVConnectorFactory.get_connector_class(config), OffloadingConnector)
    assert KVConnectorFactory.supports_hma_config(config)
    extra = config.kv_connector_extra_config
    if config.kv_connector == "KVStrataConnector":
        startup.choose_spec(SimpleNamespace(kv_transfer_config=config))  # type: ignore[arg-type]
    assert issubclass(OffloadingSpecFactory.get_spec_cls(extra), TieringOffloadingSpec)
    if config.kv_connector == "KVStrataConnector":
        stackconfig.check_names(extra)
    for entry in extra.get("secondary_tiers", []):
        assert SecondaryTierFactory.get_tier_class(entry) in (KVStrataDiskTier, KVStrataObjectTier)
    if "tiers" in extra:
        exact.check_tiers(stackconfig.parse(extra, lambda: 1 << 40))


def test_eleven_configurations_are_documented() -> None:
    assert len(DOCUMENTED) == 11


@pytest.mark.usefixtures("registered")
def test_registering_again_changes_nothing() -> None:
    from kvstrata.vllm import plugin

    before = dict(SecondaryTierFactory._registry)
    plugin.register()
    plugin.register()
    assert before == SecondaryTierFactory._registry
    assert "kvstrata_disk" in before


def test_an_older_vllm_gets_no_names_and_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    from kvstrata.vllm import compat, plugin

    before = dict(SecondaryTierFactory._registry)
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    plugin.register()
    assert before == SecondaryTierFactory._registry
    with pytest.raises(kvstrata.ConfigError, match=r"needs vLLM >= 0\.32"):
        compat.require_version()


def test_importing_the_plug_in_starts_no_thread() -> None:
    code = (
        "import threading, vllm.v1.kv_offload.tiering.spec\n"
        "import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector\n"
        "import kvstrata\n"
        "if not hasattr(kvstrata, 'ConfigError'): kvstrata.ConfigError = ValueError\n"
        "before = set(threading.enumerate())\n"
        "import kvstrata.vllm.plugin, kvstrata.vllm.tiers, kvstrata.vllm.spec\n"
        "import kvstrata.vllm.connector, kvstrata.vllm.worker\n"
        "assert set(threading.enumerate()) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
