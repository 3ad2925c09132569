"""Tiers of the whole stack wait for the workers' byte map; resets and rules reach them."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from plugin_support.configs import disk_entry, offloading_config
from plugin_support.models import kv_cache_config, make_model, vllm_config
from plugin_support.namespaces import BYTE_MAP, set_at
from plugin_support.steps import forget_the_cpu_tier, settle
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvstrata
from kvstrata.vllm import awaited, connector, facts, stackconfig
from kvstrata.vllm.admission import Admission, AdmittingManager
from kvstrata.vllm.handshake import WorkerFacts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstrata.vllm.awaited import AwaitedTier

pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.skipif(not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built"),
]

KEYS = [make_offload_key(bytes([index]) * 32, 0) for index in range(3)]
OTHER_MAP = {**BYTE_MAP, "order": "another"}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_model(tmp_path / "my-model")


class Engine:
    """A manager of the whole stack, and what a scheduler does with it."""

    def __init__(
        self, engine_id: str, entries: list[dict[str, Any]], model_dir: Path, **extra: Any
    ) -> None:
        gathered = facts.gather(vllm_config(model_dir), kv_cache_config())
        config = offloading_config(
            engine_id,
            entries,
            extra={
                "spec_name": "KVStrataSpec",
                facts.KEY: gathered,
                awaited.KEY: True,
                **extra,
            },
        )
        self.spec: Any = OffloadingSpecFactory.create_spec(config)
        self.manager: Any = self.spec.get_manager()
        self.tiers: list[AwaitedTier] = self.manager.secondary_tiers
        self.count = 0

    def open(self, byte_map: dict[str, Any] = BYTE_MAP) -> Engine:
        for tier in self.tiers:
            tier.open(byte_map)
        return self

    def request(self) -> ReqContext:
        self.count += 1
        context = ReqContext(req_id=f"r{self.count}")
        self.manager.on_new_request(context)
        for position, key in enumerate(KEYS):
            context.set_offload_key_position(key, position)
        return context

    def store(self) -> None:
        context = self.request()
        output = self.manager.prepare_store(KEYS, context)
        if output.keys_to_store:
            self.manager.complete_store(set(output.keys_to_store), context)
        self.manager.on_request_finished(context)
        self.settle()

    def settle(self) -> None:
        settle(self.manager)

    def forget_the_cpu_tier(self) -> None:
        forget_the_cpu_tier(self.manager)

    def found_below(self) -> int:
        """Rows that a new request finds in the tiers below the CPU."""
        self.forget_the_cpu_tier()
        context = self.request()
        for _ in range(500):
            answers = [self.manager.lookup(key, context) for key in KEYS]
            self.settle()
            time.sleep(0.002)  # vLLM's file tier looks on a thread of its own
            if set(answers) <= {LookupResult.HIT, LookupResult.MISS}:
                break
        self.manager.on_request_finished(context)
        return answers.count(LookupResult.HIT)

    def close(self) -> None:
        self.manager.shutdown()


@pytest.fixture
def url(root: Path) -> str:
    return f"file://{root}"


@pytest.fixture
def ours(url: str) -> dict[str, Any]:
    entry = disk_entry(url, min_free=0)
    del entry["model_identity"]
    return entry


@pytest.fixture
def engine(engine_id: str, ours: dict[str, Any], model_dir: Path) -> Iterator[Engine]:
    made = Engine(engine_id, [ours], model_dir)
    yield made
    made.close()


def test_before_the_workers_have_spoken_there_is_no_namespace_and_every_lookup_misses(
    engine: Engine, root: Path
) -> None:
    engine.store()
    assert engine.found_below() == 0
    assert not list(root.iterdir())
    engine.open()
    assert len([path for path in root.iterdir() if path.is_dir()]) == 1
    assert engine.found_below() == 0
    engine.store()
    assert engine.found_below() == len(KEYS)


def test_the_namespace_carries_the_byte_map_the_workers_agreed_on(
    engine: Engine, root: Path
) -> None:
    engine.open()
    (file,) = root.glob("*/namespace.json")
    assert json.loads(file.read_text())["manifest"]["byte_map"] == BYTE_MAP


def test_another_byte_map_is_another_namespace(
    engine_id: str, ours: dict[str, Any], model_dir: Path
) -> None:
    first = Engine(engine_id, [ours], model_dir).open()
    first.store()
    first.close()
    second = Engine(engine_id, [ours], model_dir).open(OTHER_MAP)
    assert second.found_below() == 0
    second.close()
    third = Engine(engine_id, [ours], model_dir).open()
    assert third.found_below() == len(KEYS)
    third.close()


def test_a_byte_map_that_changes_while_the_server_runs_closes_the_tier_to_lookups_and_stores(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.open()
    engine.store()
    engine.open()
    assert engine.found_below() == len(KEYS), "the same byte map again is no change"
    with caplog.at_level(logging.ERROR):
        engine.open(OTHER_MAP)
    assert "changed while the server ran" in caplog.text
    assert engine.found_below() == 0
    engine.store()
    assert engine.found_below() == 0


def test_a_reset_reaches_the_disk_and_outlives_a_restart(
    engine_id: str, ours: dict[str, Any], model_dir: Path
) -> None:
    first = Engine(engine_id, [ours], model_dir).open()
    first.store()
    assert first.found_below() == len(KEYS)
    assert first.tiers[0].reset() is True
    assert first.found_below() == 0
    first.close()
    second = Engine(engine_id, [ours], model_dir).open()
    assert second.found_below() == 0
    second.store()
    assert second.found_below() == len(KEYS)
    second.close()


def test_a_tier_of_vllms_keeps_its_rows_apart_from_plain_vllms_in_the_same_place(
    engine_id: str, tmp_path: Path, model_dir: Path
) -> None:
    entry = {"type": "fs", "root_dir": str(tmp_path / "fs"), "n_read_threads": 1}
    entry["n_write_threads"] = 1
    made = Engine(engine_id, [entry], model_dir)
    made.store()
    assert made.found_below() == 0
    assert not (tmp_path / "fs").exists()
    made.open()
    made.store()
    assert made.found_below() == len(KEYS)
    plain = FileMapper.from_offloading_spec(entry["root_dir"], made.spec, parallel_agnostic=True)
    (config,) = (tmp_path / "fs").glob("*/config.json")
    assert config.parent.name != Path(plain.base_path).name
    assert not Path(plain.base_path).exists()
    assert len(json.loads(config.read_text())["model_name"]) == len(plain.fields["model_name"]) + 33
    made.close()


def test_a_tier_of_vllms_that_cannot_forget_is_closed_by_a_reset_and_the_reset_says_no(
    engine_id: str, tmp_path: Path, model_dir: Path
) -> None:
    entry: dict[str, Any] = {"type": "fs", "root_dir": str(tmp_path / "fs")}
    made = Engine(engine_id, [entry], model_dir).open()
    made.store()
    assert made.tiers[0].reset() is False
    assert made.found_below() == 0
    made.close()


def test_a_tier_of_vllms_keeps_nothing_where_the_weights_have_no_name(
    engine_id: str, tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model_dir / "model.safetensors").unlink()
    entry: dict[str, Any] = {"type": "fs", "root_dir": str(tmp_path / "fs")}
    with caplog.at_level(logging.ERROR):
        made = Engine(engine_id, [entry], model_dir).open()
    assert "model_identity" in caplog.text
    made.store()
    assert not (tmp_path / "fs").exists()
    made.close()
    named = Engine(engine_id, [entry], model_dir, model_identity="mine").open()
    named.store()
    assert (tmp_path / "fs").exists()
    named.close()


def test_options_of_a_tier_that_cannot_work_fail_the_start_when_it_is_opened(
    engine_id: str, ours: dict[str, Any], model_dir: Path
) -> None:
    made = Engine(engine_id, [{**ours, "capacity": "ten"}], model_dir)
    with pytest.raises(kvstrata.ConfigError, match="capacity"):
        made.open()
    made.close()


def request(salt: str | None = None, *, adapter: bool = False) -> Any:
    return SimpleNamespace(
        request_id="r", cache_salt=salt, lora_request=object() if adapter else None
    )


@pytest.mark.parametrize(
    ("extra", "admitted"),
    [
        ({}, [True, True, True, True]),
        ({"require_salt": True}, [False, True, False, True]),
        ({"persist_lora": "strict"}, [True, True, False, True]),
        ({"persist_lora": "name"}, [True, True, True, True]),
        ({"require_salt": True, "persist_lora": "strict"}, [False, True, False, True]),
    ],
)
def test_who_may_use_what_is_below_the_gpu(extra: dict[str, Any], admitted: list[bool]) -> None:
    rules = Admission.parse(extra)
    requests = [request(), request("s"), request(adapter=True), request("s", adapter=True)]
    assert [rules.admits(each) for each in requests] == admitted


@pytest.mark.parametrize("extra", [{"require_salt": "yes"}, {"persist_lora": "never"}])
def test_a_rule_that_is_none_is_refused_by_name(extra: dict[str, Any]) -> None:
    with pytest.raises(kvstrata.ConfigError, match=next(iter(extra))):
        Admission.parse(extra)


def test_a_refused_request_stores_nothing_and_finds_nothing_in_any_tier(engine: Engine) -> None:
    engine.open()
    guarded = AdmittingManager(engine.manager)
    engine.manager = guarded
    refused = ReqContext(req_id="unsalted")
    guarded.refuse("unsalted")
    guarded.on_new_request(refused)
    output = guarded.prepare_store(KEYS, refused)
    assert output.keys_to_store == []
    engine.store()
    assert guarded.lookup(KEYS[0], refused) is LookupResult.MISS
    assert engine.found_below() == len(KEYS)
    assert guarded.lookup(KEYS[0], refused) is LookupResult.MISS
    # Another one of that id may begin before vLLM says that the first has ended.
    admitted = ReqContext(req_id="unsalted")
    guarded.on_new_request(admitted)
    assert guarded.lookup(KEYS[0], admitted) is LookupResult.HIT
    guarded.on_request_finished(refused)
    guarded.refuse("unsalted")
    last = ReqContext(req_id="unsalted")
    guarded.on_new_request(last)
    guarded.on_request_finished(admitted)
    assert guarded.lookup(KEYS[0], last) is LookupResult.MISS


def a_connector(engine: Engine, extra: dict[str, Any]) -> Any:
    """The connector's own methods over a stand-in for what vLLM's constructor makes."""
    made: Any = object.__new__(connector.KVStrataConnector)
    made._on_reset = stackconfig.on_reset(extra)
    made.connector_scheduler = SimpleNamespace(
        manager=engine.manager, reset_cache=engine.forget_the_cpu_tier, shutdown=lambda: None
    )
    made.connector_worker = None
    return made


@pytest.mark.parametrize(("extra", "left"), [({}, 0), ({"on_reset": "cpu"}, len(KEYS))])
def test_a_reset_of_the_connector_forgets_every_tier_or_only_the_cpus(
    engine: Engine, extra: dict[str, Any], left: int
) -> None:
    engine.open()
    engine.store()
    assert a_connector(engine, extra).reset_cache() is True
    assert engine.found_below() == left


def test_a_reset_that_a_tier_could_not_record_says_so_and_the_tier_stays_closed_until_it_has(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.open()
    engine.store()
    monkeypatch.setattr(type(engine.tiers[0].tier), "reset", lambda _self: False)
    assert a_connector(engine, {}).reset_cache() is False


def hand_over(made: Any, byte_map: dict[str, Any]) -> None:
    """The worker speaks."""
    told = WorkerFacts.of(0, byte_map)
    made.set_xfer_handshake_metadata_pp_aware({(0, 0): told})


def in_touch(engine: Engine) -> Any:
    made = a_connector(engine, {})
    config = kv_cache_config()
    made._kv_cache_config = config
    made._proves_bytes, made._is_agreed, made._world_size = True, False, 1
    return made


def fitting(byte_map: dict[str, Any]) -> dict[str, Any]:
    """With the bytes per block that the specification of the one group has."""
    size = kv_cache_config().kv_cache_groups[0].kv_cache_spec.page_size_bytes
    return set_at(byte_map, "groups/0/bytes_per_block", size)


def test_what_a_worker_says_opens_the_tiers_and_what_does_not_fit_fails_the_start(
    engine: Engine, root: Path
) -> None:
    made = in_touch(engine)
    with pytest.raises(kvstrata.ConfigError, match=r"group 0 has 4096 bytes .* copy 8192"):
        hand_over(made, BYTE_MAP)
    with pytest.raises(kvstrata.ConfigError, match=r"ranks \[\] of 1"):
        made.set_xfer_handshake_metadata_pp_aware({})
    assert not list(root.iterdir())
    hand_over(made, fitting(BYTE_MAP))
    engine.store()
    assert engine.found_below() == len(KEYS)


def test_after_the_start_a_disagreement_closes_the_tiers_and_raises_nothing(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    made = in_touch(engine)
    hand_over(made, fitting(BYTE_MAP))
    engine.store()
    hand_over(made, fitting(BYTE_MAP))
    assert engine.found_below() == len(KEYS)
    with caplog.at_level(logging.ERROR):
        hand_over(made, BYTE_MAP)
    assert "answers misses from now on" in caplog.text
    assert engine.found_below() == 0


def test_an_unknown_kind_of_reset_is_refused() -> None:
    with pytest.raises(kvstrata.ConfigError, match="on_reset"):
        stackconfig.on_reset({"on_reset": "disk"})


def test_under_vllms_own_spec_the_tier_opens_at_once_and_is_unproved(
    engine_id: str, ours: dict[str, Any], model_dir: Path, root: Path
) -> None:
    gathered = facts.gather(vllm_config(model_dir), kv_cache_config())
    config = offloading_config(engine_id, [ours], extra={facts.KEY: gathered})
    manager: Any = TieringOffloadingSpec(config).get_manager()
    (file,) = root.glob("*/namespace.json")
    assert json.loads(file.read_text())["manifest"]["byte_map"] == "unproved"
    manager.shutdown()
