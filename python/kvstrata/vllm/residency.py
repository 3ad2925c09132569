"""Events about rows that came to a tier or left it, for vLLM's publishers of KV events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import OffloadingEvent

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.kv_offload.base import Locality, Medium

_MOST = 65_536
# Evictions are not reported to us.
_GONE = frozenset({"miss", "corrupt"})
_STORED = frozenset({"ok"})


class Residency:
    """What happened in one tier since it was asked last; nothing where nobody will ask.

    `ownership` names the tier, `None` for the CPU tier. Events nobody takes are bounded: the
    newest are lost.
    """

    def __init__(
        self,
        medium: Medium,
        locality: Locality | None = None,
        ownership: str | None = None,
        *,
        wanted: bool,
    ) -> None:
        self._medium = medium
        self._locality = locality
        self._ownership = ownership
        self._wanted = wanted
        self._events: list[OffloadingEvent] = []

    def note(self, keys: Iterable[Any], *, removed: bool) -> None:
        """Rows are there, or gone."""
        if not self._wanted or len(self._events) >= _MOST:
            return
        named = list(keys)
        if named:
            self._events.append(
                OffloadingEvent(
                    keys=named,
                    medium=self._medium,
                    removed=removed,
                    locality=self._locality,
                    ownership=self._ownership,
                )
            )

    def note_job(self, rows: Iterable[tuple[Any, str]], *, is_load: bool) -> None:
        """A job ended: rows it stored are there, those that a load found gone or bad are not."""
        if self._wanted:
            wanted = _GONE if is_load else _STORED
            self.note((key for key, outcome in rows if outcome in wanted), removed=is_load)

    def take(self) -> list[OffloadingEvent]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events
