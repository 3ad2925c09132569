"""Our messages where vLLM's go: it gives handlers to the logger `vllm` alone."""

from __future__ import annotations

import logging

OURS, VLLMS = "kvstrata", "vllm"


def join() -> None:
    """Have vLLM's logger handle what ours gets, unless somebody has set up handlers for it.

    Without any, INFO would be lost, and warnings would come without time, level and process. A
    parent and not its handlers: vLLM sets those up when it knows its arguments, and may do so
    after this. Safe to call any number of times.
    """
    ours, root = logging.getLogger(OURS), logging.getLogger()
    is_arranged = ours.handlers or root.handlers
    ours.parent = root if is_arranged else logging.getLogger(VLLMS)
