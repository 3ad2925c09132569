"""A rank or the scheduler, as far as the arena is concerned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstrata.memory.arena import Arena
from kvstrata.memory.largepages import LargePages
from kvstrata.memory.pinning import Pinning

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def main(pipe: Connection[Any, Any], role: str, name: str, size: int) -> None:
    """Make or join an arena, tell its size, then do what is asked until nobody asks."""
    pages = None
    if role == "create":
        arena = Arena.create(size, name)
        address = arena.tensor.data_ptr()
        taken = LargePages(arena.fd, address, arena.nbytes)
        pages = Pinning(address, arena.nbytes, None, take=taken.take, largest=1 << 23)
    else:
        arena = Arena.join(name, 20)
    pipe.send(arena.nbytes)
    while True:
        try:
            what, offset, value = pipe.recv()
        except EOFError:
            break
        if what == "write":
            arena.tensor[offset] = value
        while what == "churn":
            arena.tensor.add_(1)
        pipe.send(int(arena.tensor[offset]))
    if pages is not None:
        pages.close()
    arena.close()
