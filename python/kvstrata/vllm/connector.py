"""vLLM's offloading connector, plus the facts that a namespace needs and a spec of our own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector as StockConnector,
)
from vllm.logger import init_logger

import kvstrata
from kvstrata.memory.layout import LayoutError
from kvstrata.vllm import (
    admission,
    arrivals,
    awaited,
    bytemap,
    canonical,
    compat,
    facts,
    failurepolicy,
    fence,
    handshake,
    manifest,
    names,
    options,
    overtaken,
    packed,
    plugin,
    stackconfig,
    staleloads,
    startup,
)
from kvstrata.vllm.admission import Admission, AdmittingManager
from kvstrata.vllm.awaited import AwaitedTier
from kvstrata.vllm.guard import Faults
from kvstrata.vllm.handshake import WorkerFacts
from kvstrata.vllm.manager import KVStrataManager
from kvstrata.vllm.recorder import Recorder, RecordOptions
from kvstrata.vllm.refusals import RowReports
from kvstrata.vllm.rowworker import KVStrataRowWorker
from kvstrata.vllm.worker import TransferWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingConnectorMetadata,
        OffloadingWorkerMetadata,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

# Where vLLM's scheduler keeps the jobs that workers are to finish in the next step.
_FLUSHES = "_current_batch_jobs_to_flush"


class KVStrataConnector(StockConnector):
    """`OffloadingConnector` that hands the manifest's facts to the tiers and picks `KVStrataSpec`.

    A `spec_name` that the configuration gives is kept. Configuration that cannot work raises
    :class:`kvstrata.ConfigError` here, at start.
    """

    _fence: fence.ResetFence | None = None
    _stale_loads: staleloads.StaleLoads | None = None
    _recorder: Recorder | None = None
    # Requests whose load a reset overtook, to be reported as failed in this step.
    _overtaken: frozenset[str] = frozenset()

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        compat.require_version()
        extra = startup.choose_spec(vllm_config)
        stackconfig.check_names(extra)
        options.check_beside(extra)
        stackconfig.refuse_size_option(vllm_config)
        startup.refuse_unsupported(vllm_config, kv_cache_config, extra)
        self._admission = Admission.parse(extra)
        record = RecordOptions.parse(extra)
        self._on_reset = stackconfig.on_reset(extra)
        self._faults = Faults("kvstrata connector")
        self._world_size = int(vllm_config.parallel_config.world_size)
        self._proves_bytes = extra["spec_name"] == plugin.SPEC
        if self._proves_bytes:
            startup.settle(vllm_config, kv_cache_config, extra)
        self._worker_facts: WorkerFacts | None = None
        self._is_agreed = False
        # Requests of loads that copied nothing, until vLLM hears that they ended.
        self._failed_requests: set[str] = set()
        if role == KVConnectorRole.SCHEDULER:
            extra[facts.KEY] = startup.gather(vllm_config, kv_cache_config)
            extra[awaited.KEY] = self._proves_bytes
            if extra.get(names.STOCK_TIERS) or extra.get(names.TIERS):
                manifest.require_reproducible(facts.known(extra[facts.KEY]))
        else:
            selected = get_offloading_group_ids(kv_cache_config)
            extra[packed.KEY] = packed.pages(kv_cache_config, selected)
        super().__init__(vllm_config, role, kv_cache_config)
        if role != KVConnectorRole.SCHEDULER:
            return
        if record is not None:
            self._recorder = Recorder(record, self._tokens_per_hash())
        exact_slots = self._own_manager() is not None
        failurepolicy.check(vllm_config, extra, exact=exact_slots)
        if exact_slots:
            self._stale_loads = staleloads.StaleLoads()
        if self._admission.refuses_any:
            self.scheduler.manager = AdmittingManager(self.scheduler.manager)
        manager = self._own_manager()
        if manager is not None and not fence.counts_by_itself(self.scheduler):
            self._fence = fence.ResetFence(manager.on_reset_flushed)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Hand the KV tensors to the worker, and derive from them how its rows lie.

        # Errors
        :class:`kvstrata.ConfigError` where a tensor does not lie where the copies expect it.
        """
        super().register_kv_caches(kv_caches)
        made = self.connector_worker
        worker = None if made is None else made.worker
        if not isinstance(worker, TransferWorker):
            return
        config = self._kv_cache_config
        rank = int(self._vllm_config.parallel_config.rank)
        try:
            byte_map = bytemap.describe(
                kv_caches,
                config,
                get_offloading_group_ids(config),
                worker.layout,
                worker.addresses,
                rank=rank,
            )
        except LayoutError as error:
            raise kvstrata.ConfigError(str(error)) from error
        byte_map["kernels"] = bytemap.kernels(self._vllm_config, kv_caches)
        self._worker_facts = WorkerFacts.of(rank, byte_map)

    @property
    def _row_worker(self) -> KVStrataRowWorker | None:
        made = self.connector_worker
        worker = None if made is None else made.worker
        return worker if isinstance(worker, KVStrataRowWorker) else None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start this step's copies, and remember the requests whose load does not fit."""
        super().start_load_kv(forward_context, **kwargs)
        if self._row_worker is not None:
            jobs = self._connector_metadata.load_jobs
            self._failed_requests.update(
                jobs[job_id].req_id
                for job_id in self._row_worker.take_failed_loads()
                if job_id in jobs
            )
            self._overtaken |= staleloads.asked_for(self._connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What ended; loads that copied nothing end as failed, too."""
        results = super().get_transfer_results(finished_req_ids)
        failed = self._failed_requests & results.finished_recving
        self._failed_requests -= failed
        stale, self._overtaken = self._overtaken, frozenset()
        results.finished_recving |= stale
        results.failed_recving |= failed | stale
        return results

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Jobs that ended, and keys of rows that were not copied, also before their job ends."""
        base = super().build_connector_worker_meta()
        if self._row_worker is None:
            return base
        refused = self._row_worker.take_refused()
        return RowReports.of(base, refused) if base is not None or refused else None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Tell the manager which rows are none, and only then which jobs are complete."""
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, RowReports) and told.refused:
            self.scheduler.manager.rows_refused(told.refused)
        if self._stale_loads is not None:
            self._stale_loads.hold_back(connector_output)
        super().update_connector_output(connector_output)
        if self._fence is not None:
            self._fence.reported(getattr(told, "completed_jobs", {}))

    def get_handshake_metadata(self) -> WorkerFacts | None:
        """What this rank found out about its bytes, for the scheduler."""
        return self._worker_facts

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        """Open the tiers for the bytes that all ranks have.

        # Errors
        At start, :class:`kvstrata.ConfigError` where the ranks disagree with each other or with the
        scheduler. Should it be asked again later, the tiers are closed instead.
        """
        if not self._proves_bytes or self.connector_scheduler is None:
            return
        awaiting = [tier for tier in self._tiers() if isinstance(tier, AwaitedTier)]
        try:
            byte_map = handshake.agreed(metadata, self._world_size)
            handshake.check_sides(byte_map, self._bytes_per_block(byte_map))
        except kvstrata.ConfigError as error:
            if not self._is_agreed:
                raise
            self._stop(awaiting, str(error))
            return
        for tier in awaiting:
            tier.open(byte_map)
        manager = self._own_manager()
        if manager is not None:
            manager.open(byte_map)
        self._is_agreed = True

    def _stop(self, awaiting: list[AwaitedTier], why: str) -> None:
        for tier in awaiting:
            tier.close(why)
        manager = self._own_manager()
        if manager is not None:
            manager.stop(why)

    def _own_manager(self) -> KVStrataManager | None:
        """Our manager, where slots fit their group."""
        made = None if self.connector_scheduler is None else self.connector_scheduler.manager
        inner: Any = made.manager if isinstance(made, AdmittingManager) else made
        return inner if isinstance(inner, KVStrataManager) else None

    def _bytes_per_block(self, byte_map: dict[str, Any]) -> dict[int, int | None]:
        """What the groups' specifications say of the rows that the workers describe."""
        config = self._kv_cache_config
        selected = get_offloading_group_ids(config)
        heads = self._heads(byte_map)
        if heads is None:
            return packed.bytes_per_block(config, selected)
        return canonical.bytes_per_block(config, selected, heads)

    def _heads(self, byte_map: dict[str, Any]) -> int | None:
        """The model's KV heads, where a page holds all of them."""
        if not bytemap.is_canonical(byte_map):
            return None
        return int(self._vllm_config.model_config.get_total_num_kv_heads())

    def _tiers(self) -> list[Any]:
        manager = None if self.connector_scheduler is None else self.connector_scheduler.manager
        return list(getattr(manager, "secondary_tiers", []))

    def on_new_request(self, request: Request) -> None:
        """Let a request use what is below the GPU, if the rules admit it."""
        manager = self.scheduler.manager
        if isinstance(manager, AdmittingManager) and not self._admission.admits(request):
            manager.refuse(request.request_id)
        super().on_new_request(request)
        self._observe(request)

    def _tokens_per_hash(self) -> int:
        group = self.scheduler.config.kv_group_configs[0]
        return int(group.tokens_per_chunk) // int(group.hashes_per_chunk)

    def _observe(self, request: Request) -> None:
        manager, recorder = self._own_manager(), self._recorder
        status = self.scheduler._req_status.get(request.request_id)  # noqa: SLF001
        if (manager is None and recorder is None) or status is None:
            return
        try:
            if admission.is_refused(status.req_context):
                return
            arrival = arrivals.of(request, status)
            if recorder is not None:
                recorder.arrived(request, arrival.hint)
            if manager is not None:
                manager.observe(status.req_context, arrival)
        except Exception as error:  # noqa: BLE001 -- the engine goes on without
            self._faults.record("observe", error)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Ask for what can be loaded. vLLM asks where a request starts, or starts over."""
        if self._own_manager() is not None:
            status = self.scheduler._req_status.get(request.request_id)  # noqa: SLF001
            if status is not None:
                overtaken.starts_over(status.req_context)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let vLLM's scheduler finish it."""
        self._finished(request)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let vLLM's scheduler finish it."""
        self._finished(request)
        return super().request_finished_all_groups(request, block_ids)

    def _finished(self, request: Request) -> None:
        if self._stale_loads is not None:
            self._stale_loads.request_finished(request.request_id)
        try:
            if self._recorder is not None:
                self._recorder.ended(request)
            status = self.scheduler._req_status.get(request.request_id)  # noqa: SLF001
            if status is not None:
                arrivals.answered(status.req_context, int(request.num_output_tokens))
        except Exception as error:  # noqa: BLE001 -- the engine goes on without
            self._faults.record("request_finished", error)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """A step's jobs, and what the workers are to report of loads from before a reset."""
        made: OffloadingConnectorMetadata = super().build_connector_meta(scheduler_output)
        manager = self._own_manager()
        if manager is not None:
            # vLLM's own hook names those alone that run for the first time.
            manager.resumed(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        return made if self._stale_loads is None else self._stale_loads.metadata(made)

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine has to go on: also until the workers are done with a reset."""
        fenced = self._fence is not None and self._fence.is_open
        stale = self._stale_loads is not None and self._stale_loads.is_pending
        return fenced or stale or super().has_pending_push_work()

    def reset_cache(self) -> bool | None:
        """Forget what is below the GPU: in every tier, or in the CPU tier with `on_reset=cpu`.

        `False` where a tier could not record it; that tier serves nothing until it has. It may be
        called again at any time, also before the next step.
        """
        answer = self._reset_scheduler()
        if self._on_reset != stackconfig.RESET_ALL:
            return answer
        done = [tier.reset() for tier in self._tiers() if hasattr(tier, "reset")]
        return False if not all(done) else answer

    def _reset_scheduler(self) -> bool | None:
        scheduler = self.scheduler
        manager = self._own_manager()
        faults = 0 if manager is None else manager.faults.total
        if self._stale_loads is not None:
            self._stale_loads.at_reset(scheduler)
        pending = {} if self._fence is None else fence.pending_reports(scheduler)
        # vLLM's scheduler wants none left of a reset before, though no step has taken them yet.
        windows = overtaken.offered(scheduler)
        flushes: set[int] = getattr(scheduler, _FLUSHES, set())
        setattr(scheduler, _FLUSHES, set())
        try:
            answer = super().reset_cache()
        except Exception:
            logger.exception("kvstrata: the reset failed")
            answer = False
        setattr(scheduler, _FLUSHES, getattr(scheduler, _FLUSHES) | flushes)
        overtaken.forget_blocks(windows)
        if manager is not None:
            for status in scheduler._req_status.values():  # noqa: SLF001
                overtaken.mark(status.req_context)
        if self._fence is not None:
            self._fence.raise_for(pending)
        return False if manager is not None and manager.faults.total > faults else answer

    def shutdown(self) -> None:
        """End the recording, and vLLM's part."""
        if self._recorder is not None:
            self._recorder.close()
        super().shutdown()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Declare the metrics of the spec that runs. Called in the API server's process."""
        startup.name_metrics(vllm_config)
        return super().build_prom_metrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )


# The name that `kv_connector_module_path` is asked for where vLLM has put its own connector's name
# in the place of ours (`--kv-offloading-size`): ours refuses that.
OffloadingConnector = KVStrataConnector
