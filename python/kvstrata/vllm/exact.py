"""The parts of :class:`kvstrata.vllm.spec.KVStrataSpec` where slots fit their group.

The arena is made by rank 0's worker, before there is a scheduler; everyone else joins it. The
manager serves from the moment all ranks have said how their bytes lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadPolicy

import kvstrata
from kvstrata._native import CpuTier
from kvstrata.vllm import configinfo, geometry, manifest, metrics, options, table
from kvstrata.vllm.below import TierBelow
from kvstrata.vllm.manager import KVStrataManager
from kvstrata.vllm.opened import Opened

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingMetricMetadata

    from kvstrata.memory.arena import Arena
    from kvstrata.vllm.rowworker import KVStrataRowWorker
    from kvstrata.vllm.stackconfig import StackConfig

logger = init_logger(__name__)
# What everybody is to see: vLLM shows lines below warnings of loggers under its own name only.
told = init_logger("vllm.kvstrata")

# In the extra configuration, put there by our connector: how slots are made, and the longest
# request in tokens.
KEY = "kvstrata_slots"
MAX_TOKENS_KEY = "kvstrata_max_tokens"

DISK_TYPES = ("kvstrata_disk", "disk")
OBJECT_TYPES = ("kvstrata_object", "object")
_OF_STOCK_TIERS = frozenset({"backpressure", "module_path"})
JOIN_SECONDS = 120.0
SLOT_ALIGN = 64
_PAGE = 4096
# A tier's alignment is not worth more than this part of a row.
_PADDING_MAX = 0.02
# Part of the arena that may wait for one tier below.
_STORE_PART = 4


@dataclass(frozen=True)
class Rows:
    """Payload bytes of rows per group id, and who shares them."""

    row_bytes: dict[int, int]
    byte_map: dict[str, Any]


def arena_bytes(stack: StackConfig) -> int:
    """Bytes of the arena: what was asked for, in whole pages."""
    size = stack.cpu_bytes // _PAGE * _PAGE
    if size < _PAGE:
        msg = f"'cpu_bytes_to_use' is {stack.cpu_bytes}, less than a page of memory"
        raise kvstrata.ConfigError(msg)
    return size


def ranks_of(spec: Any) -> int:
    """How many ranks' parts lie side by side in a row; 1 where all keep one copy together."""
    if spec.config.canonical_layout or spec.replicated_layout:
        return 1
    return int(spec.config.parallel.world_size)


def make_manager(spec: Any) -> KVStrataManager:
    """A manager that serves once it is opened."""
    stack: StackConfig = spec.stack
    tokens = {
        int(group.group_id): int(group.tokens_per_block) * spec.blocks_per_chunk
        for group in spec.config.groups
    }
    return KVStrataManager(
        tokens,
        lambda byte_map: open_below(spec, stack, byte_map),
        events=spec.kv_events_config.enable_kv_cache_events,
        limits=stack.loads,
    )


