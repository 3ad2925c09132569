"""Specs whose slots fit their group, from blocks to disk and back, beside slots of one size."""

from __future__ import annotations

import uuid
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from plugin_support.configs import disk_entry, offloading_config
from plugin_support.exact_rig import Rig
from plugin_support.models import make_model
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

import kvstrata
from kvstrata.vllm import compat, exact, geometry
from kvstrata.vllm.geometry import GroupGeometry
from kvstrata.vllm.manager import KVStrataManager
from kvstrata.vllm.rowspec import RowSpec
from kvstrata.vllm.rowworker import KVStrataRowWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.skipif(not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built"),
]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Whole specs over one model; each is closed when the next is made."""
    model_dir = make_model(tmp_path / "my-model")
    made: list[Rig] = []
    names: list[str] = []

    def build(*args: Any, **options: Any) -> Rig:
        if made:
            made.pop().close()
        names.append(f"kvstrata-test-{uuid.uuid4().hex}")
        made.append(Rig(names[-1], model_dir, *args, **options))
        return made[-1]

    yield build
    for one in made:
        one.close()
    left = [path.name for path in Path("/dev/shm").iterdir()]
    assert not [name for name in names if any(name in other for other in left)]


def tier_on(root: Path, slots: str) -> dict[str, Any]:
    entry = disk_entry(f"file://{root}", min_free=0)
    del entry["model_identity"]
    return entry if slots == "uniform" else {**entry, "type": "disk"}


def namespaces(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob("*/namespace.json"))


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_rows_of_unequal_groups_come_back_from_their_slots_and_from_disk(
    rig: Callable[..., Rig], root: Path, blocks_per_chunk: int
) -> None:
    options: dict[str, Any] = {
        "tiers": (tier_on(root, "exact"),),
        "blocks_per_chunk": blocks_per_chunk,
    }
    first = rig((3, 1), **options)
    assert isinstance(first.manager, KVStrataManager)
    assert isinstance(first.worker, KVStrataRowWorker)
    for group in (0, 1):
        first.store(3, group)
        assert first.load(3, group) == 3
    stats = first.manager.cpu.stats()
    assert stats["payload_bytes"] == 3 * (3 + 1) * first.page * blocks_per_chunk
    first.forget_the_cpu_tier()
    assert [first.load(4, group) for group in (0, 1)] == [3, 3]
    assert [rig((3, 1), **options).load(4, group) for group in (0, 1)] == [3, 3]
    assert len(namespaces(root)) == 1


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
@pytest.mark.parametrize("writer", ["exact", "uniform"])
def test_with_one_group_both_ways_have_equal_rows_and_one_namespace(
    rig: Callable[..., Rig], root: Path, writer: str, blocks_per_chunk: int
) -> None:
    reader = "uniform" if writer == "exact" else "exact"

    def made(slots: str) -> Rig:
        return rig(
            (2,),
            slots=slots,
            tiers=(tier_on(root, slots),),
            blocks_per_chunk=blocks_per_chunk,
        )

    first = made(writer)
    assert first.page * 2 * blocks_per_chunk % 4096, "the row of one size would have no padding"
    first.store(3)
    byte_map = first.byte_map
    second = made(reader)
    assert second.byte_map == byte_map
    assert second.load(4) == 3
    assert len(namespaces(root)) == 1


def test_with_unequal_groups_rows_of_one_size_are_not_read_and_stay(
    rig: Callable[..., Rig], root: Path
) -> None:
    uniform = rig((3, 1), slots="uniform", tiers=(tier_on(root, "uniform"),))
    assert isinstance(uniform.manager, TieringOffloadingManager)
    for group in (0, 1):
        uniform.store(3, group)
    (before,) = namespaces(root)
    exactly = rig((3, 1), tiers=(tier_on(root, "exact"),))
    assert [exactly.load(3, group) for group in (0, 1)] == [0, 0]
    for group in (0, 1):
        exactly.store(2, group)
    assert len(namespaces(root)) == 2
    again = rig((3, 1), slots="uniform", tiers=(tier_on(root, "uniform"),))
    assert [again.load(4, group) for group in (0, 1)] == [3, 3]
    assert before in namespaces(root)


def test_a_small_groups_rows_take_a_small_part_of_the_disk_and_of_the_arena(
    rig: Callable[..., Rig], root: Path
) -> None:
    used = {}
    for slots in ("uniform", "exact"):
        made = rig(
            (8, 1), slots=slots, values=512, tiers=(tier_on(root / slots, slots),), chunks=12
        )
        made.store(12, group=1)
        tier = made.manager.secondary_tiers[0]
        native = tier.native if slots == "exact" else tier.tier._tier
        used[slots] = native.stats()["payload_bytes"]
    assert used["uniform"] == 8 * used["exact"]


@pytest.mark.parametrize("slots", ["exact", "uniform"])
def test_a_tier_can_ask_for_all_rows_of_a_request(
    rig: Callable[..., Rig], tmp_path: Path, slots: str
) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)

    def policy(**more: str) -> OffloadPolicy:
        one = rig(slots=slots, tiers=({**tier_on(root, slots), **more},))
        answer: RequestOffloadingContext = one.manager.on_new_request(ReqContext(req_id="r"))
        return answer.policy

    assert policy() is OffloadPolicy.CHUNK_LEVEL
    assert policy(offload_policy="chunk_level") is OffloadPolicy.CHUNK_LEVEL
    assert policy(offload_policy="request_level") is OffloadPolicy.REQUEST_LEVEL


def test_what_vllm_publishes_of_the_configuration_is_declared_and_complete(
    rig: Callable[..., Rig], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    tier = {**tier_on(root, "exact"), "policy": "th", "offload_policy": "request_level"}
    one = rig((2, 1), tiers=(tier,), eviction_policy="s3fifo", chunks=8)
    first, second = one.manager.config_info()
    assert first == {
        "tier": "0:primary",
        "cpu_blocks_per_chunk": 1,
        "cpu_kv_cache_size_bytes": one.manager.cpu.stats()["capacity_bytes"],
        "cpu_kv_cache_size_tokens": "None",
        "eviction_policy": "s3fifo",
        "slots": "exact",
    }
    assert second == {
        "tier": "1:disk",
        "capacity": tier["capacity"],
        "eviction_policy": "th",
        "offload_policy": "request_level",
    }
    declared = type(one.spec).config_info_keys(one.spec.extra_config)
    assert set(declared) == set(first) | set(second)


def test_a_worker_knows_how_much_of_a_chunks_head_no_hit_asks_for(rig: Callable[..., Rig]) -> None:
    window = GroupGeometry(0, "Spec", 2, 16, 1, padded=False, window=32, kept=32)
    made = rig(blocks_per_chunk=4, **{geometry.KEY: [asdict(window)]})
    rows = [RowSpec([name], [0], [0], [0]) for name in (b"a", b"b")]
    for job_id, first in enumerate([2, 3]):
        blocks = list(range(first, 4))
        job = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[first])
        made.worker.submit_store(job_id, job, rows[job_id])
    assert made.worker.take_refused() == {b"b"}


def test_the_start_says_what_fits(
    rig: Callable[..., Rig], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(exact.told, "info", lambda text, *more: said.append(text % more))
    rig((3, 1), tiers=(tier_on(root, "exact"),))
    assert any("requested" in line and "usable" in line for line in said)
    assert any("tier 'disk' below" in line for line in said)
    assert said[-1].endswith("stored are prompts and answers (offload_prompt_only)")


def test_a_tier_without_an_identity_is_off_and_the_cpu_tier_works(
    rig: Callable[..., Rig], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstrata.vllm import manifest

    def refuse(*_: Any) -> Any:
        raise manifest.PersistenceError("no weights")

    monkeypatch.setattr(manifest, "build", refuse)
    made = rig((2,), tiers=(tier_on(root, "exact"),))
    assert made.manager.secondary_tiers == ()
    made.store(2)
    assert made.load(2) == 2
    assert not list(root.iterdir())
    stats = made.manager.get_stats()
    assert stats is not None
    assert "vllm:kvstrata_tier_disabled" in str(stats.reduce())


def test_a_tier_whose_place_cannot_work_fails_the_start_and_leaves_nothing_open(
    rig: Callable[..., Rig], root: Path
) -> None:
    file = root.parent / "file"
    file.write_text("")
    with pytest.raises(kvstrata.ConfigError, match="file"):
        rig((2,), tiers=(tier_on(root, "exact"), tier_on(file, "exact")))
    rig((2,), tiers=(tier_on(root, "exact"),)).store(1)


def test_memory_that_holds_no_row_is_refused(rig: Callable[..., Rig]) -> None:
    with pytest.raises(kvstrata.ConfigError, match=r"cpu_bytes_to_use.*4096.*no row of 7680"):
        rig((6,), cpu_bytes_to_use=4096)


def test_under_another_connector_slots_have_one_size_and_one_line_says_what_is_lost(
    engine_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(compat, "log_once", lambda _level, text: said.append(text))
    extra = {"spec_name": "KVStrataSpec", "spec_module_path": "kvstrata.vllm.spec"}
    one = OffloadingSpecFactory.create_spec(offloading_config(engine_id, [], extra=extra))
    assert said == []
    config = offloading_config(engine_id, [], group_ids=(0, 1), extra=extra)
    spec = OffloadingSpecFactory.create_spec(config)
    (line,) = said
    assert "size of the largest KV cache group" in line
    assert "kv_connector=KVStrataConnector" in line
    assert (one.stack, spec.stack) == (None, None)
    manager = spec.get_manager()
    assert isinstance(manager, TieringOffloadingManager)
    manager.shutdown()


def test_metrics_of_both_ways_are_declared_whatever_runs() -> None:
    from kvstrata.vllm import metrics
    from kvstrata.vllm.spec import KVStrataSpec

    declared = KVStrataSpec.build_metric_definitions({"cpu_bytes_to_use": 1})
    names = {metric.name for metric in (*metrics.METRICS, *metrics.CPU_METRICS)}
    assert names <= set(declared)
