"""Eviction policies of kvstrata as cache policies of vLLM's own managers.

By name, once the plug-in is loaded: ``"eviction_policy": "kvstrata_lru"``; or by module:
``"eviction_policy": "LRU", "cache_policy_module_path": "kvstrata.vllm.policy"``. Such a policy is
told of a request's keys when the request ends, and of nothing else: docs/EVICTION.md says what that
costs.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, order_request_keys

from kvstrata._native import CacheOrder, LruOrder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.kv_offload.base import OffloadKey, ReqContext
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus


_Order = TypeVar("_Order", LruOrder, CacheOrder)


def _in_order(
    key_groups: Sequence[Sequence[OffloadKey]], req_context: ReqContext
) -> Sequence[OffloadKey]:
    """A request's keys from head to tail; of one group they come in that order."""
    if len(key_groups) == 1:
        return key_groups[0]
    return order_request_keys(key_groups, req_context)


class KVStrataCachePolicy(CachePolicy, Generic[_Order]):
    """What all of them share: keys, chunks and their order are kept in Rust."""

    def __init__(self, cache_capacity: int) -> None:
        """Start empty."""
        super().__init__(cache_capacity)
        self.clear()

    @abstractmethod
    def _make_order(self) -> _Order: ...

    def clear(self) -> None:
        """Forget everything."""
        self._order: _Order = self._make_order()
        self.chunks: dict[OffloadKey, ChunkStatus] = self._order.chunks
        # The calls made once a key go where they end without a call between.
        self.get = self.chunks.get  # type: ignore[assignment, method-assign]
        self.insert = self._order.insert  # type: ignore[method-assign]
        self.mark_evictable = self._order.freed.append  # type: ignore[method-assign]
        self.mark_non_evictable = self._order.kept.append  # type: ignore[method-assign]

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Find a chunk."""
        return self.chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: Any = None) -> None:
        """Add a chunk; vLLM 0.32 gives no context."""
        self._order.insert(key, chunk, req_context)

    def remove(self, key: OffloadKey) -> None:
        """Forget a chunk."""
        self._order.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Count an access to those that are there."""
        del req_context
        self._order.touch(list(keys))

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict exactly so many chunks, or none."""
        return self._order.evict(n, protected)

    def mark_evictable(self, key: OffloadKey) -> None:
        """Let a chunk go from now on."""
        self._order.freed.append(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """Keep a chunk until it is let go."""
        self._order.kept.append(key)


class LRU(KVStrataCachePolicy[LruOrder]):
    """``kvstrata_lru``: what vLLM's LRU evicts, in less time.

    A key whose place in its request is known has the request's rank until the request ends.
    """

    def _make_order(self) -> LruOrder:
        return LruOrder(self.cache_capacity)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Learn nothing: keys that are not there have no place in the order."""

    def on_request_access(self, keys: Iterable[OffloadKey], req_context: Any) -> None:
        """Give a request's keys its rank at once, as vLLM 0.33 does."""
        self._order.access(keys, req_context)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Make all of a request's keys the latest ones."""
        del insertion_only_keys, reused_keys
        self._order.touch(_in_order(key_groups, req_context))


class _Named(KVStrataCachePolicy[CacheOrder]):
    """The others: what the policy of that name evicts."""

    POLICY: ClassVar[str]
    # Whether of keys inserted together, which come head first, the last is the oldest.
    TAIL_FIRST: ClassVar[bool] = True

    def _make_order(self) -> CacheOrder:
        return CacheOrder(self.POLICY, self.cache_capacity, self.TAIL_FIRST)

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
        self._order.end(_in_order(key_groups, req_context), insertion_only_keys, reused_keys)


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
