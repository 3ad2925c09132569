"""Steps of a scheduler that has nothing to run, over vLLM's managers and ours."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.kv_offload.base import ScheduleEndContext

END = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
_SECONDS = 20


def settle(manager: Any) -> None:
    """Step until no job is under way."""
    deadline = time.monotonic() + _SECONDS
    while True:
        manager.on_schedule_end(END)
        if not manager.has_pending_work():
            return
        assert time.monotonic() < deadline, "jobs never ended"
        time.sleep(0.002)


def forget_the_cpu_tier(manager: Any) -> None:
    """Reset the CPU tier alone, and say that the workers are done, where the manager asks."""
    manager.reset_cache()
    getattr(manager, "on_reset_flushed", lambda: None)()
