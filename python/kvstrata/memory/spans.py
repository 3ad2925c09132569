"""Which bytes of the arena a job touches, to be compared with another job's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.memory.placement import IntArray


@dataclass(frozen=True)
class Spans:
    """Byte ranges ``[starts[i], stops[i])`` by start; no range may be empty, some may overlap.

    `reach[i]` is the furthest stop of the ranges up to `i`.
    """

    starts: IntArray
    stops: IntArray
    reach: IntArray

    @classmethod
    def of(cls, ranges: Sequence[tuple[IntArray, int]]) -> Spans:
        """Ranges given as starts that have one size."""
        sized = [(starts, size) for starts, size in ranges if size > 0]
        none: list[IntArray] = [np.empty(0, dtype=np.int64)]
        starts = np.concatenate(none + [each for each, _ in sized])
        stops = np.concatenate(none + [each + size for each, size in sized])
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], stops[order]
        return cls(starts, stops, np.maximum.accumulate(stops))

    def overlap(self, other: Spans) -> bool:
        """Whether any byte is in both."""
        before = np.searchsorted(self.starts, other.stops, side="left")
        touched = before > 0
        return bool((self.reach[before[touched] - 1] > other.starts[touched]).any())

    def disjoint(self) -> bool:
        """Whether no byte is in two of the ranges."""
        return bool((self.reach[:-1] <= self.starts[1:]).all())
