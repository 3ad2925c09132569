"""The secondary tiers `kvstrata_disk` and `kvstrata_object`: native tiers below vLLM's managers.

A row is the whole chunk of vLLM's primary tier, all ranks' bytes; a slot's offset is chunk id times
row size. The tier is keyed by vLLM's `OffloadKey`, whose last four bytes are vLLM's original group
id.

After start nothing here raises into the engine, with one exception:
:meth:`KVStrataDiskTier.shutdown` lets `kvstrata.BusyError` pass, because vLLM then keeps the memory
mapped that the kernel may still write.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

import kvstrata
from kvstrata.vllm import compat, facts, manifest, metrics, options, windows
from kvstrata.vllm.guard import Faults, guarded
from kvstrata.vllm.plugin import DISK_TIER, OBJECT_TIER
from kvstrata.vllm.residency import Residency
from kvstrata.vllm.tierjob import TierJob, as_given, by_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import (
        OffloadingEvent,
        OffloadingMetricMetadata,
        OffloadingSpec,
        OffloadKey,
        ReqContext,
    )
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from kvstrata.vllm.tierjob import Pair

logger = init_logger(__name__)

_GOOD = frozenset({"ok", "present"})
_CLOSE_SECONDS = 10.0
_WAIT_SECONDS = 0.5


class KVStrataDiskTier(SecondaryTierManager):
    """A disk tier for `secondary_tiers` of vLLM's tiering spec. Options: see docs/VLLM.md.

    Where the facts for a namespace do not suffice, the tier is off: one ERROR says which setting
    helps, every lookup is a miss, nothing is written.

    # Errors
    The constructor raises :class:`kvstrata.ConfigError` for an option or a root that cannot work.
    """

    medium: ClassVar[Medium] = Medium.STORAGE
    # Under KVStrataSpec a tier of ours is made with the byte map, and can forget at a reset.
    is_kvstrata: ClassVar[bool] = True
    takes_bucket: ClassVar[bool] = False

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str = DISK_TIER,
        backpressure_detector: BackpressureDetector | None = None,
        **config: Any,
    ) -> None:
        compat.require_version()
        registered = OBJECT_TIER if self.takes_bucket else DISK_TIER
        types = (tier_type, registered, type(self).__name__)
        if facts.KEY not in offloading_spec.extra_config:
            options.check_other_connector(offloading_spec.extra_config)
        problem = windows.problem(offloading_spec)
        if problem is not None:
            raise kvstrata.ConfigError(problem)
        written = options.written_keys(offloading_spec.extra_config, types)
        parsed = options.parse(config, written, object_tier=self.takes_bucket)
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = parsed.locality
        self._offload_policy = parsed.offload_policy
        self.faults = Faults(f"kvstrata tier {tier_type!r}")
        self._slot_bytes = compat.slot_bytes_of(primary_kv_view)
        self._jobs: dict[int, TierJob] = {}
        # Results that did not come from the native tier: jobs it refused, or that were lost in a
        # drain.
        self._ready: list[JobResult] = []
        # Keys whose load failed, per living request: a second guard against asking for them for
        # ever.
        self._failed: dict[str, set[OffloadKey]] = {}
        self._residency = Residency(
            self.medium, self.locality, tier_type, wanted=self._wants_events(parsed)
        )
        self._metrics = metrics.TierMetrics(tier_type)
        self._tier: Any = None
        self._arena: memoryview | None = None
        self._open(parsed)

    def _wants_events(self, parsed: options.TierOptions) -> bool:
        if not parsed.enable_kv_events:
            return False
        if self._offloading_spec.kv_events_config.enable_kv_cache_events:
            return True
        logger.warning(
            "kvstrata: enable_kv_events of tier %r does nothing while KV cache events are off",
            self.tier_type,
        )
        return False

    def _open(self, parsed: options.TierOptions) -> None:
        byte_map = self._offloading_spec.extra_config.get(manifest.BYTE_MAP_KEY)
        try:
            identity = manifest.build(self._offloading_spec, parsed.model_identity, byte_map)
        except manifest.PersistenceError as reason:
            logger.error(  # noqa: TRY400 -- one line for the operator
                "kvstrata tier %r persists nothing and answers every lookup with a miss: %s",
                self.tier_type,
                reason,
            )
            return
        self._arena = self._primary_kv_view.cast("B")
        try:
            self._tier = kvstrata.open_tier(
                parsed.url,
                manifest=identity,
                row_bytes=dict.fromkeys(
                    compat.group_ids_of(self._offloading_spec),
                    manifest.row_bytes(byte_map, self._slot_bytes, self._ranks()),
                ),
                arena=self._arena,
                honours_busy=False,
                **parsed.open_tier,
            )
        except BaseException:
            self._release_arena()
            raise

    def _ranks(self) -> int:
        """How many ranks' bytes lie side by side in a slot."""
        spec = self._offloading_spec
        return 1 if spec.replicated_layout else int(spec.config.parallel.world_size)

    @classmethod
    def build_metric_definitions(
        cls,
        extra_config: dict[str, Any],  # noqa: ARG003 -- vLLM's signature
    ) -> dict[str, OffloadingMetricMetadata]:
        """Declare this tier's metrics. Runs in the API server's process."""
        return metrics.definitions()

    @property
    def enabled(self) -> bool:
        """Whether anything is persisted."""
        return self._tier is not None

    @guarded(lambda: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Answer from the native index: HIT, MISS, or RETRY while it does not know yet."""
        if self._tier is None or key in self._failed.get(req_context.req_id, ()):
            return LookupResult.MISS
        (found,) = self._tier.lookup([key])
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    @guarded(lambda: None)
    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queue rows for the disk. vLLM hands a set of keys: positions give the order back."""
        self._submit(job_metadata, by_prefix)

    @guarded(lambda: None)
    def submit_load(self, job_metadata: TransferJob) -> None:
        """Queue reads into slots of the primary tier."""
        self._submit(job_metadata, as_given)

    def _submit(self, job: TransferJob, order: Callable[[TransferJob], list[Pair]]) -> None:
        """End a job in exactly one result, whatever happens: its slots stay pinned without one."""
        job_id = int(job.job_id)
        entry = TierJob(tuple(job.keys), bool(job.is_promotion), job.req_context.req_id)
        try:
            if self._tier is None:
                self._refuse(job_id, entry)
                return
            pairs = order(job)
            entry = TierJob(tuple(key for key, _ in pairs), entry.is_load, entry.req_id)
            offsets = [chunk * self._slot_bytes for _, chunk in pairs]
            submit = self._tier.load if entry.is_load else self._tier.store
            submit(job_id, list(entry.keys), offsets)
        except Exception:
            self._refuse(job_id, entry)
            raise
        self._jobs[job_id] = entry

    def _refuse(self, job_id: int, job: TierJob) -> None:
        if job.is_load:
            self._remember_failed(job, job.keys)
        self._ready.append(JobResult(job_id=job_id, success=False))

    def _remember_failed(self, job: TierJob, keys: Iterable[OffloadKey]) -> None:
        failed = self._failed.get(job.req_id)
        if failed is not None:
            failed.update(keys)

    @guarded(list)
    def get_finished_jobs(self) -> list[JobResult]:
        """Collect what ended. A load may have kept part of its rows; a store is whole or not."""
        self._collect()
        ready, self._ready = self._ready, []
        return ready

    def _collect(self) -> None:
        if self._tier is None:
            return
        try:
            results = self._tier.poll()
        except Exception as error:  # noqa: BLE001 -- what is ready must still get out
            self.faults.record("poll", error)
            return
        self._accept(results)

    def _accept(self, results: Iterable[Any]) -> None:
        for result in results:
            job = self._jobs.pop(int(result.job_id), None)
            if job is None:
                compat.log_once(logging.WARNING, "kvstrata: a result for a job nobody asked for")
                continue
            self._ready.append(self._translate(int(result.job_id), job, result))

    def _translate(self, job_id: int, job: TierJob, result: Any) -> JobResult:
        pairs = list(zip(job.keys, result.outcomes, strict=True))
        good = tuple(key for key, outcome in pairs if outcome in _GOOD)
        success = bool(result.success) and len(good) == len(job.keys)
        if job.is_load and not success:
            self._remember_failed(job, (key for key, outcome in pairs if outcome not in _GOOD))
        self._residency.note_job(pairs, is_load=job.is_load)
        return JobResult(
            job_id=job_id,
            success=success,
            successful_keys=good if job.is_load and good and not success else None,
            transfer_time=float(result.seconds),
            transfer_bytes=int(result.bytes),
        )

    @guarded(lambda: False)
    def has_pending_work(self) -> bool:
        """True while a job is in flight or a result waits: until then its slots are pinned."""
        return bool(self._jobs or self._ready)

    @guarded(list)
    def take_events(self) -> list[OffloadingEvent]:
        """Events since the last call."""
        return self._residency.take()

    @guarded(lambda: None)
    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:  # noqa: ARG002
        """Mark rows as used. vLLM does not call this (0.31 on); loads count by themselves."""
        if self._tier is not None:
            self._tier.touch(list(keys))

    @guarded(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Start remembering failed loads of this request."""
        self._failed[req_context.req_id] = set()
        return RequestOffloadingContext(policy=self._offload_policy)

    @guarded(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget them."""
        self._failed.pop(req_context.req_id, None)

    @guarded(lambda: None)
    def drain_jobs(self) -> None:
        """Wait until no operation touches the primary tier's memory and every job has a result.

        May wait without limit, as vLLM asks: the slots are given to others next.
        """
        if self._tier is None:
            return
        try:
            self._tier.drain()
        except Exception as error:  # noqa: BLE001
            self.faults.record("drain", error)
            self._wait_for_jobs()
        self._collect()
        for job_id, job in list(self._jobs.items()):
            del self._jobs[job_id]
            self._refuse(job_id, job)

    def _wait_for_jobs(self) -> None:
        """The slow way to drain. A closed tier has nothing in flight."""
        while self._jobs:
            try:
                self._accept(self._tier.wait(_WAIT_SECONDS))
            except kvstrata.ClosedError:
                return
            except Exception as error:  # noqa: BLE001
                self.faults.record("wait", error)
                time.sleep(_WAIT_SECONDS)

    @guarded(lambda: False)
    def reset(self) -> bool:
        """Hide every row for good, also after a restart. `False`: not recorded, nothing is served.

        Blocks for the time one directory takes to be synced. vLLM has drained the tier's jobs.
        """
        return True if self._tier is None else bool(self._tier.reset())

    @guarded(lambda: None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """Metrics since the last call."""
        return self._metrics.take(self._snapshot)

    def _snapshot(self) -> dict[str, Any]:
        native = dict(self._tier.stats()) if self._tier is not None else {}
        return {
            **native,
            "faults": self.faults.total,
            "disabled": int(self._tier is None),
            "degraded": int(native.get("health", "ok") != "ok"),
        }

    def shutdown(self) -> None:
        """Close the native tier and let go of the primary tier's memory; vLLM releases it next.

        # Errors
        `kvstrata.BusyError` while the kernel still owns bytes of that memory: vLLM then keeps it
        mapped.
        """
        tier = self._tier
        if tier is not None:
            try:
                tier.close(timeout_s=_CLOSE_SECONDS)
            except kvstrata.BusyError:
                raise
            except Exception as error:  # noqa: BLE001
                self.faults.record("shutdown", error)
        self._tier = None
        self._release_arena()

    def _release_arena(self) -> None:
        arena, self._arena = self._arena, None
        if arena is None:
            return
        try:
            arena.release()
        except BufferError as error:
            self.faults.record("shutdown", error)


class KVStrataObjectTier(KVStrataDiskTier):
    """A tier in a bucket, for `secondary_tiers` of vLLM's tiering spec, shared by many machines.

    Differs from the disk tier in its options alone (docs/VLLM.md). Nothing in the engine waits for
    the server: a lookup that the server has not answered yet is a RETRY, and a miss after a while.

    # Errors
    The constructor raises :class:`kvstrata.ConfigError` for an option or a bucket that cannot work;
    with `required` false an unreachable bucket is joined later.
    """

    takes_bucket: ClassVar[bool] = True
