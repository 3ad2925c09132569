"""The object tier under vLLM's own `TieringOffloadingSpec`, on a real server of S3's protocol."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from plugin_support.configs import disk_entry
from plugin_support.stock_stack import END, key, open_stack
from vllm.v1.kv_offload.base import LookupResult

import kvstrata
from kvstrata.cli.demo import bucket as demo

if TYPE_CHECKING:
    from collections.abc import Iterator

TOP = Path(__file__).parents[3]
PROGRAMS = Path(os.environ.get("KVSTRATA_TEST_SERVERS", TOP / ".cache" / "servers" / "bin"))

pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.skipif(not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[demo.Bucket]:
    weed = PROGRAMS / "weed"
    if not weed.exists():
        pytest.fail(f"{weed} is missing: scripts/env.sh servers installs it")
    with demo.serving(weed, tmp_path_factory.mktemp("weed"), lambda _: None) as bucket:
        yield bucket


@pytest.fixture
def entry(server: demo.Bucket, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An entry whose prefix no other test has."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAKVSTRATATEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret-of-these-tests")
    return {
        "type": "kvstrata_object",
        "url": f"s3://{demo.NAME}/{uuid.uuid4().hex}",
        "endpoint": server.endpoint,
        "allow_http": True,
        # A busy machine may answer late.
        "lookup_wait_s": 40.0,
        "model_identity": "test",
    }


def test_a_row_comes_back_from_the_bucket_after_the_primary_evicted_it_and_in_another_manager(
    engine_id: str, entry: dict[str, Any]
) -> None:
    stack = open_stack(engine_id, entry, chunks=4, group_ids=(1, 3))
    stack.store(stack.request("a"), {key(1, 1): 7, key(1, 3): 9})
    stack.settle()
    stack.store(stack.request("b"), {key(n, 1): n for n in range(10, 14)})
    stack.settle()
    again = stack.request("c")
    assert stack.manager.primary_tier.lookup(key(1, 1), again) is LookupResult.MISS
    assert stack.look(again, key(1, 1)) is LookupResult.HIT
    assert stack.load(again, key(1, 1)) == 7
    stack.manager.shutdown()
    other = open_stack(engine_id, entry, group_ids=(1, 3))
    context = other.request("d")
    assert other.look(context, key(1, 3)) is LookupResult.HIT
    assert other.load(context, key(1, 3)) == 9
    assert other.look(context, key(2, 1)) is LookupResult.MISS
    assert other.tier.faults.total == 0
    other.manager.shutdown()
    stranger = open_stack(engine_id, {**entry, "model_identity": "another"}, group_ids=(1, 3))
    assert stranger.look(stranger.request("e"), key(1, 3)) is LookupResult.MISS
    stranger.manager.shutdown()


def test_below_a_disk_tier_the_bucket_has_what_a_wiped_disk_has_not(
    engine_id: str, entry: dict[str, Any], tmp_path: Path
) -> None:
    root = tmp_path / "kv"
    root.mkdir(mode=0o700)
    disk = disk_entry(root.as_uri())
    stack = open_stack(engine_id, disk, entry)
    stack.store(stack.request("a"), {key(n): n + 1 for n in range(4)})
    stack.settle()
    stack.manager.shutdown()
    shutil.rmtree(root)
    root.mkdir(mode=0o700)
    again = open_stack(engine_id, disk, entry)
    context = again.request("b")
    for number in range(4):
        assert again.look(context, key(number)) is LookupResult.HIT
        assert again.load(context, key(number)) == number + 1
    below_disk, below = again.manager.secondary_tiers
    assert below_disk._tier.stats()["load_outcomes"]["ok"] == 0
    assert below._tier.stats()["load_outcomes"]["ok"] == 4
    again.manager.shutdown()


def test_a_server_that_is_gone_costs_misses_and_never_raises_or_blocks(
    engine_id: str, entry: dict[str, Any]
) -> None:
    gone = {**entry, "endpoint": "http://127.0.0.1:9", "required": False, "lookup_wait_s": 0.2}
    begun = time.monotonic()
    stack = open_stack(engine_id, gone, chunks=4)
    assert time.monotonic() - begun < 30
    context = stack.request("a")
    assert stack.look(context, key(1)) is LookupResult.MISS
    stack.store(context, {key(1): 7})
    stack.settle()
    stack.manager.on_schedule_end(END)
    assert stack.tier._tier.stats()["health"] == "unusable"
    assert stack.tier._tier.stats()["store_outcomes"]["dropped"] == 1
    assert stack.tier.faults.total == 0
    stack.manager.shutdown()
