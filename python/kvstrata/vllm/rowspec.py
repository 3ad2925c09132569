"""Which rows a job moves, and where each of them lies in the arena. Travels to every worker."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import LoadStoreSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

UNKNOWN = -1


class RowSpec(LoadStoreSpec):
    """The CPU side of a job: one entry per row, in the order in which vLLM named the keys.

    * ``keys``: vLLM's OffloadKeys, group by group, each group's in the order of its chunks;
    * ``groups``: int32, the position of each row's group among the selected ones, not its id;
    * ``chunks``: int64, which chunk of its request a row is: its last token's place divided by the
      tokens of a chunk. :data:`UNKNOWN` where that cannot be said, as for a key that does not end
      with a chunk (the tail of a recurrent group);
    * ``offsets``: int64, first byte of each slot in the arena.

    Treat it as immutable. It is part of vLLM's metadata of a step and pickled for every worker:
    keys travel as one byte string, numbers as little-endian bytes.
    """

    __slots__ = ("chunks", "groups", "keys", "offsets")

    keys: tuple[bytes, ...]
    groups: npt.NDArray[np.int32]
    chunks: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def __init__(
        self,
        keys: Iterable[bytes],
        groups: Sequence[int] | npt.NDArray[Any],
        chunks: Sequence[int] | npt.NDArray[Any],
        offsets: Sequence[int] | npt.NDArray[Any],
    ) -> None:
        """Copy the arguments.

        # Errors
        `ValueError` where they are not equally long.
        """
        self.keys = tuple(bytes(key) for key in keys)
        self.groups = np.array(groups, dtype=np.int32)
        self.chunks = np.array(chunks, dtype=np.int64)
        self.offsets = np.array(offsets, dtype=np.int64)
        lengths = {part.shape for part in (self.groups, self.chunks, self.offsets)}
        if lengths != {(len(self.keys),)}:
            msg = (
                f"{len(self.keys)} keys with {self.groups.shape} groups, {self.chunks.shape} "
                f"chunks and {self.offsets.shape} offsets"
            )
            raise ValueError(msg)

    @classmethod
    def packed(
        cls, keys: tuple[bytes, ...], groups: bytes, chunks: bytes, offsets: bytes
    ) -> RowSpec:
        """Rows whose numbers are there as little-endian bytes, int32, int64 and int64."""
        made = cls.__new__(cls)
        made.keys = keys
        made.groups = np.frombuffer(groups, dtype="<i4")
        made.chunks = np.frombuffer(chunks, dtype="<i8")
        made.offsets = np.frombuffer(offsets, dtype="<i8")
        return made

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"RowSpec({len(self)} rows at {self.offsets.tolist()})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowSpec) and self.__getstate__() == other.__getstate__()

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> tuple[bytes, ...]:
        lengths = np.array([len(key) for key in self.keys], dtype="<i4")
        arrays: tuple[npt.NDArray[Any], ...] = (lengths, self.groups, self.chunks, self.offsets)
        kinds = ("<i4", "<i4", "<i8", "<i8")
        numbers = (array.astype(kind).tobytes() for array, kind in zip(arrays, kinds, strict=True))
        return (b"".join(self.keys), *numbers)

    def __setstate__(self, state: tuple[bytes, ...]) -> None:
        text, lengths, groups, chunks, offsets = state
        edges = accumulate(np.frombuffer(lengths, dtype="<i4").tolist(), initial=0)
        self.keys = tuple(text[start:stop] for start, stop in pairwise(edges))
        self.groups = np.frombuffer(groups, dtype="<i4").astype(np.int32)
        self.chunks = np.frombuffer(chunks, dtype="<i8").astype(np.int64)
        self.offsets = np.frombuffer(offsets, dtype="<i8").astype(np.int64)
