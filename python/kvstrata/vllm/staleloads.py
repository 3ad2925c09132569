"""Loads that a reset overtook: their requests must not go on with what they loaded.

vLLM's scheduler forgets its jobs at a reset, and the workers go on with theirs. When all of them
have reported such a load the request would run on rows from before the reset. The connector holds
that report back, and asks the workers to report it again, as failed this time: the only word that
vLLM's scheduler has for it (`KVConnectorTransferResults.failed_recving`), and one that it hears
from workers alone. By then no worker writes to the request's blocks any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput


@dataclass
class StepMetadata(OffloadingConnectorMetadata):
    """VLLM's jobs of a step, with requests whose load every worker is to report as failed."""

    report_failed: frozenset[str] = frozenset()


class StaleLoads:
    """Requests by id, from a reset until vLLM has heard that their load failed."""

    def __init__(self) -> None:
        # Loads under way.
        self._loading: set[str] = set()
        # Held back: to be asked for, and asked for.
        self._due: set[str] = set()
        self._asked: set[str] = set()

    @property
    def is_pending(self) -> bool:
        """Whether a step is needed that the engine might not take by itself."""
        return bool(self._due or self._asked)

    def at_reset(self, scheduler: Any) -> None:
        """Take up the loads that a scheduler of vLLM's is about to forget."""
        self._loading |= {
            str(job.req_id)
            for job in scheduler._jobs.values()  # noqa: SLF001
            if not job.is_store
        }

    def request_finished(self, req_id: str) -> None:
        """Nobody will use the blocks: the report goes its way, and they are freed."""
        self._loading.discard(req_id)

    def hold_back(self, output: KVConnectorOutput) -> None:
        """Take reports of overtaken loads out of a step's output, unless they say "failed"."""
        received = output.finished_recving
        if not received:
            return
        failed = output.failed_recving or set()
        self._loading -= received & failed
        self._asked -= received
        held = received & self._loading
        if held:
            output.finished_recving = received - held
            self._loading -= held
            self._due |= held

    def metadata(self, made: OffloadingConnectorMetadata) -> OffloadingConnectorMetadata:
        """A step's metadata, with what the workers are asked for."""
        if not self._due:
            return made
        due, self._due = self._due, set()
        self._asked |= due
        return StepMetadata(made.load_jobs, made.store_jobs, made.jobs_to_flush, frozenset(due))


def asked_for(metadata: Any) -> frozenset[str]:
    """The requests that a worker is to report as failed in this step."""
    return metadata.report_failed if isinstance(metadata, StepMetadata) else frozenset()
