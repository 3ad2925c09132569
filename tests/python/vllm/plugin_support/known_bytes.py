"""What the blocks of an engine without a model ought to hold, and tensors that hold it."""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

BLOCK = 4
HEAD = 16
PAGE = 2 * BLOCK * HEAD * 2
POISON = -1
VOCABULARY = 1000


class Text:
    """All tokens a request will ever have, and what each of its blocks holds in each group."""

    def __init__(self, prompt: Sequence[int], length: int, groups: int) -> None:
        tokens = list(prompt)
        state = zlib.crc32(np.array(tokens, dtype=np.int64).tobytes())
        while len(tokens) < length:
            state = (state * 1103515245 + 12345) % (1 << 31)
            tokens.append(3 + state % VOCABULARY)
        self.prompt = list(prompt)
        self.tokens = tokens
        chain = hashlib.blake2b(digest_size=6)
        parts = []
        for end in range(BLOCK, length + 1, BLOCK):
            chain.update(np.array(tokens[end - BLOCK : end], dtype=np.int64).tobytes())
            parts.append(int.from_bytes(chain.digest(), "big"))
        base = np.array(parts, dtype=np.int64) << 14
        # Room for the group, the layer and the times that everything was reset.
        self.stamps = [base + (group << 12) for group in range(groups)]


class Gpu:
    """One rank's KV tensors: the groups overlay them, as vLLM allocates them."""

    def __init__(self, layers: tuple[int, ...], blocks: int) -> None:
        self.layers = layers
        self.tensors = [
            torch.full((blocks, PAGE // 8), POISON, dtype=torch.int64) for _ in range(max(layers))
        ]
        self.views: list[npt.NDArray[np.int64]] = [tensor.numpy() for tensor in self.tensors]

    def caches(self) -> dict[str, torch.Tensor]:
        return {
            f"g{group}.{layer}": self.tensors[layer]
            .view(torch.bfloat16)
            .view(self.tensors[layer].shape[0], 1, BLOCK, 2 * HEAD)
            for group, count in enumerate(self.layers)
            for layer in range(count)
        }

    def write(self, group: int, blocks: Any, stamps: Any) -> None:
        for layer in range(self.layers[group]):
            self.views[layer][blocks] = (np.asarray(stamps) + (layer << 10))[:, None]

    def poison(self, blocks: Any) -> None:
        for view in self.views:
            view[blocks] = POISON

    def wrong(self, group: int, blocks: Any, stamps: Any) -> list[int]:
        """Positions of blocks that hold anything else than these stamps, in any layer."""
        bad = np.zeros(len(blocks), dtype=bool)
        for layer in range(self.layers[group]):
            found = self.views[layer][blocks]
            bad |= (found != (stamps + (layer << 10))[:, None]).any(axis=1)
        return [int(at) for at in np.flatnonzero(bad)]