def make_worker(spec: Any, kv_caches: CanonicalKVCaches, stack: StackConfig) -> KVStrataRowWorker:
    """A worker; rank 0's makes the arena.

    # Errors
    :class:`kvstrata.memory.layout.LayoutError` where the tensors do not fit,
    :class:`kvstrata.ConfigError` where the arena cannot be had.
    """
    from kvstrata.vllm.rowworker import KVStrataRowWorker

    parallel = spec.config.parallel
    groups = spec.pages(kv_caches).groups
    ranks = ranks_of(spec)
    size = arena_bytes(stack)
    part = max(sum(ref.page_bytes for ref in refs) for refs in groups) * spec.blocks_per_chunk
    row = -(-part * ranks // SLOT_ALIGN) * SLOT_ALIGN
    if row > size:
        msg = f"'cpu_bytes_to_use' is {stack.cpu_bytes}: that holds no row of {row} bytes"
        raise kvstrata.ConfigError(msg)
    # Ranks that keep one copy together write all of a row, and test at the same time.
    place = parallel.rank * row if ranks == 1 else 0
    spare = geometry.spare_heads(spec.extra_config, spec.blocks_per_chunk)
    arena = _arena(spec, stack, size)
    try:
        return KVStrataRowWorker(
            kv_caches,
            groups,
            arena,
            blocks_per_chunk=spec.blocks_per_chunk,
            rank=0 if ranks == 1 else parallel.rank,
            ranks=ranks,
            self_test_at=place if place + row <= size else None,
            takes_pages=parallel.rank == 0,
            large_pages=stack.large_pages,
            spare_heads=[spare.get(int(group.group_id), 0) for group in spec.config.groups],
        )
    except BaseException:
        arena.close()
        raise


def _arena(spec: Any, stack: StackConfig, size: int) -> Arena:
    from kvstrata.memory.arena import Arena

    name = str(spec.config.engine_id)
    try:
        if spec.config.parallel.rank == 0:
            return Arena.create(size, name, numa_policy=stack.numa)
        return join(name)
    except ValueError as error:
        raise kvstrata.ConfigError(str(error)) from error


def join(name: str) -> Arena:
    """The arena that rank 0 made.

    # Errors
    :class:`kvstrata.ConfigError` where nobody offers it in time.
    """
    from kvstrata.memory.arena import Arena

    try:
        return Arena.join(name, JOIN_SECONDS)
    except ValueError as error:
        raise kvstrata.ConfigError(str(error)) from error


def open_below(spec: Any, stack: StackConfig, byte_map: dict[str, Any]) -> Opened:
    """What a manager works on: the arena, the tiers below and the CPU tier's index.

    # Errors
    :class:`kvstrata.ConfigError` where something configured cannot work.
    """
    rows = Rows(geometry.row_bytes(byte_map, ranks_of(spec), spec.blocks_per_chunk), byte_map)
    arena = join(str(spec.config.engine_id))
    tiers: list[TierBelow] = []
    given: list[tuple[str, options.TierOptions]] = []
    off: list[str] = []
    notes: list[str] = []
    try:
        for entry in stack.tiers:
            below = _open_tier(spec, entry, rows, arena.buffer, notes)
            if below is None:
                off.append(str(entry["type"]))
            else:
                tiers.append(below)
                given.append((below.name, _parse(entry)))
        align = slot_align(rows.row_bytes, (tier.native for tier in tiers))
        cpu = CpuTier(arena.nbytes, rows.row_bytes, align=align, **stack.cpu.options())
    except BaseException:
        for tier in tiers:
            tier.close()
        arena.close()
        raise
    found = capacity(stack, cpu)
    _say(spec, stack, found, notes)
    longest = int(spec.extra_config.get(MAX_TOKENS_KEY, 0))
    groups = geometry.groups_of(spec.extra_config)
    tokens = found.tokens(groups, longest, spec.blocks_per_chunk) if groups and longest else None
    info = configinfo.of_cpu(stack, found, tokens, spec.blocks_per_chunk)
    facts = (info, *configinfo.of_tiers(given))
    return Opened(cpu, tuple(tiers), arena.close, tuple(off), facts)


def capacity(stack: StackConfig, cpu: CpuTier) -> table.Capacity:
    """Slots of the CPU tier for the table."""
    cut = cpu.geometry()
    return table.Capacity(
        stack.cpu_bytes,
        int(cut["arena_bytes"]),
        {int(group_id): int(size) for group_id, size in cut["slot_bytes"].items()},
        {int(group_id): int(rows) for group_id, rows in cut["rows"].items()},
    )


def slot_align(row_bytes: Mapping[int, int], natives: Iterable[Any]) -> int:
    """What the tiers below ask for, where that does not cost too much of a row."""
    asked = max((int(native.capabilities()["slot_align"]) for native in natives), default=1)
    lost = max((-size % asked / size for size in row_bytes.values()), default=0.0)
    return asked if asked > SLOT_ALIGN and lost <= _PADDING_MAX else SLOT_ALIGN


def _open_tier(
    spec: Any, entry: dict[str, Any], rows: Rows, buffer: memoryview, notes: list[str]
) -> TierBelow | None:
    kind = str(entry["type"])
    parsed = _parse(entry)
    try:
        identity = manifest.build(spec, parsed.model_identity, rows.byte_map)
    except manifest.PersistenceError as reason:
        logger.error(  # noqa: TRY400 -- one line for the operator
            "kvstrata tier %r persists nothing and answers every lookup with a miss: %s",
            kind,
            reason,
        )
        notes.append(f"tier {kind!r}: off, {reason}")
        return None
    native = kvstrata.open_tier(
        parsed.url,
        manifest=identity,
        row_bytes=rows.row_bytes,
        arena=buffer,
        honours_busy=True,
        **parsed.open_tier,
    )
    limit = parsed.open_tier.get("capacity", "the bucket's own")
    notes.append(f"tier {kind!r} below: {parsed.url}, capacity {limit}")
    return TierBelow(
        kind,
        native,
        parsed.locality,
        wants_events=parsed.enable_kv_events and spec.kv_events_config.enable_kv_cache_events,
        store_bytes_max=len(buffer) // _STORE_PART,
        is_request_level=parsed.offload_policy is OffloadPolicy.REQUEST_LEVEL,
    )


def check_tiers(stack: StackConfig) -> None:
    """Refuse entries of `tiers` that no tier of ours can be made from.

    # Errors
    :class:`kvstrata.ConfigError` naming the type or the option.
    """
    for entry in stack.tiers:
        if entry["type"] not in (*DISK_TYPES, *OBJECT_TYPES):
            msg = (
                f"'tiers' has an entry of type {entry['type']!r}; kvstrata's own are "
                f"{', '.join(map(repr, (*DISK_TYPES, *OBJECT_TYPES)))}, and vLLM's go to "
                "'secondary_tiers'"
            )
            raise kvstrata.ConfigError(msg)
        for name in _OF_STOCK_TIERS.intersection(entry):
            msg = f"{name!r} in an entry of 'tiers' is for vLLM's tiers, in 'secondary_tiers'"
            raise kvstrata.ConfigError(msg)
        _parse(entry)


def _parse(entry: dict[str, Any]) -> options.TierOptions:
    given = {name: value for name, value in entry.items() if name != "type"}
    return options.parse(given, set(entry), object_tier=entry["type"] in OBJECT_TYPES)


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """VLLM's declarations of what manager and tiers report."""
    return {**metrics.cpu_definitions(), **metrics.definitions()}


def _say(spec: Any, stack: StackConfig, found: table.Capacity, notes: Sequence[str]) -> None:
    kept = "prompts only" if stack.offload_prompt_only else "prompts and answers"
    text = table.lines(
        found,
        geometry.groups_of(spec.extra_config),
        geometry.support_of(spec.extra_config),
        blocks_per_chunk=spec.blocks_per_chunk,
        max_tokens=int(spec.extra_config.get(MAX_TOKENS_KEY, 0)),
        notes=[*notes, f"stored are {kept} (offload_prompt_only)"],
    )
    for line in text:
        told.info("kvstrata: %s", line)
