"""The options of the whole stack: sizes, names, ways to make slots, and what is refused."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from plugin_support.models import kv_cache_config, make_model, vllm_config

import kvstrata
from kvstrata._native import CpuTier
from kvstrata.vllm import compat, connector, exact, names, sizes, stackconfig
from kvstrata.vllm.loadlimits import LoadLimits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GIB = 1 << 30
WHOLE = 10 * GIB


def parse(**extra: Any) -> stackconfig.StackConfig:
    return stackconfig.parse({"cpu_bytes_to_use": GIB, **extra}, lambda: WHOLE)


@pytest.mark.parametrize("policy", stackconfig.POLICIES)
def test_the_cpu_tier_knows_each_policy(policy: str) -> None:
    assert CpuTier(1 << 20, {0: 4096}, policy=parse(eviction_policy=policy).eviction_policy)
    assert parse(slots="uniform", eviction_policy="arc").eviction_policy == "arc"


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("4GiB", 4 * GIB),
        ("4 gib", 4 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("512MiB", GIB // 2),
        ("2GB", 2 * 10**9),
        ("2G", 2 * GIB),
        ("1000000001b", 10**9 + 1),
        ("80%", 8 * GIB),
        ("0.5%", WHOLE // 200),
        (123456, 123456),
        ("123456", 123456),
        (1e9, 10**9),
    ],
)
def test_a_size_is_bytes_a_text_or_a_part_of_the_memory(written: object, size: int) -> None:
    assert parse(cpu_bytes_to_use=written).cpu_bytes == size


@pytest.mark.parametrize("written", ["", "many", "4GiBs", "-1", "101%", 0, -5, True, [], {}, "4 4"])
def test_what_is_no_size_is_refused_by_name(written: object) -> None:
    with pytest.raises(kvstrata.ConfigError, match=r"cpu_bytes_to_use.*'400GiB' or '80%'"):
        parse(cpu_bytes_to_use=written)


def test_more_than_there_is_is_refused_with_both_numbers() -> None:
    with pytest.raises(kvstrata.ConfigError, match=r"11GiB.*11 GiB.*10 GiB"):
        parse(cpu_bytes_to_use="11GiB")


def test_a_missing_size_says_what_it_means() -> None:
    with pytest.raises(kvstrata.ConfigError, match=r"cpu_bytes_to_use.*all ranks together"):
        stackconfig.parse({}, lambda: WHOLE)


def machine(top: Path, total_kib: int, **files: str) -> Path:
    (top / "proc/self").mkdir(parents=True)
    (top / "proc/meminfo").write_text(f"MemTotal:  {total_kib} kB\nMemFree:  1 kB\n")
    for name, text in files.items():
        path = top / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return top


def test_a_percentage_is_of_the_machine_where_no_group_limits_it(tmp_path: Path) -> None:
    top = machine(
        tmp_path,
        1000,
        **{"proc__self__cgroup": "0::/a/b\n", "sys__fs__cgroup__a__memory.max": "max\n"},
    )
    assert sizes.memory(top) == 1000 << 10


@pytest.mark.parametrize(
    ("lines", "files"),
    [
        ("0::/a/b\n", {"sys__fs__cgroup__a__memory.max": "4096\n"}),
        ("0::/a/b\n", {"sys__fs__cgroup__a__b__memory.max": "4096\n"}),
        # In a container the group is the root of what is mounted, whatever it is called outside.
        ("0::/../other\n", {"sys__fs__cgroup__memory.max": "4096\n"}),
        (
            "5:cpu,memory:/docker/x\n",
            {"sys__fs__cgroup__memory__memory.limit_in_bytes": "4096\n"},
        ),
    ],
)
def test_a_percentage_is_of_the_groups_limit_where_that_is_smaller(
    tmp_path: Path, lines: str, files: dict[str, str]
) -> None:
    top = machine(tmp_path, 1000, **{"proc__self__cgroup": lines, **files})
    assert sizes.memory(top) == 4096


def test_this_machine_has_some_memory() -> None:
    assert 1 << 20 < sizes.memory() < 1 << 60


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (710 << 20, "710 MiB"), (GIB, "1 GiB")],
)
def test_sizes_are_shown_in_the_largest_unit_that_fits(size: int, text: str) -> None:
    assert sizes.shown(size) == text


@pytest.mark.parametrize(
    ("extra", "slots"),
    [
        ({}, "exact"),
        ({"tiers": []}, "exact"),
        ({"tiers": [{"type": "disk"}]}, "exact"),
        ({"secondary_tiers": [{"type": "fs"}]}, "uniform"),
        ({"slots": "uniform"}, "uniform"),
        ({"slots": "uniform", "secondary_tiers": [{"type": "fs"}]}, "uniform"),
    ],
)
def test_slots_fit_their_group_unless_tiers_of_vllms_kind_are_configured(
    extra: dict[str, Any], slots: str
) -> None:
    assert parse(**extra).slots == slots


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"slots": "exactly"}, r"'exactly', not 'exact' or 'uniform'"),
        ({"slots": "exact", "secondary_tiers": [{"type": "fs"}]}, "'uniform'.*'tiers'"),
        ({"slots": "uniform", "tiers": [{"type": "disk"}]}, "'exact'.*'secondary_tiers'"),
        ({"tiers": {"type": "disk"}}, "not a list of objects"),
        ({"tiers": [{"url": "x"}]}, "has no 'type'"),
        ({"numa": "node0"}, "'node0', not one of 'off', 'local', 'interleave'"),
        ({"large_pages": "always"}, "'large_pages' is 'always', not true or false"),
        ({"slots": "uniform", "large_pages": True}, "'large_pages' is an option of slots that fit"),
        ({"slots": "uniform", "numa": "local"}, "'numa' is an option of slots that fit"),
        ({"offload_prompt_only": "no"}, "not true or false"),
        ({"eviction_policy": 3}, "eviction_policy"),
        ({"eviction_policy": "arc"}, "'arc', not one of 'lru', 'th', 'arc_vllm', 's3fifo'"),
        ({"eviction_policy": "arc"}, "with exact slots that is 'arc_vllm'$"),
        ({"eviction_policy": "kvstrata_th"}, "with exact slots that is 'th'$"),
        ({"theta": 1.5}, "'theta' is 1.5, not a probability"),
        ({"theta": True}, "'theta' is True, not a probability"),
        ({"store_threshold": -1}, "'store_threshold' is -1, not a whole number from 0 on"),
        ({"max_tracker_size": "many"}, "'max_tracker_size' is 'many', not a whole number"),
        ({"directory": 0}, "'directory' is 0, not a whole number from 1 on"),
        ({"protect_waiting": 1}, "not true or false"),
        ({"slots": "uniform", "theta": 0.1}, "'theta' is an option of slots that fit their group"),
        ({"backpressure": {}}, "'backpressure' is an option of vLLM's own manager"),
        ({"load_wait_s": 0}, "'load_wait_s' is 0, not a number above 0 and up to 3600"),
        ({"load_share": 1.5}, "'load_share' is 1.5, not a number above 0 and up to 1"),
        ({"request_load_share": "75%"}, "'request_load_share' is '75%', not a number"),
        ({"load_wait_s": float("nan")}, "'load_wait_s' is nan"),
        ({"load_share": True}, "'load_share' is True"),
        ({"slots": "uniform", "load_share": 1}, "'load_share' is an option of slots that fit"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_remedy(
    extra: dict[str, Any], why: str
) -> None:
    with pytest.raises(kvstrata.ConfigError, match=why):
        parse(**extra)


def test_options_of_vllms_manager_are_allowed_where_it_runs() -> None:
    assert parse(slots="uniform", store_threshold=0, backpressure={}).slots == "uniform"


def test_limits_of_loads_from_below_have_defaults_and_are_taken_as_given() -> None:
    assert parse().loads == LoadLimits(wait_s=10.0, share=0.5, request_share=0.75)
    told = parse(load_wait_s=2, load_share=0.25, request_load_share=1)
    assert told.loads == LoadLimits(wait_s=2.0, share=0.25, request_share=1.0)


def test_the_cpu_tier_takes_everything_and_protects_who_waits_unless_it_is_told_otherwise() -> None:
    assert parse().cpu.options() == {
        "policy": "lru",
        "theta": 0.0,
        "store_threshold": 1,
        "protect_waiting": True,
    }
    told = parse(
        eviction_policy="th",
        theta=1,
        store_threshold=2,
        max_tracker_size=7,
        directory=100_000,
        protect_waiting=False,
    )
    assert told.cpu.options() == {
        "policy": "th",
        "theta": 1.0,
        "store_threshold": 2,
        "tracked_keys": 7,
        "directory": 100_000,
        "protect_waiting": False,
    }


def test_answers_are_stored_too_unless_the_configuration_says_otherwise() -> None:
    assert parse().offload_prompt_only is False
    assert parse(offload_prompt_only=True).offload_prompt_only is True


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("slot", "slots"),
        ("tier", "tiers"),
        ("secondary_tier", "secondary_tiers"),
        ("cpu_byte_to_use", "cpu_bytes_to_use"),
        ("evicton_policy", "eviction_policy"),
        ("require_slat", "require_salt"),
        ("block_per_chunk", "blocks_per_chunk"),
    ],
)
def test_a_misspelt_name_is_an_error_that_names_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(kvstrata.ConfigError, match=f"'{wrong}'.*did you mean '{right}'"):
        stackconfig.check_names({wrong: 1})


def test_every_known_name_passes_and_others_are_warned_about_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[tuple[int, str]] = []
    monkeypatch.setattr(compat, "log_once", lambda level, text: said.append((level, text)))
    stackconfig.check_names(dict.fromkeys((*names.OURS, *names.VLLM, "kvstrata_facts")))
    assert said == []
    stackconfig.check_names({"embedding_cache_prefix": 1})
    ((level, text),) = said
    assert level == logging.WARNING
    assert "embedding_cache_prefix" in text


@pytest.mark.parametrize(
    ("tiers", "why"),
    [
        ([{"type": "fs"}], "type 'fs'.*'secondary_tiers'"),
        ([{"type": "disk", "url": "/x"}], "needs 'capacity'"),
        ([{"type": "disk", "url": "/x", "capacity": 1, "capacty": 2}], "did you mean 'capacity'"),
        ([{"type": "disk", "url": "/x", "capacity": 1, "arena": 2}], "the plug-in sets it"),
        ([{"type": "disk", "url": "/x", "capacity": 1, "backpressure": {}}], "'secondary_tiers'"),
        ([{"type": "object"}], "needs 'url'"),
        ([{"type": "object", "url": "/x"}], "tier type 'kvstrata_disk'"),
        ([{"type": "disk", "url": "s3://b", "capacity": 1}], "tier type 'kvstrata_object'"),
        ([{"type": "object", "url": "s3://b", "capacity": 1}], "'capacity' is an option of 'kvs"),
        ([{"type": "object", "url": "s3://b", "secret_access_key": 1}], "credentials come from"),
    ],
)
def test_a_tier_that_cannot_be_made_fails_the_start(tiers: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(kvstrata.ConfigError, match=why):
        exact.check_tiers(parse(tiers=tiers))


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Any]:
    """A worker-side connector for these options."""
    model_dir = make_model(tmp_path / "my-model")

    def made(*, cache: dict[str, Any] | None = None, **extra: Any) -> Any:
        config = vllm_config(model_dir, extra=extra, cache=cache or {})
        return connector.KVStrataConnector(
            config, connector.KVConnectorRole.WORKER, kv_cache_config()
        )

    return made


def test_the_size_option_of_vllm_is_refused_with_what_to_write_instead(
    start: Callable[..., Any],
) -> None:
    with pytest.raises(
        kvstrata.ConfigError, match=r"kv-offloading-size.*'cpu_bytes_to_use'.*16GiB"
    ):
        start(cache={"kv_offloading_size": 16.0})


def test_by_module_path_our_connector_answers_to_the_name_that_option_puts_in_its_place() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config: Any = SimpleNamespace(
        kv_connector="OffloadingConnector", kv_connector_module_path="kvstrata.vllm.connector"
    )
    found = KVConnectorFactory.get_connector_class(config)
    assert found is connector.KVStrataConnector


@pytest.mark.parametrize("extra", [{"slots": "none"}, {"tiers": [{"type": "fs"}]}, {"slot": 1}])
def test_the_connector_refuses_what_the_options_refuse(
    start: Callable[..., Any], extra: dict[str, Any]
) -> None:
    with pytest.raises(kvstrata.ConfigError):
        start(cpu_bytes_to_use="1MiB", **extra)
