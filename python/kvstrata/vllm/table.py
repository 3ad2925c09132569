"""What the start says in one table: how much fits, what is shared, what is left out and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstrata.vllm.geometry import STORED
from kvstrata.vllm.sizes import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstrata.vllm.geometry import GroupGeometry, Support

TYPICAL_TOKENS = 8192


@dataclass(frozen=True)
class Capacity:
    """Slots and tokens of the CPU tier."""

    requested_bytes: int
    usable_bytes: int
    # Per group id, bytes from one slot to the next, and slots when all are this group's.
    slot_bytes: Mapping[int, int]
    slots: Mapping[int, int]

    def tokens(self, groups: Sequence[GroupGeometry], length: int, blocks_per_chunk: int) -> int:
        """Tokens that fit when all requests are so long; every group keeps what it needs."""
        if length < 1 or not groups:
            return 0
        needed = sum(
            group.chunks(length, blocks_per_chunk) * self.slot_bytes[group.group_id]
            for group in groups
        )
        return self.usable_bytes * length // needed


def lines(
    capacity: Capacity,
    groups: Sequence[GroupGeometry],
    support: Sequence[Support],
    *,
    blocks_per_chunk: int,
    max_tokens: int,
    notes: Sequence[str] = (),
) -> list[str]:
    """The table, line by line."""
    asked, usable = shown(capacity.requested_bytes), shown(capacity.usable_bytes)
    made = [f"CPU tier: {asked} requested, {usable} usable"]
    lengths = sorted({min(TYPICAL_TOKENS, max_tokens), max_tokens} if max_tokens > 0 else set())
    fits = [
        f"{capacity.tokens(groups, length, blocks_per_chunk)} tokens of requests of {length}"
        for length in lengths
    ]
    if fits:
        made.append("fits " + " or ".join(fits))
    by_id = {group.group_id: group for group in groups}
    for one in support:
        group = by_id.get(one.group_id)
        if one.verdict == STORED and group is not None:
            made.append(_stored(capacity, group))
        else:
            made.append(f"group {one.group_id} ({one.kind}): {one.verdict}, {one.reason}")
    shared = _shared(capacity, groups)
    if shared:
        made.append(shared)
    return [*made, *notes]


def _stored(capacity: Capacity, group: GroupGeometry) -> str:
    reach = "" if group.window is None else f", keeps {group.window or 'one state'}"
    padded = ", page padding counted" if group.padded else ""
    return (
        f"group {group.group_id} ({group.kind}, {group.layers} layers, "
        f"{group.tokens_per_block} tokens per block{reach}): "
        f"{shown(capacity.slot_bytes[group.group_id])} per slot, "
        f"{capacity.slots[group.group_id]} slots if all are its own{padded}"
    )


def _shared(capacity: Capacity, groups: Sequence[GroupGeometry]) -> str:
    by_size: dict[int, list[int]] = {}
    for group in groups:
        by_size.setdefault(capacity.slot_bytes[group.group_id], []).append(group.group_id)
    shared = [f"groups {ids}" for ids in by_size.values() if len(ids) > 1]
    if len(by_size) > 1:
        return (
            f"{' and '.join(shared)} share their slots; " if shared else ""
        ) + "memory moves between slot sizes in slabs"
    return f"{shared[0]} share all slots" if shared else ""
