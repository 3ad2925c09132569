"""Eviction policies of kvstrata as cache policies of vLLM's own managers.

By name, once the plug-in is loaded: ``"eviction_policy": "kvstrata_lru"``; or by module:
``"eviction_policy": "LRU", "cache_policy_module_path": "kvstrata.vllm.policy"``. Such a policy is
told of a request's keys when the request ends, and of nothing else: docs/EVICTION.md says what that
costs.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, order_request_keys

from kvstrata._native import CacheOrder, LruOrder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.kv_offload.base import OffloadKey, ReqContext
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus


_Order = TypeVar("_Order", LruOrder, CacheOrder)


class KVStrataCachePolicy(CachePolicy, Generic[_Order]):
    """What all of them share: the chunks by key; their order is kept in Rust."""

    def __init__(self, cache_capacity: int) -> None:
        """Start empty."""
        super().__init__(cache_capacity)
        self.chunks: dict[OffloadKey, ChunkStatus] = {}
        self._order: _Order = self._make_order()
        self._bind()

    @abstractmethod
    def _make_order(self) -> _Order: ...

    def _bind(self) -> None:
        """Let the calls made once a key go where they end without a call between."""
        self.get = self.chunks.get  # type: ignore[assignment, method-assign]
        self.mark_evictable = self._order.free  # type: ignore[method-assign]
        self.mark_non_evictable = self._order.keep  # type: ignore[method-assign]

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Find a chunk."""
        return self.chunks.get(key)

    def remove(self, key: OffloadKey) -> None:
        """Forget a chunk."""
        del self.chunks[key]
        self._order.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Count an access to those that are there."""
        del req_context
        self._order.touch(list(keys))

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict exactly so many chunks, or none."""
        victims = self._order.evict(n, protected)
        if victims is None:
            return None
        pop = self.chunks.pop
        return [(key, pop(key)) for key in victims]

    def clear(self) -> None:
        """Forget everything."""
        self.chunks.clear()
        self._order = self._make_order()
        self._bind()

    def mark_evictable(self, key: OffloadKey) -> None:
        """Let a chunk go from now on."""
        self._order.free(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """Keep a chunk until it is let go."""
        self._order.keep(key)


@dataclass
class _Rank:
    """A request's rank in the order of one policy."""

    order: LruOrder
    rank: int


class LRU(KVStrataCachePolicy[LruOrder]):
    """``kvstrata_lru``: what vLLM's LRU evicts, in less time."""

    def _make_order(self) -> LruOrder:
        return LruOrder(self.cache_capacity)

    def _rank(self, req_context: Any) -> int:
        state = req_context.get_state(_Rank)
        if state is None or state.order is not self._order:
            state = _Rank(self._order, self._order.next_rank())
            req_context.set_state(state)
        return int(state.rank)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: Any = None) -> None:
        """Add a chunk; with its request's rank where its place in the request is known."""
        position_of = getattr(req_context, "get_offload_key_position", None)
        position = None if position_of is None else position_of(key)
        rank = 0 if position is None else self._rank(req_context)
        self._order.insert(key, chunk.chunk_id, chunk.ref_cnt == 0, rank, position)
        self.chunks[key] = chunk

    def on_request_access(self, keys: Iterable[OffloadKey], req_context: Any) -> None:
        """Give a request's keys its rank at once, as vLLM 0.33 does."""
        position_of = req_context.get_offload_key_position
        rank = self._rank(req_context)
        for key in keys:
            position = position_of(key)
            if position is not None:
                self._order.raise_to(key, rank, position)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Make all of a request's keys the latest ones."""
        del insertion_only_keys, reused_keys
        self._order.touch(order_request_keys(key_groups, req_context))


class _Named(KVStrataCachePolicy[CacheOrder]):
    """The others: what the policy of that name evicts."""

    POLICY: ClassVar[str]
    # Whether of keys inserted together, which come head first, the last is the oldest.
    TAIL_FIRST: ClassVar[bool] = True

    def _make_order(self) -> CacheOrder:
        return CacheOrder(self.POLICY, self.cache_capacity)

    def insert(
        self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None
    ) -> None:
        """Add a chunk; vLLM 0.32 gives no context."""
        del req_context
        self._order.insert(key, chunk.chunk_id, chunk.ref_cnt == 0, self.TAIL_FIRST)
        self.chunks[key] = chunk

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Learn from keys that come back."""
        del req_context
        self._order.miss(list(keys))

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Count a request's one access."""
        keys = order_request_keys(key_groups, req_context)
        self._order.end(keys, insertion_only_keys, reused_keys)


class ARC(_Named):
    """``kvstrata_arc_vllm``: what vLLM's ARC evicts."""

    POLICY = "arc_vllm"
    TAIL_FIRST = False


class S3FIFO(_Named):
    """``kvstrata_s3fifo``."""

    POLICY = "s3fifo"


class TH(_Named):
    """``kvstrata_th``, without turn context."""

    POLICY = "th"
