"""A device that does nothing by itself: it records what it is asked, and copies when told to.

Copies happen only when an event behind them is waited for, or when :meth:`RecordingDevice.run` is
called, so a test sees the bytes that a too early read would have seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.memory.device import DeviceEvent, HostStream, PageCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class RecordingEvent:
    def __init__(self, device: RecordingDevice, name: str) -> None:
        self.device = device
        self.name = name

    def done(self) -> bool:
        return self.name in self.device.passed

    def wait(self) -> None:
        self.device.log.append(f"host waits {self.name}")
        self.device.run(until=self.name)

    def seconds_since(self, start: DeviceEvent) -> float:  # noqa: ARG002
        return 0.0


class RecordingStream:
    def __init__(self, device: RecordingDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.queue: list[tuple[str, Callable[[], None]]] = []
        self.marks = 0

    def after(self, event: DeviceEvent) -> None:
        assert isinstance(event, RecordingEvent)
        self.device.log.append(f"{self.name} after {event.name}")
        self.queue.append((f"wait {event.name}", lambda: None))

    def to_slots(self, copies: Sequence[PageCopy]) -> None:
        self.device.log.append(f"{self.name} to_slots")
        self.queue.append(("copy", lambda: HostStream().to_slots(copies)))

    def to_blocks(self, copies: Sequence[PageCopy]) -> None:
        self.device.log.append(f"{self.name} to_blocks")
        self.queue.append(("copy", lambda: HostStream().to_blocks(copies)))

    def mark(self) -> RecordingEvent:
        self.marks += 1
        name = f"{self.name}.{self.marks}"
        self.device.log.append(f"{self.name} mark {name}")
        self.queue.append((f"mark {name}", lambda: None))
        return RecordingEvent(self.device, name)


class RecordingDevice:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.passed: set[str] = set()
        self.streams: list[RecordingStream] = []
        self.computed = 0
        # What the model has launched but the device has not run yet.
        self.compute: list[tuple[str, Callable[[], None]]] = []

    def open_stream(self) -> RecordingStream:
        names = ("stores", "loads", "expedited", "more")
        stream = RecordingStream(self, names[len(self.streams)])
        self.streams.append(stream)
        return stream

    def launch(self, work: Callable[[], None]) -> None:
        """The model launches work on its own stream."""
        self.compute.append(("work", work))

    def mark_compute(self) -> RecordingEvent:
        self.computed += 1
        name = f"compute.{self.computed}"
        self.log.append(f"compute mark {name}")
        self.compute.append((f"mark {name}", lambda: None))
        return RecordingEvent(self, name)

    def run(self, until: str | None = None) -> None:
        """Run the model as late as the recorded order allows: streams first, up to their waits."""
        moved = True
        while moved and (until is None or until not in self.passed):
            moved = any(self._step(stream.queue) for stream in self.streams)
            if not moved:
                moved = self._step(self.compute)

    def _step(self, queue: list[tuple[str, Callable[[], None]]]) -> bool:
        if not queue:
            return False
        what, work = queue[0]
        if what.startswith("wait ") and what.removeprefix("wait ") not in self.passed:
            return False
        queue.pop(0)
        work()
        if what.startswith("mark "):
            self.passed.add(what.removeprefix("mark "))
        return True
