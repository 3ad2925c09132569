"""Rows for tiers that want all of a request's, also those that were in the CPU tier before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata._native import CpuTier
    from kvstrata.vllm.below import TierBelow

    Store = Callable[[TierBelow, list[bytes]], None]


class WholeRequests:
    """Hands such rows on. What a worker is still writing waits here until it is ready or gone."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[tuple[TierBelow, list[bytes]]] = []

    @property
    def is_pending(self) -> bool:
        """Whether rows wait."""
        return bool(self._waiting)

    def offer(
        self, cpu: CpuTier, tiers: Sequence[TierBelow], keys: Sequence[Any], fresh: Sequence[Any]
    ) -> None:
        """Take rows of a request but the `fresh` ones, which go on when they are complete."""
        wanting = [tier for tier in tiers if tier.is_request_level]
        if wanting and len(fresh) < len(keys):
            stored = set(fresh)
            there = [key for key in keys if key not in stored]
            self._waiting += [(tier, there) for tier in wanting]
            self.go_on(cpu)

    def go_on(self, cpu: CpuTier) -> None:
        """Hand on what is ready by now."""
        waiting, self._waiting = self._waiting, []
        for tier, keys in waiting:
            states = list(zip(keys, cpu.lookup(keys), strict=True))
            self._store(tier, [key for key, state in states if state])
            unfinished = [key for key, state in states if state is None]
            if unfinished:
                self._waiting.append((tier, unfinished))

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
