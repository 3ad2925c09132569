"""A job of vLLM's tiering spec as a native tier gets it: keys in an order, each with its slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstrata.keys import GROUP_BYTES

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey
    from vllm.v1.kv_offload.tiering.base import TransferJob

    # A key and the chunk id of its slot.
    Pair = tuple[OffloadKey, int]

_LAST = 1 << 62


@dataclass(frozen=True)
class TierJob:
    """A job the native tier has: its keys in the order given to it."""

    keys: tuple[OffloadKey, ...]
    is_load: bool
    req_id: str


def as_given(job: TransferJob) -> list[Pair]:
    """The job's keys and chunk ids as they came."""
    return list(zip(job.keys, (int(chunk) for chunk in job.chunk_ids), strict=True))


def by_prefix(job: TransferJob) -> list[Pair]:
    """By group, then by place in the prompt: the rows of a prefix lie side by side on disk."""
    position = job.req_context.get_offload_key_position

    def place(pair: Pair) -> tuple[bytes, int]:
        end_token = position(pair[0])
        return pair[0][-GROUP_BYTES:], _LAST if end_token is None else end_token

    return sorted(as_given(job), key=place)
