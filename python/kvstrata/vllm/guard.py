"""The outermost guard of what the engine calls: an exception becomes a miss or a no-op.

It is counted and logged. The log is limited to one line per method and
:data:`LOG_INTERVAL_SECONDS`; the line says how many it stands for.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Callable

logger = init_logger(__name__)

LOG_INTERVAL_SECONDS = 60.0

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Faults:
    """Counts exceptions that were held back, and logs a few of them."""

    def __init__(self, owner: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.owner = owner
        self.total = 0
        self._clock = clock
        self._unlogged: dict[str, int] = {}
        self._logged_at: dict[str, float] = {}

    def record(self, where: str, error: BaseException) -> None:
        """Count an exception; log it, with traceback, if none from this place was lately."""
        self.total += 1
        self._unlogged[where] = self._unlogged.get(where, 0) + 1
        now = self._clock()
        last = self._logged_at.get(where)
        if last is not None and now - last < LOG_INTERVAL_SECONDS:
            return
        self._logged_at[where] = now
        logger.error(
            "%s: %s failed (%d times since the last such line); going on without it: %s",
            self.owner,
            where,
            self._unlogged.pop(where),
            error,
            exc_info=error,
        )


class Guarded(Protocol):
    """What :func:`guarded` needs of `self`."""

    faults: Faults


_S = TypeVar("_S", bound=Guarded)


def guarded(
    fallback: Callable[[], Any],
) -> Callable[[Callable[Concatenate[_S, _P], _R]], Callable[Concatenate[_S, _P], _R]]:
    """Let a method answer ``fallback()`` where it would raise. Interrupts and exits still pass."""

    def decorate(
        method: Callable[Concatenate[_S, _P], _R],
    ) -> Callable[Concatenate[_S, _P], _R]:
        @functools.wraps(method)
        def call(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 -- the engine must go on whatever went wrong here
                self.faults.record(method.__name__, error)
                answer: _R = fallback()
                return answer

        return call

    return decorate
