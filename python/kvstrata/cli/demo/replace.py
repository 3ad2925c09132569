"""The demo's own disk tier: the product's, and once, on demand, a wrong row behind its back.

Loaded only inside the warm engine of `kvstrata demo`. While the trigger file is absent it is
the product's tier. When the file is there and a load has ended well (every checksum verified),
one row in the CPU tier is overwritten by another row of the same group before vLLM hears of the
load. Nothing after the checksum can notice, so the answer must change; if it does not, the
demo's comparison could not have seen a wrong byte, and the demo fails.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstrata.vllm.tiers import KVStrataDiskTier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

_GROUP_BYTES = 4


class RowReplacer:
    """Overwrites one loaded row by another of its group, once for each time the trigger is set."""

    def __init__(self, view: memoryview, trigger: Path) -> None:
        """`view` has the shape (slots, slot bytes), as vLLM's CPU tier gives it."""
        strides = view.strides or (len(view),)
        self._slot_bytes = strides[0]
        self._bytes = view.cast("B")
        self._trigger = trigger
        self._slots: dict[int, dict[bytes, int]] = {}

    def started(self, job_id: int, slots: dict[bytes, int]) -> None:
        """Remember which slot each key of a load goes to."""
        self._slots[job_id] = slots

    def finished(self, job_id: int, *, success: bool) -> None:
        """Act on a load that ended well, if asked to."""
        slots = self._slots.pop(job_id, None)
        if slots is None or not success or not self._trigger.exists():
            return
        pair = self._choose(slots)
        if pair is None:
            return
        target, source = pair
        self._bytes[self._range(slots[target])] = self._bytes[self._range(slots[source])]
        record = {"key": target.hex(), "by": source.hex()}
        self._trigger.with_suffix(".done").write_text(json.dumps(record), encoding="utf-8")
        self._trigger.unlink()

    def forget(self) -> None:
        """Let go of the view, so that its owner can release it."""
        self._bytes.release()
        self._slots.clear()

    def _choose(self, slots: dict[bytes, int]) -> tuple[bytes, bytes] | None:
        """Two keys of the group with the most rows whose bytes differ."""
        groups: dict[bytes, list[bytes]] = {}
        for key in slots:
            groups.setdefault(key[-_GROUP_BYTES:], []).append(key)
        for keys in sorted(groups.values(), key=len, reverse=True):
            target = keys[0]
            for source in keys[1:]:
                if self._row(slots[target]) != self._row(slots[source]):
                    return target, source
        return None

    def _row(self, slot: int) -> bytes:
        return self._bytes[self._range(slot)].tobytes()

    def _range(self, slot: int) -> slice:
        return slice(slot * self._slot_bytes, (slot + 1) * self._slot_bytes)


class RowReplacingDiskTier(KVStrataDiskTier):
    """`kvstrata_disk` with a `RowReplacer` between the end of a load and vLLM."""

    def __init__(
        self,
        offloading_spec: Any,  # noqa: ANN401 - a vLLM type
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        trigger: str,
        **options: Any,  # noqa: ANN401 - the product's own options
    ) -> None:
        """The product's arguments, and the path of the trigger file."""
        super().__init__(
            offloading_spec=offloading_spec,
            primary_kv_view=primary_kv_view,
            tier_type=tier_type,
            **options,
        )
        self._replacer = RowReplacer(primary_kv_view, Path(trigger))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start a load and remember its slots."""
        slots = dict(
            zip(map(bytes, job_metadata.keys), map(int, job_metadata.chunk_ids), strict=True)
        )
        self._replacer.started(job_metadata.job_id, slots)
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The product's results; the replacer sees each before vLLM does."""
        results = list(super().get_finished_jobs())
        for result in results:
            self._replacer.finished(result.job_id, success=result.success)
        return results

    def shutdown(self) -> None:
        """Release the view, then close the product's tier."""
        self._replacer.forget()
        super().shutdown()
