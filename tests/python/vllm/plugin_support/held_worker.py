"""A worker of ours whose copies happen at any time between a job's start and its report."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstrata.vllm.rowworker import KVStrataRowWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstrata.vllm.rowspec import RowSpec


class HeldWorker:
    """Stands between vLLM's connector and a real worker, whose methods it takes the place of.

    Jobs are copied when they are submitted or when they are reported, and reported in any order,
    at once or steps later; `wait` is kept. Planted: loads that do not fit, rows that are refused.
    """

    def __init__(self, worker: Any, poison: Callable[[Any], None]) -> None:
        assert isinstance(worker, KVStrataRowWorker)
        self.worker: Any = worker
        self._poison = poison
        self._submit_store = worker.submit_store
        self._submit_load = worker.submit_load
        self._get_finished = worker.get_finished
        self._wait = worker.wait
        self.chance = random.Random(0)
        # Of each kind, how likely it is.
        self.late = 0.0
        self.held = 0.0
        self.misfit = 0.0
        self.refusal = 0.0
        self._waiting: dict[int, Callable[[], None]] = {}
        self._open: list[int] = []
        self._results: dict[int, Any] = {}
        self._due: list[int] = []
        # Loads that a reset overtook: what they bring is nothing any more.
        self._dead: set[int] = set()
        self._targets: dict[int, list[int]] = {}
        worker.submit_store = self.submit_store
        worker.submit_load = self.submit_load
        worker.get_finished = self.get_finished
        worker.wait = self.wait

    @property
    def is_idle(self) -> bool:
        return not self._open

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        refused = [key for key in dst_spec.keys if self.chance.random() < self.refusal]

        def copy() -> None:
            self._submit_store(job_id, src_spec, dst_spec)
            self._refuse(dst_spec, refused)

        self._start(job_id, copy)
        return True

    def _refuse(self, rows: RowSpec, refused: Iterable[bytes]) -> None:
        refused = set(refused)
        arena = self.worker._arena.tensor.numpy().view(np.uint8)
        for key, offset in zip(rows.keys, rows.offsets.tolist(), strict=True):
            if key in refused:
                arena[offset : offset + 64] = 0xEE
        self.worker._refused.update(refused)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        assert not expedited, "a load in the middle of a step cannot end as failed"
        ids = [int(block) for block in dst_spec.block_ids if block]
        self._targets[job_id] = ids
        self._poison(ids)
        if len(src_spec) and self.chance.random() < self.misfit:
            broken = _without_last_group(dst_spec)
            faults = self.worker.faults.total
            self._submit_load(job_id, src_spec, broken)
            assert self.worker.faults.total == faults + 1, "the misfit was taken"
            self.worker.faults.total = faults
            self._start(job_id, None)
            return True

        def copy() -> None:
            self._submit_load(job_id, src_spec, dst_spec)
            if job_id in self._dead:
                self._poison(ids)

        self._start(job_id, copy)
        return True

    def _start(self, job_id: int, copy: Callable[[], None] | None) -> None:
        self._open.append(job_id)
        if copy is None:
            return
        if self.chance.random() < self.late:
            self._waiting[job_id] = copy
        else:
            copy()

    def overtake_loads(self) -> int:
        """A reset: loads under way bring nothing of use; how many there are."""
        dead = [job_id for job_id in self._open if job_id in self._targets]
        for job_id in dead:
            self._poison(self._targets[job_id])
        self._dead.update(dead)
        return len(dead)

    def _finish(self, job_id: int) -> None:
        copy = self._waiting.pop(job_id, None)
        if copy is not None:
            copy()
        for result in self._get_finished():
            self._results[result.job_id] = result

    def wait(self, job_ids: set[int]) -> None:
        for job_id in sorted(job_ids.intersection(self._open)):
            self._finish(job_id)
        self._wait(job_ids)

    def get_finished(self) -> list[Any]:
        ended = [job_id for job_id in self._open if self.chance.random() >= self.held]
        self.chance.shuffle(ended)
        for job_id in ended:
            self._finish(job_id)
        self._open = [job_id for job_id in self._open if job_id not in ended]
        for job_id in ended:
            self._targets.pop(job_id, None)
            self._dead.discard(job_id)
        return [self._results.pop(job_id) for job_id in ended]


def _without_last_group(blocks: Any) -> Any:
    """A load's blocks without those of one group, whose rows then fit nowhere."""
    sizes = list(blocks.group_sizes)
    group = max(at for at, size in enumerate(sizes) if size)
    first = sum(sizes[:group])
    ids = blocks.block_ids.tolist()
    del ids[first : first + sizes[group]]
    sizes[group] = 0
    return type(blocks)(ids, group_sizes=sizes, block_indices=list(blocks.block_indices))
