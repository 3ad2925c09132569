"""Copies against a model that is still computing. They need a CUDA device and torch alone.

They have not run yet: no CUDA device was at hand.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstrata.memory.device import AcceleratorDevice
from kvstrata.memory.layout import ExactLayout, PageRef
from kvstrata.memory.pinning import Pinning, loaded_runtime
from kvstrata.memory.placement import Placement, place_group
from kvstrata.memory.transfer import BlockTransfers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ITERATIONS = 500
PAGE = 1 << 20
# Clock cycles of a kernel that does nothing: about a millisecond.
LONG = 2_000_000


class Bench:
    """One KV tensor of four large blocks, and an arena of four rows."""

    def __init__(self, device: torch.device) -> None:
        self.blocks = torch.zeros((4, PAGE), dtype=torch.int8, device=device)
        self.arena = torch.zeros(4 * PAGE, dtype=torch.int8)
        self.pinning = Pinning(self.arena.data_ptr(), 4 * PAGE, loaded_runtime())
        assert self.pinning.wait(60)
        assert self.pinning.pinned_bytes == 4 * PAGE
        layout = ExactLayout(1, ((PageRef(0, PAGE),),), (PAGE,))
        self.transfers = BlockTransfers(
            layout, self.arena, [self.blocks], AcceleratorDevice(device)
        )

    def place(self, block: int, row: int) -> Placement:
        return place_group(1, 0, np.array([block]), 0, np.array([row * PAGE], dtype=np.int64))

    def close(self) -> None:
        self.transfers.close()
        self.pinning.close()


def test_a_store_behind_a_long_kernel_reads_what_the_kernel_wrote(cuda: torch.device) -> None:
    bench = Bench(cuda)
    for number in range(ITERATIONS):
        before, after = number % 100 + 1, -(number % 100) - 1
        bench.blocks[1] = before
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        bench.blocks[1] = after
        bench.transfers.store(number, [bench.place(1, 2)])
        bench.transfers.wait({number})
        bench.transfers.finished()
        row = bench.arena[2 * PAGE : 3 * PAGE]
        assert bool((row == after).all()), f"iteration {number} stored bytes that were read early"
    bench.close()


def test_a_load_leaves_blocks_alone_that_a_long_kernel_still_reads(cuda: torch.device) -> None:
    bench = Bench(cuda)
    read = torch.empty(PAGE, dtype=torch.int8, device=cuda)
    for number in range(ITERATIONS):
        before, after = number % 100 + 1, -(number % 100) - 1
        bench.blocks[1] = before
        bench.arena[2 * PAGE : 3 * PAGE] = after
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        read.copy_(bench.blocks[1])
        bench.transfers.load(number, [bench.place(1, 2)], expedited=bool(number % 2))
        bench.transfers.wait({number})
        bench.transfers.finished()
        torch.cuda.synchronize()
        assert bool((read == before).all()), f"iteration {number} overwrote a block too early"
        assert bool((bench.blocks[1] == after).all())
    bench.close()


def test_submitting_does_not_wait_for_the_device(cuda: torch.device) -> None:
    bench = Bench(cuda)
    torch.cuda._sleep(200 * LONG)
    bench.transfers.store(1, [bench.place(1, 2)])
    bench.transfers.load(2, [bench.place(0, 3)])
    assert not bench.transfers.finished(), "the copies were waited for"
    bench.transfers.wait({1, 2})
    assert {job.job_id for job in bench.transfers.finished()} == {1, 2}
    bench.close()
