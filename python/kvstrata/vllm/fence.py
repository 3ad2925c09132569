"""When the workers are done with what they were doing at a reset, under a vLLM that does not say.

From 0.33 on vLLM's scheduler counts the jobs in flight at a reset and tells the manager
(`on_reset_flushed`) when the workers have reported them all. Before, it forgets them at once, and
slots that are still copied to would be given away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class ResetFence:
    """Counts reports of jobs that were in flight at a reset."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self._open: dict[int, int] = {}

    @property
    def is_open(self) -> bool:
        """Whether reports are still to come."""
        return bool(self._open)

    def raise_for(self, pending: Mapping[int, int]) -> None:
        """A reset happened; `pending` are the reports still to come, by job."""
        self._open.update(pending)
        if not self._open:
            self._done()

    def reported(self, completed: Mapping[int, int]) -> None:
        """Workers reported jobs, each so many times."""
        if not self._open:
            return
        for job_id, count in completed.items():
            left = self._open.get(job_id)
            if left is None:
                continue
            if left > count:
                self._open[job_id] = left - count
            else:
                del self._open[job_id]
        if not self._open:
            self._done()


def pending_reports(scheduler: Any) -> dict[int, int]:
    """Reports that a scheduler of vLLM's still waits for, by job."""
    return {int(job_id): int(job.pending_count) for job_id, job in scheduler._jobs.items()}  # noqa: SLF001


def counts_by_itself(scheduler: Any) -> bool:
    """Whether this vLLM tells the manager when its workers are done."""
    return hasattr(scheduler, "_reset_fence")
