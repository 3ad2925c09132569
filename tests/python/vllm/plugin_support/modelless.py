"""A whole engine without a model: vLLM's scheduler, our connectors, tensors in the GPU's place.

What a model would compute for a token is known beforehand (:class:`Text`), so every block that a
request has not computed itself in this very step can be compared with what it ought to hold.
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvstrata.vllm.connector import KVStrataConnector
from plugin_support.held_worker import HeldWorker
from plugin_support.known_bytes import BLOCK, HEAD, PAGE, Gpu, Text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


# Tokens of the sliding window: a hit asks for the last three blocks at most.
WINDOW = 9
LONGEST = 160


@dataclass(frozen=True)
class Shape:
    """What an engine is made of. `layers` has the number of layers of each group."""

    layers: tuple[int, ...] = (2,)
    ranks: int = 1
    blocks_per_chunk: int = 1
    blocks: int = 56
    slots: int = 64
    is_async: bool = False
    policy: str = "lru"
    record: str | None = None
    tiers: tuple[dict[str, Any], ...] = ()
    # How long a request waits for rows on their way, instead of our own default.
    load_wait_s: float = 10.0

    @property
    def row_bytes(self) -> dict[int, int]:
        part = PAGE * self.ranks * self.blocks_per_chunk
        return {group: count * part for group, count in enumerate(self.layers)}


def kv_cache_config(shape: Shape) -> KVCacheConfig:
    common: dict[str, Any] = {
        "block_size": BLOCK,
        "num_kv_heads": 1,
        "head_size": HEAD,
        "dtype": torch.bfloat16,
    }
    groups = []
    for group, count in enumerate(shape.layers):
        spec = (
            SlidingWindowSpec(**common, sliding_window=WINDOW)
            if group
            else FullAttentionSpec(**common)
        )
        groups.append(KVCacheGroupSpec([f"g{group}.{layer}" for layer in range(count)], spec))
    tensors = [
        KVCacheTensor(
            size=PAGE * shape.blocks,
            layers=[
                f"g{group}.{layer}" for group, count in enumerate(shape.layers) if layer < count
            ],
            layer_stride=PAGE * shape.blocks,
            block_stride=PAGE,
        )
        for layer in range(max(shape.layers))
    ]
    return KVCacheConfig(num_blocks=shape.blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def vllm_config(shape: Shape, model: Path, engine_id: str) -> VllmConfig:
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": max(4096, shape.slots * max(shape.row_bytes.values())),
        "tiers": list(shape.tiers),
        "load_wait_s": shape.load_wait_s,
        "offload_prompt_only": False,
        "eviction_policy": shape.policy,
        "blocks_per_chunk": shape.blocks_per_chunk,
    }
    if shape.record is not None:
        extra["record"] = shape.record
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.kv_cache_layout = "LBHNC"
    cache.num_gpu_blocks = shape.blocks
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model), skip_tokenizer_init=True, max_model_len=LONGEST, seed=0
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=40,
            max_model_len=LONGEST,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=False,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVStrataConnector",
            kv_connector_module_path="kvstrata.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
            engine_id=engine_id,
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    config.scheduler_config.async_scheduling = shape.is_async
    config.parallel_config.world_size = shape.ranks
    # vLLM raises it for its CPU kernels; nothing is computed here.
    config.cache_config.block_size = BLOCK
    return config


class Modelless:
    """An engine that is stepped by hand. Ends requests by itself when they are as long as asked."""

    def __init__(self, shape: Shape, model: Path, engine_id: str) -> None:
        self.shape = shape
        made = vllm_config(shape, model, engine_id)
        blocks = kv_cache_config(shape)
        self.gpus = [Gpu(shape.layers, shape.blocks) for _ in range(shape.ranks)]
        self.workers: list[Any] = []
        self.holds: list[HeldWorker] = []
        init_none_hash(sha256)
        for rank, gpu in enumerate(self.gpus):
            self._add_worker(pickle.loads(pickle.dumps(made)), blocks, rank, gpu)  # noqa: S301
        tokens, hashed = resolve_kv_cache_block_sizes(blocks, made)
        kind = AsyncScheduler if shape.is_async else Scheduler
        with set_current_vllm_config(made):
            self.scheduler: Any = kind(
                vllm_config=made,
                kv_cache_config=blocks,
                log_stats=True,
                structured_output_manager=StructuredOutputManager(made),
                block_size=tokens,
                hash_block_size=hashed,
            )
        self.connector: Any = self.scheduler.connector
        told = {rank: worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        self.connector.set_xfer_handshake_metadata_pp_aware(told)
        self.aggregator = KVOutputAggregator(shape.ranks)
        self._hasher = get_request_block_hasher(hashed, sha256)
        self.texts: dict[str, Text] = {}
        self.resets = 0
        self.seen: Counter[str] = Counter()
        self.count = 0
        # Hears of jobs that go to the workers, and of reports before the scheduler does.
        self.watch: Any = None
        self._unprocessed: deque[tuple[Any, Any]] = deque()

    def _add_worker(self, made: Any, blocks: KVCacheConfig, rank: int, gpu: Gpu) -> None:
        made.parallel_config.rank = rank
        with set_current_vllm_config(made):
            worker: Any = KVStrataConnector(made, KVConnectorRole.WORKER, blocks)
            worker.register_kv_caches(gpu.caches())
        self.workers.append(worker)
        self.holds.append(HeldWorker(worker.connector_worker.worker, gpu.poison))

    @property
    def manager(self) -> Any:
        return self.connector.connector_scheduler.manager

    @property
    def tiers(self) -> Sequence[Any]:
        return self.manager.secondary_tiers

    def add(self, text: Text, max_tokens: int) -> str:
        self.count += 1
        name = f"r{self.count}"
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        sampling.update_from_generation_config({}, 2)
        self.texts[name] = text
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=text.prompt,
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )
        return name

    @property
    def is_idle(self) -> bool:
        return not (
            self.scheduler.has_requests()
            or self._unprocessed
            or self.connector.has_pending_push_work()
        )

    def reset(self, *, running: bool) -> bool:
        """Reset vLLM's prefix cache and everything below; `running` requests start anew."""
        done = bool(
            self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=True)
        )
        if done and running:
            # From here on no block may hold what was computed before.
            self.resets += 1
        return done

    def step(self) -> None:
        """One step of the scheduler and of every worker."""
        before = {
            name: int(getattr(request, "num_output_placeholders", 0))
            for name, request in self.scheduler.requests.items()
        }
        output = self.scheduler.schedule()
        if self.watch is not None:
            self.watch.started(output.kv_connector_metadata)
        self.seen["preempted"] += len(output.preempted_req_ids or ())
        told = [self._work(rank, output) for rank in range(self.shape.ranks)]
        sampled = self._compute_all(output, before)
        results = [self._collect(rank, output, told[rank]) for rank in range(self.shape.ranks)]
        runners = [self._runner_output(sampled, result) for result in results]
        merged = self.aggregator.aggregate(runners, 0) if len(runners) > 1 else runners[0]
        self._unprocessed.append((output, merged))
        # An asynchronous scheduler hears of a step when it has scheduled the next one.
        late = int(self.shape.is_async and bool(output.num_scheduled_tokens))
        while len(self._unprocessed) > late:
            self._process(*self._unprocessed.popleft())
        for name in output.finished_req_ids:
            self.texts.pop(name, None)

    def _process(self, output: Any, merged: ModelRunnerOutput) -> None:
        told = merged.kv_connector_output
        if self.watch is not None and told is not None:
            self.watch.reported(getattr(told.kv_connector_worker_meta, "completed_jobs", {}))
        self.scheduler.update_from_output(output, merged)

    def _work(self, rank: int, output: Any) -> Any:
        """The part of a step before the model runs."""
        worker = self.workers[rank]
        metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))  # noqa: S301
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        return metadata

    def _collect(self, rank: int, output: Any, metadata: Any) -> KVConnectorOutput:
        worker = self.workers[rank]
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        made = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=set(results.failed_recving),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        self.seen["failed loads"] += len(results.failed_recving or ())
        self.seen["loads"] += len(metadata.load_jobs)
        self.seen["stores"] += len(metadata.store_jobs)
        worker.clear_connector_metadata()
        return made

    def _compute_all(self, output: Any, before: dict[str, int]) -> dict[str, list[int]]:
        starts = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self._poison_fresh(output, starts)
        sampled: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = starts[name] + count
            self._compute(name, starts[name], end)
            known = request.num_tokens + before.get(name, 0)
            sampled[name] = [self.texts[name].tokens[end]] if end == known else []
        # Requests of one step read each other's blocks.
        for name in sampled:
            self._check(name, starts[name])
        return sampled

    def blocks_of(self, name: str, group: int) -> list[Any]:
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return managers[group].req_to_blocks.get(name, [])

    def _poison_fresh(self, output: Any, starts: dict[str, int]) -> None:
        """Blocks that begin their life in this step hold nothing of use."""
        cached = output.scheduled_cached_reqs
        fresh: set[int] = set()
        whole = {one.req_id: one.block_ids for one in output.scheduled_new_reqs}
        for name, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                whole[name] = new
            elif new is not None:
                fresh.update(block for ids in new for block in ids)
        for name, groups in whole.items():
            for ids in groups:
                fresh.update(ids[-(-starts[name] // BLOCK) :])
        fresh.discard(0)
        if fresh:
            for gpu in self.gpus:
                gpu.poison(sorted(fresh))

    def _range(self, name: str, group: int, first: int, end: int) -> tuple[list[int], list[int]]:
        """Numbers and ids of a request's real blocks from `first` up to `end`."""
        blocks = self.blocks_of(name, group)
        numbers = [at for at in range(first, min(end, len(blocks))) if not blocks[at].is_null]
        return numbers, [blocks[at].block_id for at in numbers]

    def _check(self, name: str, computed: int) -> None:
        """Every block that attention will read holds what its tokens give."""
        for group in range(len(self.shape.layers)):
            first = max(0, computed - WINDOW + 1) // BLOCK if group else 0
            numbers, ids = self._range(name, group, first, computed // BLOCK)
            wanted = computed // BLOCK - first
            assert len(ids) == wanted, f"{name}: group {group} lacks blocks it will read"
            if not ids:
                continue
            stamps = self.texts[name].stamps[group][numbers] + self.resets
            for rank, gpu in enumerate(self.gpus):
                wrong = gpu.wrong(group, ids, stamps)
                assert not wrong, (
                    f"{name}, rank {rank}, group {group}: blocks {[numbers[at] for at in wrong]} "
                    f"of {computed} computed tokens hold "
                    f"{[int(gpu.views[0][ids[at], 0]) for at in wrong]}, not "
                    f"{[int(stamps[at]) for at in wrong]}"
                )
            self.seen["blocks compared"] += len(ids)

    def _compute(self, name: str, start: int, end: int) -> None:
        for group in range(len(self.shape.layers)):
            numbers, ids = self._range(name, group, start // BLOCK, end // BLOCK)
            if ids:
                stamps = self.texts[name].stamps[group][numbers] + self.resets
                for gpu in self.gpus:
                    gpu.write(group, ids, stamps)

    def _runner_output(
        self, sampled: dict[str, list[int]], told: KVConnectorOutput
    ) -> ModelRunnerOutput:
        names = list(sampled)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[list(sampled[name]) for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=told,
        )

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()
