"""`kvstrata._native.CpuTier`: what Python sees of the CPU tier's index."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest

import kvstrata
from kvstrata._native import CpuTier

ROW = 1024


def keys_of(*numbers: int, group: int = 0) -> list[bytes]:
    return [number.to_bytes(32, "big") + group.to_bytes(4, "big") for number in numbers]


def stored(tier: CpuTier, keys: list[bytes]) -> list[bytes]:
    prepared = tier.prepare_store(keys)
    assert prepared is not None
    tier.complete_store(keys)
    return prepared[3]


def test_keys_get_places_and_evicted_keys_come_back_as_bytes() -> None:
    tier = CpuTier(4 * ROW, ROW)
    assert tier.prepare_store(keys_of(1, 2, 1, 3)) == (
        [0, 1, 3],
        [0, ROW, 2 * ROW],
        [0, 1, 2],
        [],
    )
    assert tier.lookup(keys_of(1, 9)) == [None, False]
    assert tier.complete_store(keys_of(1, 2, 3, 9)) == [0, 1, 2]
    assert tier.lookup(keys_of(1, 9)) == [True, False]
    assert tier.prepare_load(keys_of(3, 1)) == [2 * ROW, 0]
    assert tier.prepare_load(keys_of(3, 9)) is None
    assert stored(tier, keys_of(4, 5)) == keys_of(2)
    assert tier.prepare_store(keys_of(6, 7, 8)) is None


def test_uses_by_tiers_below_have_handles() -> None:
    tier = CpuTier(2 * ROW, ROW)
    prepared = tier.prepare_store(keys_of(1, 2), below=True)
    assert prepared is not None
    _, offsets, handles, _ = prepared
    tier.let_go(handles[:1])
    tier.let_go(handles[1:], success=False)
    assert tier.lookup(keys_of(1, 2)) == [True, False]
    ((handle, offset), nothing) = tier.hold_ready(keys_of(1, 2))  # type: ignore[misc]
    assert (offset, nothing) == (offsets[0], None)
    tier.reset()
    assert tier.stats()["orphaned_rows"] == 1
    tier.flushed()
    assert tier.stats()["orphaned_rows"] == 1
    tier.let_go([handle])
    assert tier.stats()["orphaned_rows"] == 0


def test_the_geometry_says_how_the_arena_is_cut() -> None:
    tier = CpuTier(64 * ROW + 100, {0: 1000, 7: 4 * ROW}, align=512)
    assert tier.geometry() == {
        "arena_bytes": 64 * ROW + 100,
        "align": 512,
        "slab_bytes": 4 * ROW,
        "slabs": 16,
        "tail_bytes": 100,
        "slot_bytes": {"0": 1024, "7": 4 * ROW},
        "rows": {"0": 64, "7": 16},
    }


def test_statistics_count_groups_bytes_and_what_happened() -> None:
    tier = CpuTier(8 * ROW, {0: 1000, 3: 2000})
    stored(tier, keys_of(1, 2) + keys_of(1, group=3))
    tier.prepare_load(keys_of(1))
    tier.lookup(keys_of(1, 5))
    stats = tier.stats()
    assert stats["rows_of_group"] == {"0": 2, "3": 1}
    assert stats["payload_bytes"] == 4000
    assert stats["slot_bytes"] == 2 * 1024 + 2048
    assert stats["idle_bytes"] == 4 * ROW
    named = {"rows": 3, "rows_in_use": 1, "writing_rows": 0, "lookups": 2, "lookup_hits": 1}
    assert {name: stats[name] for name in named} == named
    assert (stats["stored_keys"], stats["loaded_keys"], stats["policy"]) == (3, 1, "lru")


@pytest.mark.parametrize(
    ("arguments", "named", "why"),
    [
        ((100, ROW), {}, "100 bytes hold no row of 1024 bytes"),
        ((ROW, {}), {}, "slots without a row size"),
        ((ROW, 0), {}, "a row of 0 bytes"),
        ((ROW, 10), {"align": 3}, "alignment of 3 bytes"),
        ((ROW, 10), {"policy": "fifo"}, "fifo"),
    ],
)
def test_what_cannot_work_is_refused(
    arguments: tuple[Any, ...], named: dict[str, Any], why: str
) -> None:
    with pytest.raises(kvstrata.ConfigError, match=why):
        CpuTier(*arguments, **named)


@pytest.mark.parametrize("call", ["lookup", "prepare_store", "complete_store", "forget"])
def test_what_is_no_key_is_refused_with_its_position(call: str) -> None:
    tier = CpuTier(ROW, ROW)
    with pytest.raises(kvstrata.ArgumentError, match=r"keys\[1\]"):
        getattr(tier, call)([*keys_of(1), b"short"])
    with pytest.raises(kvstrata.ArgumentError, match="sequence of keys, each of type bytes"):
        getattr(tier, call)(b"one key")


def test_a_group_without_a_size_is_refused() -> None:
    with pytest.raises(kvstrata.ArgumentError, match="group 5"):
        CpuTier(ROW, ROW).prepare_store(keys_of(1, group=5))


def test_it_belongs_to_one_process() -> None:
    tier = CpuTier(ROW, ROW)
    for give in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            give(tier)


def test_threads_share_it() -> None:
    tier = CpuTier(64 * ROW, ROW)

    def work(first: int) -> None:
        for number in range(first, first + 400):
            keys = keys_of(number)
            if tier.prepare_store(keys) is not None:
                tier.complete_store(keys)
            tier.lookup(keys)

    threads = [threading.Thread(target=work, args=(1000 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = tier.stats()
    assert (stats["rows"], stats["rows_in_use"]) == (64, 0)
    assert stats["stored_keys"] == 1600
