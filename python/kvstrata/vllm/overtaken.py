"""Requests that go on over a reset: what they computed before it must not be stored after it.

vLLM's scheduler offers every chunk of a living request again after a reset, from the first on. Two
things are wrong with that. Their KV belongs to the time before the reset, and so does all that is
computed on top of it until the request starts over. And for groups with a window the scheduler no
longer knows which blocks it gave away meanwhile: it notices that only for chunks not offered yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ReqContext


class _Overtaken:
    """What the context of such a request has among its state, until it starts over."""

    def __init__(self) -> None:
        self.goes_on = True


def mark(req_context: ReqContext) -> None:
    """A reset has come while the request lives."""
    req_context.set_state(_Overtaken())


def starts_over(req_context: ReqContext) -> None:
    """The request computes all its tokens again."""
    found = req_context.get_state(_Overtaken)
    if found is not None:
        found.goes_on = False


def is_marked(req_context: ReqContext) -> bool:
    """Whether nothing of the request may be stored."""
    found = req_context.get_state(_Overtaken)
    return found is not None and found.goes_on


def offered(scheduler: Any) -> list[tuple[Any, int]]:
    """Groups with a window of living requests, and how many blocks of each were offered."""
    statuses = getattr(scheduler, "_req_status", {}).values()
    windows = getattr(scheduler, "_sliding_window_groups", ())
    return [
        (group, group.next_stored_chunk_idx * scheduler.config.blocks_per_chunk)
        for status in statuses
        for group in (status.group_states[at] for at in windows)
    ]


def forget_blocks(before: list[tuple[Any, int]]) -> None:
    """Take away blocks that the scheduler no longer watches: 0 stands for none."""
    for group, blocks in before:
        count = min(blocks, len(group.block_ids))
        group.block_ids[:count] = [0] * count
