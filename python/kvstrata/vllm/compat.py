"""Everything that differs between the vLLM releases kvstrata runs on.

Nothing else in kvstrata asks for a version.

Releases from :data:`OLDEST` on work; those behind :data:`NEWEST_KNOWN` are used with one warning,
because a release that changes the bytes of a KV block changes the namespace too (the release is
part of the manifest).
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import vllm
from vllm.logger import init_logger

import kvstrata
from kvstrata.vllm import logs

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

logger = init_logger(__name__)

OLDEST = (0, 32)
NEWEST_KNOWN = (0, 33)

_warned: set[str] = set()


def log_once(level: int, message: str) -> None:
    """Log a message the first time it is given in this process."""
    if message not in _warned:
        _warned.add(message)
        logger.log(level, "%s", message)


def release(version: str | None = None) -> tuple[int, int] | None:
    """Major and minor number of a version; `None` for one without (a build from a checkout)."""
    text = str(vllm.__version__) if version is None else version
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None or found.groups() == ("0", "0"):
        return None
    return int(found[1]), int(found[2])


def version() -> str:
    """The whole version."""
    return str(vllm.__version__)


def release_name() -> str:
    """The release as the manifest has it: ``0.32``; the whole version where it has no numbers."""
    numbers = release()
    return str(vllm.__version__) if numbers is None else f"{numbers[0]}.{numbers[1]}"


def version_problem(version: str | None = None) -> str | None:
    """Why this vLLM cannot be used, or `None`. Warns once about one that is newer than known."""
    numbers = release(version)
    name = str(vllm.__version__) if version is None else version
    if numbers is not None and numbers < OLDEST:
        return f"kvstrata needs vLLM >= {OLDEST[0]}.{OLDEST[1]}, this is {name}"
    if numbers is None or numbers > NEWEST_KNOWN:
        newest = f"{NEWEST_KNOWN[0]}.{NEWEST_KNOWN[1]}"
        log_once(30, f"kvstrata knows vLLM up to {newest}, this is {name}: untested together")
    return None


def require_version() -> None:
    """Join vLLM's log; raise :class:`kvstrata.ConfigError` for a :func:`version_problem`."""
    logs.join()
    problem = version_problem()
    if problem is not None:
        raise kvstrata.ConfigError(problem)


def open_region(spec: Any, rank: int) -> SharedOffloadRegion:
    """Map vLLM's shared region of a tiering spec for one rank.

    The arguments are the five that every supported release takes.

    # Errors
    :class:`kvstrata.ConfigError` where the region there has another size than this rank computes:
    ranks that disagree about the row size would read each other's bytes.
    """
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    region = SharedOffloadRegion(
        engine_id=spec.config.engine_id,
        num_chunks=spec.num_chunks,
        rank=rank,
        kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
        cpu_page_size=spec.cpu_page_size_per_worker,
    )
    segments = getattr(region, "_segments", None)
    single = segments is None or len(segments) == 1
    if single and region.fd is not None:
        size = os.fstat(region.fd).st_size
        if size != region.total_size_bytes:
            region.cleanup()
            msg = (
                f"the shared offload region has {size} bytes, rank {rank} needs "
                f"{region.total_size_bytes}: the ranks disagree about the size of a chunk"
            )
            raise kvstrata.ConfigError(msg)
    return region


def pin_region(region: SharedOffloadRegion) -> bool:
    """Register the region with the accelerator, as vLLM's worker does.

    `False` leaves it pageable: slower, not wrong.
    """
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda_alike() or current_platform.is_xpu()):
        return False
    try:
        from vllm.v1.kv_offload.cpu.gpu_worker import pin_mmap_region

        pin_mmap_region(region)
    except Exception:
        logger.warning("kvstrata: the offload region stays pageable", exc_info=True)
    return bool(region.is_pinned)


def batch_copy() -> Callable[[Any, Any, Any], None] | None:
    """VLLM's call that copies many pieces at once between host and device, where it has one."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cuda_alike():
        return None
    operators = getattr(torch.ops, "_C_cache_ops", None)
    found = getattr(operators, "swap_blocks_batch", None)
    if found is None:
        log_once(30, "kvstrata: this vLLM copies no batches; each page is a copy of its own")
        return None
    # The last argument would let the device read sources before earlier work on the stream is done.
    return lambda sources, targets, sizes: found(sources, targets, sizes, False)  # noqa: FBT003


def slot_bytes_of(view: memoryview) -> int:
    """Bytes from one chunk to the next in a primary tier's view."""
    if view.strides is None:
        msg = "the primary tier's view has no strides"
        raise kvstrata.ConfigError(msg)
    return int(view.strides[0])


def group_ids_of(spec: OffloadingSpec) -> tuple[int, ...]:
    """VLLM's original ids of the groups that are offloaded: the ids inside an OffloadKey."""
    return tuple(int(group.group_id) for group in spec.config.groups)


def register_names(
    *,
    tiers: dict[str, tuple[str, str]],
    specs: dict[str, tuple[str, str]],
    connectors: dict[str, tuple[str, str]],
    policies: dict[str, tuple[str, str]],
) -> None:
    """Add names (to module and class) to vLLM's registries; those there already stay."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    for register, names in (
        (SecondaryTierFactory.register_tier, tiers),
        (OffloadingSpecFactory.register_spec, specs),
        (KVConnectorFactory.register_connector, connectors),
        (CachePolicyFactory.register_cache_policy, policies),
    ):
        for name, (module, cls) in names.items():
            try:
                register(name, module, cls)
            except ValueError:
                logger.debug("kvstrata: %s is registered already", name)
