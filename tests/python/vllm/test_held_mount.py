"""A load that hangs below vLLM's own manager, which reuses a slot as soon as its job has ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from plugin_support.configs import disk_entry
from test_stock_manager import key, open_stack
from vllm.v1.kv_offload.base import LookupResult

import kvstrata

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("registered")


class HeldMount:
    """A directory behind a FUSE daemon that can be stopped: calls to it hang until it goes on."""

    def __init__(self, holder: Path) -> None:
        below, self.path = holder / "below", holder / "above"
        below.mkdir(mode=0o700)
        self.path.mkdir(mode=0o700)
        program = shutil.which("bindfs")
        if program is None:
            pytest.skip("bindfs is not installed")
        self.daemon = subprocess.Popen(
            [program, "-f", "--no-allow-other", "-o", "attr_timeout=600", below, self.path]
        )
        until = time.monotonic() + 10
        while not os.path.ismount(self.path):
            if self.daemon.poll() is not None or time.monotonic() > until:
                self.end()
                pytest.skip("bindfs cannot mount here")
            time.sleep(0.01)

    def stop(self) -> None:
        self.daemon.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.daemon.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self.daemon.poll() is None:
            self.go_on()
            program = shutil.which("fusermount3") or "fusermount3"
            subprocess.run([program, "-uz", self.path], check=False)
            self.daemon.wait(timeout=10)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[HeldMount]:
    mount = HeldMount(tmp_path)
    yield mount
    mount.end()


@pytest.mark.skipif(not hasattr(kvstrata, "open_tier"), reason="kvstrata._native is not built")
@pytest.mark.parametrize("io_backend", ["threads", "uring"])
def test_a_load_that_hangs_ends_and_writes_nothing_to_the_slot_that_another_row_has_by_then(
    mount: HeldMount, engine_id: str, io_backend: str
) -> None:
    entry = disk_entry(f"file://{mount.path}/kv", deadline_s=0.5, io_backend=io_backend)
    try:
        stack = open_stack(engine_id, entry, chunks=4)
    except kvstrata.ConfigError as error:
        if "does not work here" not in str(error):
            raise
        pytest.skip(str(error))
    native = stack.tier._tier
    assert native.capabilities()["may_hang"] is True
    stack.store(stack.request("a"), {key(n): n + 1 for n in range(4)})
    stack.settle()
    stack.manager.primary_tier.reset_cache()
    # The file is open and its attributes are known: what hangs is the read itself.
    first = stack.request("first")
    assert stack.look(first, key(0)) is LookupResult.HIT
    assert stack.load(first, key(0)) == 1
    stack.manager.primary_tier.reset_cache()

    mount.stop()
    waiter = stack.request("b")
    for n in range(4):
        assert stack.manager.lookup(key(n), waiter) is LookupResult.HIT_PENDING
    stack.settle()
    held = native.stats()["stuck_load_buffer_bytes"]
    assert held > 0, "no read was held"
    for n in range(4):
        assert stack.look(waiter, key(n)) is LookupResult.MISS
    # All four slots go to other rows while the kernel still has the reads.
    stack.store(stack.request("c"), {key(n): 100 + n for n in range(10, 14)})
    chunks = range(4)
    assert {stack.value(chunk) for chunk in chunks} == {110, 111, 112, 113}
    mount.go_on()
    until = time.monotonic() + 10
    while native.stats()["load_buffer_bytes"] > 0:
        assert time.monotonic() < until, "the reads never came back"
        time.sleep(0.001)
    assert {stack.value(chunk) for chunk in chunks} == {110, 111, 112, 113}, "foreign bytes"
    stack.settle()

    again = stack.request("d")
    assert stack.look(again, key(2)) is LookupResult.MISS, "it has to be stored again"
    stack.manager.primary_tier.reset_cache()
    stack.store(again, {key(n): n + 1 for n in range(4)})
    stack.settle()
    stack.manager.primary_tier.reset_cache()
    last = stack.request("e")
    assert stack.look(last, key(2)) is LookupResult.HIT
    assert stack.load(last, key(2)) == 3
    stack.manager.shutdown()
