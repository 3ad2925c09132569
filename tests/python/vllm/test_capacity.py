"""How many keys a budget holds, beside what vLLM's slots of one size hold of the same groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from plugin_support.configs import offloading_config
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvstrata
from kvstrata._native import CpuTier
from kvstrata.vllm import exact, geometry

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.skipif(
    not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built"
)

KIB, MIB = 1 << 10, 1 << 20


def keys_of(number: int, groups: int) -> list[Any]:
    """One chunk's keys, one per group."""
    return [make_offload_key(number.to_bytes(32, "big"), group) for group in range(groups)]


class Held:
    """An arena filled with chunks of all groups, until something has to go."""

    def __init__(self, budget: int, bytes_per_block: Sequence[int], blocks_per_chunk: int) -> None:
        byte_map = {
            "groups": [
                {"id": number, "bytes_per_block": size}
                for number, size in enumerate(bytes_per_block)
            ]
        }
        self.rows = geometry.row_bytes(byte_map, 1, blocks_per_chunk)
        self.budget = budget
        self.tier = CpuTier(budget, self.rows)
        self.chunks = 0
        while True:
            prepared = self.tier.prepare_store(keys_of(self.chunks, len(self.rows)))
            if prepared is None or prepared[3]:
                break
            self.tier.complete_store(keys_of(self.chunks, len(self.rows)))
            self.chunks += 1
        self.tier.reset()
        self.tier.flushed()
        for number in range(self.chunks):
            assert self.store(keys_of(number, len(self.rows))) == 0

    def store(self, keys: list[Any]) -> int:
        """Store rows; how many went for them."""
        prepared = self.tier.prepare_store(keys)
        assert prepared is not None
        self.tier.complete_store(keys)
        return len(prepared[3])

    @property
    def payload(self) -> float:
        """The part of the budget that is KV data."""
        return float(self.tier.stats()["payload_bytes"]) / self.budget


def vllms_slots(budget: int, bytes_per_block: int, blocks_per_chunk: int, engine: str) -> int:
    """Slots that vLLM's spec makes of the budget, each for `bytes_per_block` of any group."""
    config = offloading_config(
        engine,
        [],
        bytes_per_block=bytes_per_block,
        blocks_per_chunk=blocks_per_chunk,
        extra={"cpu_bytes_to_use": budget},
    )
    return int(TieringOffloadingSpec(config).num_chunks)


def say(
    what: str, budget: int, keys: int, payload: float, vllms: dict[str, tuple[int, float]]
) -> None:
    print(f"{what}: budget {budget}")
    print(f"  slots that fit: {keys} keys, {payload:.1%} of the bytes are payload")
    for name, (count, part) in vllms.items():
        print(f"  {name}: {count} keys, {part:.1%}")


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_eight_equal_groups_hold_every_key_there_is_room_for(
    engine_id: str, blocks_per_chunk: int
) -> None:
    groups = [64 * KIB] * 8
    row = groups[0] * blocks_per_chunk
    budget = 16 * row
    held = Held(budget, groups, blocks_per_chunk)
    stats = held.tier.stats()
    largest = vllms_slots(budget, max(groups), blocks_per_chunk, engine_id)
    all_groups = vllms_slots(budget, sum(groups), blocks_per_chunk, engine_id)
    say(
        f"8 equal groups, {blocks_per_chunk} blocks per chunk",
        budget,
        int(stats["rows"]),
        held.payload,
        {
            "slots for the largest group": (largest, largest * row / budget),
            "slots for all groups": (all_groups, all_groups * row / budget),
        },
    )
    assert (stats["rows"], largest, all_groups) == (16, 16, 2)
    assert held.payload == 1.0


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
@pytest.mark.parametrize(
    ("name", "groups", "budget"),
    [
        ("7 groups of 1 MiB and one of 64 KiB", [MIB] * 7 + [64 * KIB], 710 * MIB),
        ("10 and 4 layers of 64 KiB", [640 * KIB, 256 * KIB], 512 * MIB),
        ("10 and 4 layers of 36 KiB", [360 * KIB, 144 * KIB], 512 * MIB),
        ("full, window and a state of 384 bytes", [128 * KIB, 128 * KIB, 384], 64 * MIB),
    ],
)
def test_unequal_groups_leave_no_air(
    engine_id: str, name: str, groups: list[int], budget: int, blocks_per_chunk: int
) -> None:
    budget *= blocks_per_chunk
    held = Held(budget, groups, blocks_per_chunk)
    keys = held.chunks * len(groups)
    slots = vllms_slots(budget, max(groups), blocks_per_chunk, engine_id)
    chunks = slots // len(groups)
    theirs = chunks * sum(groups) * blocks_per_chunk / budget
    say(
        f"{name}, {blocks_per_chunk} blocks per chunk",
        budget,
        keys,
        held.payload,
        {"slots for the largest group": (chunks * len(groups), theirs)},
    )
    assert held.payload >= 0.98
    assert held.chunks >= chunks


@pytest.mark.parametrize("part", [0.05, 0.25, 0.5])
@pytest.mark.parametrize(
    "groups", [[640 * KIB, 256 * KIB], [256 * KIB, 640 * KIB], [MIB, 64 * KIB]]
)
def test_a_group_that_is_stored_takes_over_what_another_does_not_use(
    groups: list[int], part: float
) -> None:
    budget = 256 * MIB
    tier = CpuTier(budget, dict(enumerate(groups)))
    number = 0
    while True:
        prepared = tier.prepare_store(keys_of(number, 1))
        assert prepared is not None
        tier.complete_store(keys_of(number, 1))
        number += 1
        if prepared[3]:
            break
    wanted = int(part * budget)
    stored = [keys_of(number, 2)[1] for number in range(-(-2 * wanted // groups[1]))]
    for start in range(0, len(stored), 4):
        job = stored[start : start + 4]
        assert tier.prepare_store(job) is not None
        tier.complete_store(job)
    resident = sum(found is True for found in tier.lookup(stored)) * groups[1]
    print(f"{part:.0%} of the arena wanted: {resident / budget:.1%} resident after twice that")
    assert resident >= wanted


def test_a_tiers_alignment_is_taken_only_where_it_costs_little() -> None:
    class Native:
        def __init__(self, align: int) -> None:
            self._align = align

        def capabilities(self) -> dict[str, Any]:
            return {"slot_align": self._align}

    disk = [Native(4096)]
    assert exact.slot_align({0: 64 * KIB, 1: 256 * KIB}, disk) == 4096
    assert exact.slot_align({0: 64 * KIB, 1: 384}, disk) == 64
    assert exact.slot_align({0: 100 * 4096 + 8}, disk) == 4096
    assert exact.slot_align({0: 10 * 4096 + 8}, disk) == 64
    assert exact.slot_align({0: 64 * KIB}, [Native(1), Native(512)]) == 512
    assert exact.slot_align({0: 64 * KIB}, []) == 64
