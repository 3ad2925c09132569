"""Looking up beside other Python threads."""

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

KEYS = 20_000
# By far more than a test takes: who has the interpreter's lock gives it up by itself or not at all.
NEVER_S = 1000.0


@pytest.fixture
def nobody_is_interrupted() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(NEVER_S)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("nobody_is_interrupted")
def test_other_threads_run_while_twenty_thousand_keys_are_looked_up(bench: Any) -> None:
    tier = bench.open()
    there = range(0, KEYS, 500)
    bench.store(tier, bench.keys(there))
    keys = bench.keys(range(KEYS))
    expected = [number in there for number in range(KEYS)]
    spins = 0
    stop = threading.Event()

    def spin() -> None:
        nonlocal spins
        while not stop.is_set():
            spins += 1
            if spins % 1000 == 0:
                time.sleep(0)  # gives the lock to whoever waits for it

    spinner = threading.Thread(target=spin)
    spinner.start()
    try:
        while spins == 0:
            time.sleep(0)
        ran_meanwhile = False
        # The spinner may wake up too late for one lookup, but not for every one.
        for _ in range(200):
            before = spins
            found = tier.lookup(keys)
            ran_meanwhile = spins > before
            assert found == expected
            if ran_meanwhile:
                break
    finally:
        stop.set()
        spinner.join()
    assert ran_meanwhile, "the lock was held all the time"
