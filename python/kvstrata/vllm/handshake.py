"""What every rank tells the scheduler at start about its bytes, and whether they all agree.

vLLM collects a connector's handshake metadata from all workers after their KV tensors are there and
before the first request. Until then no tier of ours has a namespace, and answers miss.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

import kvstrata
from kvstrata.vllm import modelconfig

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class WorkerFacts(KVConnectorHandshakeMetadata):
    """One rank's byte map with its digest, and where the rank runs. Travels between processes."""

    rank: int
    host: str
    boot: str
    byte_map: dict[str, Any] = field(repr=False)
    digest: str

    @classmethod
    def of(cls, rank: int, byte_map: dict[str, Any]) -> WorkerFacts:
        """This process's facts."""
        return cls(rank, socket.gethostname(), _boot(), byte_map, modelconfig.digest(byte_map))


def agreed(content: Mapping[Any, Any], world_size: int) -> dict[str, Any]:
    """The byte map of all ranks.

    # Errors
    :class:`kvstrata.ConfigError` where a rank is missing, runs on another host, was changed on its
    way, or lays its bytes out differently; the message names ranks and group.
    """
    told = sorted(
        (item for item in content.values() if isinstance(item, WorkerFacts)),
        key=lambda item: item.rank,
    )
    if [item.rank for item in told] != list(range(world_size)):
        msg = (
            f"kvstrata: ranks {[item.rank for item in told]} of {world_size} said how their KV "
            "bytes lie; every rank has to"
        )
        raise kvstrata.ConfigError(msg)
    first = told[0]
    for other in told:
        _same_host(first, other)
        if modelconfig.digest(other.byte_map) != other.digest:
            msg = f"kvstrata: the byte map of rank {other.rank} is not the one it sent"
            raise kvstrata.ConfigError(msg)
        if other.digest != first.digest:
            raise kvstrata.ConfigError(_difference(first, other))
    return first.byte_map


def check_sides(byte_map: dict[str, Any], expected: Mapping[int, int | None]) -> None:
    """Compare the workers' bytes per block and group with the scheduler's.

    `expected` is keyed by group id; `None` where the scheduler cannot know.

    # Errors
    :class:`kvstrata.ConfigError` naming the group and both sizes.
    """
    copied = {int(group["id"]): int(group["bytes_per_block"]) for group in byte_map["groups"]}
    if set(copied) != set(expected):
        msg = (
            f"kvstrata: the workers copy KV cache groups {sorted(copied)}, the scheduler stores "
            f"{sorted(expected)}"
        )
        raise kvstrata.ConfigError(msg)
    for group_id, size in expected.items():
        if size is not None and size != copied[group_id]:
            msg = (
                f"kvstrata: KV cache group {group_id} has {size} bytes per block in its "
                f"specification, and the workers copy {copied[group_id]}"
            )
            raise kvstrata.ConfigError(msg)


def _same_host(first: WorkerFacts, other: WorkerFacts) -> None:
    if other.boot != first.boot:
        msg = (
            f"kvstrata: rank {first.rank} runs on host {first.host!r} and rank {other.rank} on "
            f"host {other.host!r}; ranks of one engine have to share memory: use one node"
        )
        raise kvstrata.ConfigError(msg)


def _difference(first: WorkerFacts, other: WorkerFacts) -> str:
    for mine, theirs in zip(first.byte_map["groups"], other.byte_map["groups"], strict=False):
        if mine != theirs:
            fields = sorted(key for key in mine if mine[key] != theirs.get(key))
            return (
                f"kvstrata: ranks {first.rank} and {other.rank} lay the bytes of KV cache group "
                f"{mine['id']} out differently ({', '.join(fields)})"
            )
    if first.byte_map.get("kernels") != other.byte_map.get("kernels"):
        return f"kvstrata: ranks {first.rank} and {other.rank} use different attention backends"
    return f"kvstrata: ranks {first.rank} and {other.rank} have different KV cache groups or sizes"


def _boot() -> str:
    """The running kernel: equal for processes that can share memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
