"""KV tensors in every layout vLLM registers, in miniature, described without the code under test.

A tensor is a piece of a rank's storage: blocks of `page` bytes, `stride` apart. A layer of a group
is a stretch of such a page. How many bytes of it count, and where they go in a row, follows from
the description alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.memory.layout import PageRef, PageRun, PageShare


@dataclass(frozen=True)
class Tensor:
    """Blocks of `page` bytes, `stride` apart; the first begins at `start` of the storage."""

    page: int
    stride: int
    start: int = 0


@dataclass(frozen=True)
class Layer:
    """`size` bytes at `offset` of a tensor's page.

    `heads` is ``(bytes of one head, heads of this rank, heads of all)`` where ranks keep one page
    together: a page then is, for each of two halves, the heads side by side.
    """

    tensor: int
    size: int
    offset: int = 0
    heads: tuple[int, int, int] | None = None

    @property
    def row_size(self) -> int:
        """Bytes of the layer's page in a row."""
        return self.size if self.heads is None else 2 * self.heads[0] * self.heads[2]


@dataclass(frozen=True)
class Shape:
    """One rank's tensors and groups, and how the ranks share rows."""

    name: str
    tensors: tuple[Tensor, ...]
    groups: tuple[tuple[Layer, ...], ...]
    ranks: int = 1
    is_replicated: bool = False

    @property
    def is_shared(self) -> bool:
        return any(layer.heads is not None for group in self.groups for layer in group)

    @property
    def parts(self) -> int:
        """Parts of a row that lie side by side."""
        return 1 if self.is_shared or self.is_replicated else self.ranks

    def part(self, rank: int) -> int:
        return 0 if self.parts == 1 else rank

    def pieces(self, layer: Layer, rank: int) -> list[tuple[int, int, int]]:
        """What of a layer's page a rank holds: ``(offset in block, offset in row, size)``."""
        if layer.heads is None:
            return [(layer.offset, 0, layer.size)]
        head, mine, total = layer.heads
        size = head * mine
        first = rank // self.copies(layer) * size
        return [(half * size, half * head * total + first, size) for half in range(2)]

    def copies(self, layer: Layer) -> int:
        """Ranks that hold the same heads."""
        if layer.heads is None:
            return 1
        return max(1, self.ranks * layer.heads[1] // layer.heads[2])

    def writes(self, layer: Layer, rank: int, number: int) -> bool:
        """Whether this rank stores page `number` of a layer."""
        if self.is_replicated:
            return rank == 0
        return number % self.copies(layer) == rank % self.copies(layer)

    def row_bytes(self, group: int, blocks_per_chunk: int) -> int:
        payload = sum(layer.row_size for layer in self.groups[group])
        return self.parts * blocks_per_chunk * payload

    def refs(self, rank: int) -> tuple[tuple[PageRef, ...], ...]:
        """The same for the code under test."""
        return tuple(tuple(self._ref(layer, rank) for layer in group) for group in self.groups)

    def _ref(self, layer: Layer, rank: int) -> PageRef:
        if layer.heads is None:
            return PageRef(layer.tensor, layer.size, layer.offset)
        runs = tuple(PageRun(*piece) for piece in self.pieces(layer, rank))
        copies = self.copies(layer)
        return PageRef(layer.tensor, layer.row_size, 0, PageShare(runs, copies, rank % copies))


def _dense(count: int, page: int, blocks: int) -> tuple[Tensor, ...]:
    """Layer-outermost: the tensors one behind the other."""
    return tuple(Tensor(page, page, index * page * blocks) for index in range(count))


BLOCKS = 12
SHAPES = (
    Shape("per layer", _dense(3, 48, BLOCKS), (tuple(Layer(t, 48) for t in range(3)),)),
    Shape(
        "groups on the same tensors",
        _dense(2, 64, BLOCKS),
        (
            (Layer(0, 64), Layer(1, 64)),
            (Layer(0, 64), Layer(1, 64)),
            (Layer(0, 64),),
        ),
    ),
    Shape(
        "packed blocks",
        (Tensor(208, 208),),
        (
            (Layer(0, 48, 0), Layer(0, 48, 48)),
            (Layer(0, 32, 96), Layer(0, 16, 160)),
            (Layer(0, 80, 0),),
        ),
    ),
    Shape(
        "ten layers and four",
        _dense(10, 32, BLOCKS),
        (tuple(Layer(t, 32) for t in range(10)), tuple(Layer(t, 32) for t in range(4))),
    ),
    Shape(
        "latent pages on two ranks",
        _dense(2, 36, BLOCKS),
        ((Layer(0, 36), Layer(1, 36)),),
        ranks=2,
        is_replicated=True,
    ),
    Shape(
        "states in padded pages",
        _dense(2, 128, BLOCKS),
        ((Layer(0, 128), Layer(1, 128)), (Layer(0, 91), Layer(1, 91))),
    ),
    Shape(
        "one group of unlike layers",
        (Tensor(32, 32), Tensor(64, 64, 32 * BLOCKS)),
        ((Layer(0, 32), Layer(1, 64)),),
    ),
    Shape(
        "blocks further apart than their pages",
        (Tensor(40, 56, 8), Tensor(40, 56, 56 * BLOCKS + 16)),
        ((Layer(0, 40), Layer(1, 33)),),
    ),
    Shape(
        "two ranks side by side",
        _dense(2, 48, BLOCKS),
        ((Layer(0, 48), Layer(1, 48)), (Layer(1, 20),)),
        ranks=2,
    ),
    Shape(
        "canonical pages of two ranks",
        _dense(2, 32, BLOCKS),
        ((Layer(0, 32, 0, (8, 2, 4)), Layer(1, 32, 0, (8, 2, 4))),),
        ranks=2,
    ),
    Shape(
        "canonical pages of four ranks, two of which hold the same heads",
        _dense(1, 16, BLOCKS),
        ((Layer(0, 16, 0, (8, 1, 2)),), (Layer(0, 16, 0, (8, 1, 2)),)),
        ranks=4,
    ),
)
