"""Our manager over the CPU tier in Rust, whose slots fit their group, and over our tiers below.

It is a thin shell. `kvstrata._native.CpuTier` knows keys, slots and users, and
`kvstrata._native.RequestBook` which requests ask for which rows, wait for them and hold them; a
:class:`kvstrata.vllm.below.TierBelow` moves rows to and from its device.

* A **store** that the workers completed goes on to every tier below, in the order of the prompt.
* A **lookup** pins what is in the CPU tier, and answers "on its way" for what a tier below has. It
  starts nothing and takes no slot, and runs no Python: :meth:`KVStrataManager.open` puts the book's
  own method in the place of this class's.
* At the **end of a step** rows are loaded from below, of the span on which all groups of a request
  agree, each once, as many as there is room for. A request that waits too long is told "miss".
* A row that some rank did not copy (:meth:`KVStrataManager.rows_refused`) never becomes visible.

Before :meth:`KVStrataManager.open` every lookup is a miss and nothing is stored. After it nothing
raises into the engine but :meth:`KVStrataManager.prepare_load`, and that only for a key that was
never reported as a hit.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingManager,
    OffloadPolicy,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TierFilter,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstrata._native import RequestBook
from kvstrata.vllm import arrivals, overtaken
from kvstrata.vllm.below import Slots
from kvstrata.vllm.guard import Faults, guarded
from kvstrata.vllm.loadlimits import LoadLimits
from kvstrata.vllm.reports import Reports
from kvstrata.vllm.residency import Residency
from kvstrata.vllm.rowspec import RowSpec
from kvstrata.vllm.wholerequests import WholeRequests

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import (
        OffloadingEvent,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )

    from kvstrata._native import CpuTier
    from kvstrata.vllm.arrivals import Arrival
    from kvstrata.vllm.below import Ended, TierBelow
    from kvstrata.vllm.opened import Opened

logger = init_logger(__name__)


class KVStrataManager(OffloadingManager):
    """See the module. `tokens_per_chunk` is per group id, in the order of the selected groups."""

    def __init__(
        self,
        tokens_per_chunk: Mapping[int, int],
        opener: Callable[[dict[str, Any]], Opened],
        *,
        events: bool = False,
        limits: LoadLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`opener` makes what the manager works on, for the byte map that all ranks agreed to.

        `clock` is read once a step.
        """
        self._tokens = list(tokens_per_chunk.items())
        self._opener = opener
        self._limits = limits or LoadLimits()
        self._clock = clock
        self._byte_map: dict[str, Any] | None = None
        self._opened: Opened | None = None
        self._book: RequestBook | None = None
        self._stopped = False
        self._contexts: dict[str, ReqContext] = {}
        self._arrivals = arrivals.Arrivals()
        self._whole = WholeRequests(self._cascade)
        self._refused_rows = 0
        self._residency = Residency(Medium.CPU, wanted=events)
        self._reports = Reports(clock, self._limits.wait_s)
        self.faults = Faults("kvstrata manager")

    def open(self, byte_map: dict[str, Any]) -> None:
        """Begin to serve; again, with another byte map, end it: these rows mean something else.

        # Errors
        What `opener` raises: something configured cannot work.
        """
        if self._byte_map is None:
            self._opened = self._opener(byte_map)
            self._reports.name_off(self._opened.off)
            self._byte_map = byte_map
            self._book = book = self._make_book(self._opened)
            # vLLM calls these once per key.
            bound: Any = self
            bound.lookup, bound.get_load_source = book.lookup, book.get_load_source
        elif byte_map != self._byte_map:
            self.stop("the KV tensors' layout changed while the server ran")

    def _make_book(self, opened: Opened) -> RequestBook:
        answers = (LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING)
        return RequestBook(
            opened.cpu,
            list(opened.tiers),
            self._tokens,
            answers=(*answers, LookupResult.RETRY),
            sources=[CacheHitSource.HOST, *(tier.cache_hit_source for tier in opened.tiers)],
            everywhere=TierFilter.ALL,
            allowed=self._allowed,
            wait_s=self._limits.wait_s,
            share=_thousandths(self._limits.share),
            request_share=_thousandths(self._limits.request_share),
        )

    def _allowed(self, req_context: ReqContext) -> tuple[bool, int]:
        """Whether a request may load from the CPU tier, and a bit for each tier below."""
        allows = req_context.load_tier_filter.allows
        tiers = enumerate(self.secondary_tiers)
        below = sum(1 << at for at, tier in tiers if allows(tier.medium, tier.locality))
        return allows(Medium.CPU, None), below

    def stop(self, why: str) -> None:
        """Answer misses and store nothing from now on. Jobs in flight end without a row."""
        if not self._stopped:
            logger.error("kvstrata: the CPU tier answers misses from now on: %s", why)
        self._stopped = True
        if self._book is not None:
            self._book.stop()

    @property
    def is_open(self) -> bool:
        """Whether the workers' bytes are known."""
        return self._opened is not None

    @property
    def cpu(self) -> CpuTier | None:
        """The CPU tier; `None` before the manager is open."""
        return None if self._opened is None else self._opened.cpu

    @property
    def secondary_tiers(self) -> tuple[TierBelow, ...]:
        """The tiers below, under the name that vLLM's tiering manager has for them."""
        return () if self._opened is None else self._opened.tiers

    # Requests

    @guarded(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin to keep what is known of the request."""
        self._contexts[req_context.req_id] = req_context
        if self._book is not None:
            self._book.begin(req_context)
        if any(tier.is_request_level for tier in self.secondary_tiers):
            return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext()

    @guarded(lambda: None)
    def observe(self, req_context: ReqContext, arrival: Arrival) -> None:
        """Count the request's one access to its rows, in every tier it may load from."""
        if self._book is None:
            return
        self._book.observe(req_context, arrival.groups, self._clock(), **arrival.known)
        for tier, again in self._arrivals.tell(req_context, arrival, self.secondary_tiers):
            self._cascade(tier, again)

    @guarded(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget it, and let its rows go."""
        # The id may be another request's by now.
        req_id = req_context.req_id
        if self._contexts.get(req_id) is req_context:
            del self._contexts[req_id]
        if self._book is None:
            return
        self._book.end(req_context, arrivals.output_tokens(req_context))
        self._arrivals.end(req_context, self.secondary_tiers)

    # Loads

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:  # noqa: ARG002
        """What there is of a key. This is asked before the manager is open only."""
        return LookupResult.MISS

    def get_load_source(
        self,
        key: OffloadKey,  # noqa: ARG002 -- vLLM's signature
        req_context: ReqContext,  # noqa: ARG002
    ) -> CacheHitSource:
        """Where a row came from. This is asked before the manager is open only."""
        return CacheHitSource.EXTERNAL_UNSPECIFIED

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> RowSpec:
        """Pin rows for the workers.

        # Errors
        `RuntimeError` where a row is not there: it was never reported as a hit in this step.
        """
        ordered = list(keys)
        rows = None if self._book is None else self._book.prepare_load(ordered, req_context)
        if rows is None:
            msg = f"a load of {len(ordered)} rows, not all of which are in the CPU tier"
            raise RuntimeError(msg)
        return RowSpec.packed(*rows)

    @guarded(lambda: None)
    def complete_load(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,  # noqa: ARG002 -- vLLM's signature
    ) -> None:
        """Let rows go that the workers have loaded."""
        if self._book is not None:
            self._residency.note(self._book.complete_load(keys), removed=True)

    # Stores

    @guarded(lambda: None)
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Give slots to keys that have none; `None` where there is no room now."""
        if self._opened is None or self._book is None or overtaken.is_marked(req_context):
            return PrepareStoreOutput([], RowSpec((), (), (), ()), [])
        self._poll(self._opened, self._book)
        ordered = list(keys)
        prepared = self._book.prepare_store(ordered, req_context)
        if prepared is None:
            return None
        stored, rows, evicted = prepared
        self._residency.note(evicted, removed=True)
        self._whole.offer(self._opened.cpu, self._opened.tiers, ordered, stored)
        return PrepareStoreOutput(stored, RowSpec.packed(*rows), evicted)

    @guarded(lambda: None)
    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,  # noqa: FBT001, FBT002 -- vLLM's signature
    ) -> None:
        """Make rows visible that the workers have copied, and hand them to the tiers below."""
        if self._book is None:
            return
        ready = self._book.complete_store(keys, req_context, success)
        self._residency.note(ready, removed=False)
        for tier in self.secondary_tiers:
            self._cascade(tier, ready)

    def _cascade(self, tier: TierBelow, keys: list[bytes]) -> None:
        if self._book is not None and keys and (wanted := tier.wanted(keys)):
            tier.store(Slots(*self._book.hold(wanted)))

    @guarded(lambda: None)
    def rows_refused(self, keys: Iterable[bytes]) -> None:
        """Some rank did not copy these rows: they are misses from now on.

        The jobs that store them end without them, and rows that did not fit a load go when their
        last user is done.
        """
        if self._book is None:
            return
        named = list(set(keys))
        self._refused_rows += len(named)
        self._book.refuse(named)

    # Steps

    @guarded(lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Take up what ended, start what requests want from below, and let hits go."""
        if self._opened is None or self._book is None:
            return
        self._poll(self._opened, self._book)
        self._run(self._book, context.new_req_ids)
        for req_id in context.preempted_req_ids:
            known = self._contexts.get(req_id)
            if known is not None:
                self._book.preempted(known)
        starts, evicted, timed_out = self._book.end_step(self._clock())
        self._residency.note(evicted, removed=True)
        for number, job in starts:
            self._opened.tiers[number].load(Slots(*job))
        if timed_out is not None:
            self._reports.tell_of_wait(timed_out)
        if self._whole.is_pending:
            self._whole.go_on(self._opened.cpu)

    @guarded(lambda: None)
    def resumed(self, req_ids: Iterable[str]) -> None:
        """These requests run again after they had been preempted."""
        if self._book is not None:
            self._run(self._book, req_ids)

    def _run(self, book: RequestBook, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            known = self._contexts.get(req_id)
            if known is not None:
                book.scheduled(known)

    @guarded(lambda: False)
    def has_pending_work(self) -> bool:
        """Whether rows are to be loaded from below, or jobs of tiers below are under way."""
        if self._book is None:
            return False
        below = any(tier.is_pending for tier in self.secondary_tiers)
        return below or self._whole.is_pending or self._book.is_pending()

    def _poll(self, opened: Opened, book: RequestBook) -> None:
        for tier in opened.tiers:
            for ended in tier.poll():
                self._take_up(opened.cpu, book, ended)
            freed = tier.no_longer_busy()
            if freed:
                opened.cpu.let_go(freed, success=False)

    def _take_up(self, cpu: CpuTier, book: RequestBook, ended: Ended) -> None:
        slots = ended.slots
        if ended.is_load:
            came = book.load_ended(slots.keys, slots.handles, ended.lost, ended.busy)
            self._residency.note(came, removed=False)
        elif ended.busy:
            still = set(ended.busy)
            cpu.let_go([one for at, one in enumerate(slots.handles) if at not in still])
        else:
            cpu.let_go(slots.handles)

    # Resets

    @guarded(lambda: None)
    def reset_cache(self) -> None:
        """Forget every row of the CPU tier. Slots in use stay taken until their users are done."""
        if self._book is not None:
            self._whole.clear()
            self._book.reset()

    @guarded(lambda: None)
    def on_reset_flushed(self) -> None:
        """The workers are done with what they were doing at the last reset."""
        if self._opened is not None:
            self._opened.cpu.flushed()

    # Reports

    @guarded(list)
    def take_events(self) -> list[OffloadingEvent]:
        """Events of the CPU tier and of the tiers below since the last call."""
        below = [event for tier in self.secondary_tiers for event in tier.take_events()]
        return below + self._residency.take()

    @guarded(lambda: None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """Metrics since the last call."""
        if self._opened is None:
            return None
        return self._reports.take(self._snapshot, self._opened.tiers)

    def _snapshot(self) -> dict[str, Any]:
        tiers = self.secondary_tiers
        return {
            **({} if self._opened is None else self._opened.cpu.stats()),
            **({} if self._book is None else self._book.stats()),
            "faults": self.faults.total,
            "refused_rows": self._refused_rows,
            "skipped_stores": sum(tier.skipped_stores for tier in tiers),
        }

    def config_info(self) -> list[Mapping[str, Any]]:
        """What does not change, of each tier; vLLM 0.33 asks once, after the manager is open."""
        known = () if self._opened is None else self._opened.config_info
        return list(known) or [{}]

    def shutdown(self) -> None:
        """Close the tiers below, and let the arena go unless the kernel still owns bytes of it."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        if self._book is not None:
            # Its lookup is bound in the place of this class's, and knows the rows still.
            self._book.stop()
        closed = [tier.close() for tier in opened.tiers]
        if all(closed):
            opened.release()


def _thousandths(part: float) -> int:
    return max(1, round(part * 1000))
