"""A secondary tier that is made only when the workers have said how their bytes lie.

Until then it answers misses and stores nothing. This goes for tiers of vLLM's too: they get a
configuration whose model name carries the digest of our facts, so that what they keep cannot meet
what a plain vLLM, another model or another layout keeps in the same place.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvstrata.vllm import compat, manifest, modelconfig

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import (
        OffloadingEvent,
        OffloadingSpec,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import ParentManager, TransferJob

logger = init_logger(__name__)

# In the extra configuration: a connector will hand over the workers' byte map.
KEY = "kvstrata_awaits_byte_map"
NAME_DIGITS = 32


def entry_for(entry: dict[str, Any]) -> dict[str, Any]:
    """The tier entry that makes an :class:`AwaitedTier` for `entry`."""
    return {"type": AwaitedTier.__name__, "module_path": __name__, "entry": entry}


class AwaitedTier(SecondaryTierManager):
    """Stands in a manager's list of tiers for one that :meth:`open` makes.

    A tier that was opened and is then told of another byte map, or cannot forget what a reset has
    to forget, is closed to lookups and stores for the rest of this process's life.
    """

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        *,
        entry: dict[str, Any],
        **_of_the_factory: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, str(entry.get("type")))
        made_by: Any = SecondaryTierFactory.get_tier_class(entry)
        # Of the class, and read by vLLM from the instance.
        for name in ("medium", "cache_hit_source", "tolerates_off_thread_polling"):
            if hasattr(made_by, name):
                setattr(self, name, getattr(made_by, name))
        self.is_ours = bool(getattr(made_by, "is_kvstrata", False))
        self._entry = entry
        self._tier: Any = None
        self._byte_map: dict[str, Any] | None = None
        self._closed = False
        self._ready: list[JobResult] = []

    def open(self, byte_map: dict[str, Any]) -> None:
        """Make the tier for rows of this byte map.

        # Errors
        What the tier's constructor raises: its options or its place cannot work.
        """
        if self._byte_map is not None:
            if byte_map != self._byte_map:
                self.close("the KV tensors' layout changed while the server ran")
            return
        spec = self._offloading_spec
        entry = self._entry
        if self.is_ours:
            spec = _with(spec, {manifest.BYTE_MAP_KEY: byte_map})
        else:
            try:
                fields = manifest.build(
                    spec, spec.extra_config.get(manifest.IDENTITY_OPTION), byte_map
                )
            except manifest.PersistenceError as reason:
                self._byte_map = byte_map
                logger.error(  # noqa: TRY400 -- one line for the operator
                    "kvstrata: tier %r keeps nothing and answers every lookup with a miss: %s",
                    self.tier_type,
                    reason,
                )
                return
            # These tiers keep whole slots, and do not notice one of another size.
            fields["slot_bytes"] = compat.slot_bytes_of(self._primary_kv_view)
            spec = _renamed(spec, modelconfig.digest(fields)[:NAME_DIGITS])
        self._tier = SecondaryTierFactory.create_secondary_tier(entry, self._primary_kv_view, spec)
        self.locality = self._tier.locality
        self._byte_map = byte_map

    def close(self, why: str) -> None:
        """Answer misses and store nothing from now on; logged once. Jobs in flight still end."""
        if not self._closed:
            logger.error("kvstrata: tier %r answers misses from now on: %s", self.tier_type, why)
        self._closed = True

    @property
    def tier(self) -> Any:
        """The tier itself; `None` before it is made."""
        return self._tier

    @property
    def bp_detector(self) -> BackpressureDetector | None:
        """The tier's own."""
        return None if self._tier is None else self._tier.bp_detector

    def reset(self) -> bool:
        """Forget every row, for good. `False` where the tier could not; it is closed then."""
        if self._tier is None:
            return True
        if self.is_ours:
            return bool(self._tier.reset())
        self.close("vLLM's tiers cannot forget what a reset has to forget; remove their files")
        return False

    def _serves(self) -> bool:
        return self._tier is not None and not self._closed

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """The tier's answer, or a miss."""
        if not self._serves():
            return LookupResult.MISS
        return self._tier.lookup(key, req_context)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Hand the job on; one that nobody takes ends at once."""
        if self._serves():
            self._tier.submit_store(job_metadata)
        else:
            self._ready.append(JobResult(job_id=job_metadata.job_id, success=True))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Hand the job on; one that nobody takes fails at once."""
        if self._serves():
            self._tier.submit_load(job_metadata)
        else:
            self._ready.append(JobResult(job_id=job_metadata.job_id, success=False))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Results of the tier, and of jobs that nobody took."""
        ready, self._ready = self._ready, []
        if self._tier is not None:
            ready += self._tier.get_finished_jobs()
        return ready

    def has_pending_work(self) -> bool:
        """Whether results are still to come."""
        return bool(self._ready) or (self._tier is not None and self._tier.has_pending_work())

    def take_events(self) -> Iterable[OffloadingEvent]:
        """The tier's events."""
        return () if self._tier is None else self._tier.take_events()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Hand it on."""
        if self._tier is not None:
            self._tier.touch(keys, req_context)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """The tier's preference."""
        if self._tier is None:
            return RequestOffloadingContext()
        return self._tier.on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Hand it on."""
        if self._tier is not None:
            self._tier.on_request_finished(req_context)

    def serve_external_requests(self, parent: ParentManager) -> None:
        """Hand it on."""
        if self._serves():
            self._tier.serve_external_requests(parent)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Hand it on."""
        if self._tier is not None:
            self._tier.on_schedule_end(context)

    def drain_jobs(self) -> None:
        """Wait for the tier's jobs."""
        if self._tier is not None:
            self._tier.drain_jobs()

    def shutdown(self) -> None:
        """End the tier."""
        if self._tier is not None:
            self._tier.shutdown()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """The tier's."""
        return None if self._tier is None else self._tier.get_stats()

    def config_info(self) -> Any:
        """The tier's, where this vLLM asks for it."""
        return {} if self._tier is None else self._tier.config_info()


def _with(spec: OffloadingSpec, more: dict[str, Any]) -> OffloadingSpec:
    """A copy of a spec whose extra configuration holds more."""
    made = copy.copy(spec)
    made.extra_config = {**spec.extra_config, **more}
    return made


def _renamed(spec: OffloadingSpec, digest: str) -> OffloadingSpec:
    """A copy of a spec whose model name carries a digest, for tiers that name places by it."""
    made = copy.copy(spec)
    model = dataclasses.replace(spec.config.model, name=f"{spec.config.model.name}-{digest}")
    made.config = dataclasses.replace(spec.config, model=model)
    return made
