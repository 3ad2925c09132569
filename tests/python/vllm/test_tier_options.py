"""What a tier entry may say, and what happens when it says something else."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from plugin_support.configs import disk_entry, offloading_config
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvstrata
from kvstrata.vllm import compat, facts, names, options, stackconfig
from kvstrata.vllm.tiers import KVStrataDiskTier

if TYPE_CHECKING:
    from pathlib import Path

    from plugin_support.stand_in import Opener

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_warned", set())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def make_tier(engine_id: str, entry: dict[str, Any], **config: Any) -> KVStrataDiskTier:
    spec = TieringOffloadingSpec(offloading_config(engine_id, [entry], **config))
    view = memoryview(bytearray(4 * 8192)).cast("b", (4, 8192))
    known = {name: value for name, value in entry.items() if name not in {"type", "module_path"}}
    return KVStrataDiskTier(
        offloading_spec=spec,
        primary_kv_view=view,
        tier_type="kvstrata_disk",
        backpressure_detector=None,
        **known,
    )


def test_options_reach_open_tier_under_their_own_names(opener: Opener, engine_id: str) -> None:
    entry = disk_entry("file:///x", min_free="7%", policy="lru", deadline_s=5.0, required=False)
    make_tier(engine_id, entry)
    assert opener.options == [
        {
            "url": "file:///x",
            "capacity": "64MiB",
            "min_free": "7%",
            "policy": "lru",
            "deadline_s": 5.0,
            "required": False,
            "honours_busy": False,
        }
    ]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("capcity", "capacity"), ("modelidentity", "model_identity"), ("min_fre", "min_free")],
)
def test_a_misspelt_option_is_an_error_that_names_the_right_one(
    opener: Opener, engine_id: str, wrong: str, right: str
) -> None:
    with pytest.raises(kvstrata.ConfigError, match=f"'{wrong}'.*'{right}'"):
        make_tier(engine_id, disk_entry("file:///x", **{wrong: "1"}))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("require_slat", "require_salt"), ("on_rest", "on_reset"), ("weight_id", "weights_id")],
)
def test_a_misspelt_option_beside_the_tiers_is_an_error_too(wrong: str, right: str) -> None:
    with pytest.raises(kvstrata.ConfigError, match=f"'{wrong}'.*'{right}'"):
        stackconfig.check_names({"cpu_bytes_to_use": 1, wrong: True})


@pytest.mark.parametrize(
    "name", ["numa", "large_pages", "slots", "cpu_bytes_to_use", "max_tracker_size"]
)
def test_an_option_that_belongs_beside_the_tiers_is_an_error_in_an_entry(
    opener: Opener, engine_id: str, name: str
) -> None:
    with pytest.raises(kvstrata.ConfigError, match=f"'{name}' does not belong in a kvstrata tier"):
        make_tier(engine_id, disk_entry("file:///x", **{name: "1"}))


@pytest.mark.parametrize(
    ("url", "is_object", "why"),
    [
        ("b/x", True, r"'url' 'b/x', a path, is for the tier type 'kvstrata_disk'; a bucket is"),
        ("file:///x", True, r"'url' file://\.\.\. is for the tier type 'kvstrata_disk'$"),
        ("s3://b/x", False, r"'url' s3://\.\.\. is for the tier type 'kvstrata_object'$"),
    ],
)
def test_a_url_of_the_other_kind_of_tier_is_an_error_that_names_it(
    url: str, is_object: bool, why: str
) -> None:
    entry = {"url": url} if is_object else {"url": url, "capacity": "1GiB"}
    with pytest.raises(kvstrata.ConfigError, match=why):
        options.parse(entry, entry, object_tier=is_object)


@pytest.mark.parametrize("name", ["min_free", "url", "requests_max", "policy"])
def test_an_option_that_belongs_in_an_entry_is_an_error_beside_the_tiers(name: str) -> None:
    with pytest.raises(kvstrata.ConfigError, match=f"'{name}' belongs in an entry of 'tiers'"):
        stackconfig.check_names({"cpu_bytes_to_use": 1, name: "5%"})


def test_options_of_ours_and_of_others_beside_the_tiers_are_no_misspellings() -> None:
    others = ("spec_name", "block_size", "eviction_policy", "embedding_model_identity")
    stackconfig.check_names(dict.fromkeys((*names.BESIDE_TIERS, *others)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_identity", ""),
        ("model_identity", {}),
        ("model_identity", 0),
        ("weights_id", ""),
        ("weights_id", 7),
        ("weights_sampling", "false"),
        ("weights_sampling", 1),
    ],
)
def test_an_identity_beside_the_tiers_that_names_nothing_is_an_error(
    name: str, value: object
) -> None:
    with pytest.raises(kvstrata.ConfigError, match=name):
        options.check_beside({name: value})


def test_what_is_no_offload_policy_is_refused_with_those_that_are(
    opener: Opener, engine_id: str
) -> None:
    with pytest.raises(kvstrata.ConfigError, match="'all', not one of 'chunk_level', 'request_lev"):
        make_tier(engine_id, disk_entry("file:///x", offload_policy="all"))
    assert not opener.opened


@pytest.mark.parametrize("name", ["require_salt", "tenant", "weights_id"])
def test_an_option_that_belongs_beside_the_tiers_is_refused_in_an_entry(
    opener: Opener, engine_id: str, name: str
) -> None:
    beside = f"'{name}'.*beside 'tiers' or 'secondary_tiers'"
    with pytest.raises(kvstrata.ConfigError, match=beside):
        make_tier(engine_id, disk_entry("file:///x", **{name: "1"}))
    assert not opener.opened


@pytest.mark.parametrize("name", ["require_salt", "persist_lora", "on_reset"])
def test_a_rule_that_the_connector_would_not_keep_fails_the_start(
    opener: Opener, engine_id: str, name: str
) -> None:
    with pytest.raises(kvstrata.ConfigError, match=f"'{name}'.*KVStrataConnector"):
        make_tier(engine_id, disk_entry("file:///x"), extra={name: True})
    assert not opener.opened
    make_tier(engine_id, disk_entry("file:///x"), extra={name: True, facts.KEY: None})
    assert len(opener.opened) == 1


def test_a_keyword_of_a_newer_vllm_is_ignored_and_logged_once(
    opener: Opener, engine_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    entry = disk_entry("file:///x")
    spec = TieringOffloadingSpec(offloading_config(engine_id, [entry]))
    view = memoryview(bytearray(4 * 8192)).cast("b", (4, 8192))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            KVStrataDiskTier(
                offloading_spec=spec,
                primary_kv_view=view,
                tier_type="kvstrata_disk",
                url="file:///x",
                capacity="1GiB",
                model_identity="m",
                future_arg=None,
            )
    assert sum("future_arg" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("name", ["manifest", "row_bytes", "arena", "honours_busy"])
def test_what_the_plug_in_sets_cannot_be_set(opener: Opener, engine_id: str, name: str) -> None:
    with pytest.raises(kvstrata.ConfigError, match=name):
        make_tier(engine_id, disk_entry("file:///x", **{name: 1}))


@pytest.mark.parametrize("name", ["url", "capacity"])
def test_a_missing_option_is_named(opener: Opener, engine_id: str, name: str) -> None:
    entry = disk_entry("file:///x")
    del entry[name]
    with pytest.raises(kvstrata.ConfigError, match=name):
        make_tier(engine_id, entry)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("~/kv", "'url' is '~/kv': ~ is expanded by the shell alone"),
        (" /kv", "'url' is ' /kv': it begins or ends with a space"),
        ("file:/kv", "'url' is 'file:/kv': a URL has two slashes"),
        ("S3:/id:secret@bucket", r"'url' is \.\.\.: a URL has two slashes"),
    ],
)
def test_a_url_that_would_be_taken_for_a_relative_path_is_refused(
    opener: Opener, engine_id: str, url: str, told: str
) -> None:
    with pytest.raises(kvstrata.ConfigError, match=told):
        make_tier(engine_id, disk_entry(url))
    assert not opener.opened
    make_tier(engine_id, disk_entry("./~"))
    assert len(opener.opened) == 1


def test_the_scheme_of_no_bucket_is_not_said_to_be_a_directory() -> None:
    given = {"url": "S3://id:secret@bucket/p"}
    with pytest.raises(kvstrata.ConfigError, match=r"'url' S3://\.\.\. is of no bucket: s3://"):
        options.parse(given, given, object_tier=True)
    for given in ({"url": "/kv"}, {"url": "file:///kv"}):
        with pytest.raises(kvstrata.ConfigError, match="'kvstrata_disk'"):
            options.parse(given, given, object_tier=True)


@pytest.mark.parametrize("value", ["", " ", {}, 7, []])
def test_an_empty_identity_is_an_error(opener: Opener, engine_id: str, value: object) -> None:
    with pytest.raises(kvstrata.ConfigError, match="model_identity"):
        make_tier(engine_id, disk_entry("file:///x", model_identity=value))


def test_without_an_identity_nothing_is_persisted_and_one_error_says_why(
    opener: Opener, engine_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    entry = disk_entry("file:///x")
    del entry["model_identity"]
    with caplog.at_level(logging.ERROR):
        tier = make_tier(engine_id, entry)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "model_identity" in errors[0].getMessage()
    assert not opener.opened
    key = make_offload_key(b"k" * 32, 0)
    assert tier.lookup(key, ReqContext(req_id="r")) is LookupResult.MISS


def test_with_a_random_hash_seed_the_start_fails_and_names_the_settings(
    opener: Opener, engine_id: str
) -> None:
    gathered = {"version": facts.VERSION, "hash": {"algorithm": "xxhash", "seed": None}}
    with pytest.raises(kvstrata.ConfigError, match=r"xxhash.*PYTHONHASHSEED.*sha256"):
        make_tier(engine_id, disk_entry("file:///x"), extra={facts.KEY: gathered})
    assert not opener.opened


def test_the_namespace_of_a_plain_connector_is_marked_unproved(
    opener: Opener, engine_id: str
) -> None:
    make_tier(engine_id, disk_entry("file:///x"))
    assert opener.opened[0].manifest["byte_map"] == "unproved"
    assert opener.opened[0].manifest["model"] == "test-model"


@pytest.mark.skipif(not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built")
@pytest.mark.parametrize(
    ("name", "value"), [("capacity", "ten"), ("capacity", 1), ("min_free", "x%"), ("policy", "mru")]
)
def test_a_value_that_cannot_work_raises_at_start(
    engine_id: str, tmp_path: Path, name: str, value: object
) -> None:
    with pytest.raises(kvstrata.ConfigError):
        make_tier(engine_id, disk_entry(f"file://{tmp_path}/kv", **{name: value}))


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("0.31.2", "needs vLLM >= 0.32"),
        ("0.32.0", None),
        ("0.33.1.dev3+g1", None),
        ("0.99.0", None),
        ("dev", None),
    ],
)
def test_only_an_older_vllm_is_refused(version: str, problem: str | None) -> None:
    found = compat.version_problem(version)
    assert (found is None) if problem is None else (found is not None and problem in found)


def test_a_newer_vllm_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        compat.version_problem("0.99.0")
        compat.version_problem("0.99.0")
    assert sum("0.99.0" in record.getMessage() for record in caplog.records) == 1
