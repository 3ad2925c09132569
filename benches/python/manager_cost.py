"""Time inside the offloading manager's methods, ours beside vLLM's, on one trace of calls.

    .venv/bin/python benches/python/manager_cost.py [--requests 64] [--keys 6000] [--json]

Both managers have the same number of slots and `lru`, and no tier below. Each request does what
vLLM's scheduler does for one group that needs every row: it looks its keys up to the first miss,
loads what it found, stores the rest, and ends; whole prompts come back after others. Measured is
the time in the methods by name, the loop over the keys included. The answers have to be the same.

Then 6,000 keys that are there are looked up while another thread spins in pure Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import sys
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kvstrata._native import CpuTier
from kvstrata.vllm.arrivals import Arrival
from kvstrata.vllm.manager import KVStrataManager
from kvstrata.vllm.opened import Opened

if TYPE_CHECKING:
    from collections.abc import Iterator

ROW = 64
TOKENS = 16
PROMPTS = 20
SLOTS_IN_PROMPTS = 12


class Region:
    """What vLLM's primary tier asks of its shared memory."""

    def __init__(self, chunks: int) -> None:
        self._memory = bytearray(chunks * ROW)
        self._chunks = chunks

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self._memory).cast("b", (self._chunks, ROW))

    def cleanup(self) -> None:
        self._memory = bytearray()


def vllms(slots: int) -> Any:
    primary: Any = CPUPrimaryTierOffloadingManager(slots, Region(slots), cache_policy="lru")
    return TieringOffloadingManager(primary)


def ours(slots: int) -> Any:
    def opened(_: dict[str, Any]) -> Opened:
        return Opened(CpuTier(slots * ROW, ROW), (), lambda: None)

    manager = KVStrataManager({0: TOKENS}, opened)
    manager.open({})
    return manager


def prompt(number: int, length: int) -> list[Any]:
    return [
        make_offload_key(hashlib.sha256(b"%d-%d" % (number, at)).digest(), 0)
        for at in range(length)
    ]


def context(name: str, keys: list[Any]) -> ReqContext:
    made = ReqContext(req_id=name)
    for at, key in enumerate(keys):
        made.set_offload_key_position(key, (at + 1) * TOKENS)
    return made


class Trace:
    """Drives a manager and adds up the time in its methods."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.seconds: dict[str, float] = defaultdict(float)
        self.hits: list[int] = []

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def request(self, number: int, keys: list[Any]) -> None:
        manager, hit = self.manager, LookupResult.HIT
        request = context(f"request-{number}", keys)
        with self.timed("on_new_request"):
            manager.on_new_request(request)
        if isinstance(manager, KVStrataManager):
            # Our connector tells of a request's keys when it arrives; vLLM's when it ends.
            with self.timed("observe"):
                manager.observe(request, Arrival((keys,), prompt_tokens=len(keys) * TOKENS))
        found = 0
        with self.timed("lookup"):
            for key in keys:
                if manager.lookup(key, request) is not hit:
                    break
                found += 1
        self.hits.append(found)
        if found:
            self._load(keys[:found], request)
        end = ScheduleEndContext((request.req_id,), ())
        with self.timed("prepare_store"):
            output = manager.prepare_store(keys[found:], request) if found < len(keys) else None
        with self.timed("on_schedule_end"):
            manager.on_schedule_end(end)
        if output is not None:
            stored = set(output.keys_to_store)
            with self.timed("complete_store"):
                manager.complete_store(stored, request)
        with self.timed("on_request_finished"):
            manager.on_request_finished(request)

    def _load(self, keys: list[Any], request: ReqContext) -> None:
        manager, loaded = self.manager, set(keys)
        with self.timed("prepare_load"):
            manager.prepare_load(keys, request)
        with self.timed("get_load_source"):
            for key in keys:
                manager.get_load_source(key, request)
        with self.timed("complete_load"):
            manager.complete_load(loaded, request)


def run(make: Any, requests: int, length: int) -> Trace:
    prompts = [prompt(number, length) for number in range(PROMPTS)]
    chance = random.Random(7)  # noqa: S311 -- a trace, the same for both
    trace = Trace(make(length * SLOTS_IN_PROMPTS))
    for number in range(requests):
        trace.request(number, prompts[chance.randrange(PROMPTS)])
    return trace


def spinning_lookups(length: int, rounds: int) -> list[float]:
    """Seconds per lookup of a whole prompt that is there, beside a thread that spins."""
    trace = Trace(ours(length * SLOTS_IN_PROMPTS))
    prompts = [prompt(number, length) for number in range(SLOTS_IN_PROMPTS - 1)]
    for number, keys in enumerate(prompts):
        trace.request(number, keys)
    stop = threading.Event()
    spinner = threading.Thread(target=_spin, args=(stop,), daemon=True)
    spinner.start()
    seconds = []
    for number in range(rounds):
        before = trace.seconds["lookup"]
        trace.request(1000 + number, prompts[number % len(prompts)])
        seconds.append(trace.seconds["lookup"] - before)
    stop.set()
    spinner.join()
    if set(trace.hits[-rounds:]) != {length}:
        sys.exit("a prompt that was stored is not there")
    return seconds


def _spin(stop: threading.Event) -> None:
    count = 0
    while not stop.is_set():
        count += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--keys", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=5, help="medians are of so many runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    totals: dict[str, list[float]] = {"vllm": [], "kvstrata": []}
    by_method: dict[str, dict[str, float]] = {}
    for _ in range(options.rounds):
        hits = set()
        for name, make in (("vllm", vllms), ("kvstrata", ours)):
            trace = run(make, options.requests, options.keys)
            totals[name].append(sum(trace.seconds.values()))
            by_method[name] = dict(trace.seconds)
            hits.add(tuple(trace.hits))
        if len(hits) != 1:
            sys.exit("the managers gave different answers")
    ratios = [
        mine / theirs for mine, theirs in zip(totals["kvstrata"], totals["vllm"], strict=True)
    ]
    spins = spinning_lookups(options.keys, 60)
    result = {
        "requests": options.requests,
        "keys": options.keys,
        "seconds": {name: statistics.median(values) for name, values in totals.items()},
        "ratio": statistics.median(ratios),
        "by_method": by_method,
        "spinning_lookup_ms": {
            "median": statistics.median(spins) * 1e3,
            "best": min(spins) * 1e3,
            "p90": sorted(spins)[len(spins) * 9 // 10] * 1e3,
        },
    }
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{options.requests} requests of {options.keys} keys, seconds in methods (last run):")
    for method in sorted(by_method["kvstrata"]):
        theirs, mine = by_method["vllm"].get(method, 0.0), by_method["kvstrata"][method]
        print(f"  {method:20} vLLM {theirs:8.4f}   kvstrata {mine:8.4f}")
    print(
        f"all: vLLM {result['seconds']['vllm']:.4f}, kvstrata {result['seconds']['kvstrata']:.4f}, "
        f"ratio {result['ratio']:.3f} (medians of {options.rounds})"
    )
    spun = result["spinning_lookup_ms"]
    print(
        f"lookup of {options.keys} keys beside a spinning thread: median {spun['median']:.2f} ms, "
        f"best {spun['best']:.2f}, 90 % within {spun['p90']:.2f}"
    )


if __name__ == "__main__":
    main()
