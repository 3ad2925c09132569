"""Time in the cache policy of vLLM's CPU manager, ours beside vLLM's, on the same recorded calls.

    .venv/bin/python benches/python/policy_cost.py [--workload prompts,mc_conv] [--json]

vLLM's `CPUOffloadingManager` serves a workload under a policy of vLLM's, and every call that it
makes on the policy is written down with its arguments. Then a fresh policy of vLLM's and a fresh
one of ours, found by its name as vLLM finds it, get these calls, in turns. They have to evict the
same chunks. Measured is the loop that makes the calls, so what it costs itself is in both.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import hashlib
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

from kvstrata._native import Trace
from kvstrata.vllm import compat, plugin

if TYPE_CHECKING:
    from collections.abc import Iterator

TRACES = Path(__file__).resolve().parents[1] / "traces"
TOKENS = 16
PROMPTS, SLOTS_IN_PROMPTS = 20, 12
SHARE = 20
PAIRS = {"lru": "kvstrata_lru", "arc": "kvstrata_arc_vllm"}
METHODS = (
    *("get", "insert", "remove", "touch", "evict", "mark_evictable", "mark_non_evictable"),
    *("on_store_miss", "on_request_access", "on_request_finished"),
)
# Calls that read what the manager has made of chunks before.
READ_STATE = ("touch", "evict", "on_request_finished", "on_store_miss", "on_request_access")

Call = tuple[str, tuple[Any, ...]]


class Segment:
    """Calls in a row, of one argument or of more, and what `ref_cnt` of chunks is before them."""

    def __init__(self, *, is_plain: bool) -> None:
        self.is_plain = is_plain
        self.states: list[tuple[Any, int]] = []
        self.calls: list[Call] = []

    def run(self, policy: Any) -> tuple[float, list[Any]]:
        """Seconds that the calls take, and what they return, where that can be victims."""
        for chunk, count in self.states:
            chunk.ref_cnt = count
        methods = {name: getattr(policy, name) for name, _ in self.calls}
        if self.is_plain:
            plain = [(methods[name], arguments[0]) for name, arguments in self.calls]
            start = time.perf_counter()
            for method, argument in plain:
                method(argument)
            return time.perf_counter() - start, []
        calls = [(methods[name], arguments) for name, arguments in self.calls]
        results = []
        start = time.perf_counter()
        for method, arguments in calls:
            results.append(method(*arguments))
        return time.perf_counter() - start, results


class Recorder:
    """Stands where the manager has its policy, and writes down what it is asked."""

    def __init__(self, policy: Any) -> None:
        self.segments = [Segment(is_plain=True)]
        self.chunks: list[Any] = []
        self._changed: dict[int, Any] = {}
        for name in METHODS:
            if hasattr(policy, name):
                setattr(self, name, self._recorded(name, policy))

    def _recorded(self, name: str, policy: Any) -> Any:
        method, get = getattr(policy, name), policy.get

        def call(*arguments: Any) -> Any:
            if name == "insert":
                self.chunks.append(arguments[1])
            elif name.startswith("mark_"):
                chunk = get(arguments[0])
                self._changed[id(chunk)] = chunk
            self._segment(name, arguments).calls.append((name, arguments))
            return method(*arguments)

        return call

    def _segment(self, name: str, arguments: tuple[Any, ...]) -> Segment:
        is_plain = len(arguments) == 1
        if self.segments[-1].is_plain != is_plain or name in READ_STATE:
            self.segments.append(Segment(is_plain=is_plain))
        if name in READ_STATE:
            changed = self._changed.values()
            self.segments[-1].states = [(chunk, chunk.ref_cnt) for chunk in changed]
            self._changed.clear()
        return self.segments[-1]


def prompts(requests: int, length: int) -> Iterator[list[Any]]:
    """Whole prompts that come back after others."""
    made = [
        [
            make_offload_key(hashlib.sha256(b"%d-%d" % (number, at)).digest(), 0)
            for at in range(length)
        ]
        for number in range(PROMPTS)
    ]
    chance = random.Random(7)  # noqa: S311 -- a trace, the same for both
    for _ in range(requests):
        yield made[chance.randrange(PROMPTS)]


def of_trace(trace: Trace) -> Iterator[list[Any]]:
    keys = [
        make_offload_key(hashlib.sha256(b"%d" % block).digest(), 0)
        for block in range(trace.unique_blocks)
    ]
    for path in trace.paths():
        yield [keys[block] for block in path]


def serve(manager: Any, name: str, keys: list[Any]) -> None:
    """What vLLM's scheduler does for a request of one group that needs every row."""
    request = ReqContext(req_id=name)
    for at, key in enumerate(keys, 1):
        request.set_offload_key_position(key, at * TOKENS)
    manager.on_new_request(request)
    found = 0
    for key in keys:
        if manager.lookup(key, request) is not LookupResult.HIT:
            break
        found += 1
    if found:
        manager.prepare_load(keys[:found], request)
        manager.complete_load(keys[:found], request)
    if found < len(keys):
        output = manager.prepare_store(keys[found:], request)
        if output is not None:
            manager.complete_store(output.keys_to_store, request)
    manager.on_request_finished(request)


def record(policy: str, slots: int, requests: Iterator[list[Any]]) -> Recorder:
    manager = CPUOffloadingManager(slots, policy)
    recorder = Recorder(manager._policy)  # noqa: SLF001 -- its calls are what is recorded
    manager._policy = recorder  # noqa: SLF001
    for number, keys in enumerate(requests):
        serve(manager, f"request-{number}", keys[:slots])
    return recorder


def replay(policy: Any, recorder: Recorder) -> tuple[float, list[Any]]:
    """Seconds that the calls take, and the keys that were evicted."""
    for chunk in recorder.chunks:
        chunk.ref_cnt = -1
    seconds, results = 0.0, []
    gc.collect()
    gc.disable()
    for segment in recorder.segments:
        took, returned = segment.run(policy)
        seconds += took
        results += returned
    gc.enable()
    return seconds, [key for victims in results if victims for key, _ in victims]


def measure(name: str, slots: int, requests: Iterator[list[Any]], rounds: int) -> dict[str, Any]:
    recorder = record(name, slots, requests)
    seconds: dict[str, list[float]] = {name: [], PAIRS[name]: []}
    for _ in range(rounds):
        victims = []
        for cls, all_taken in seconds.items():
            policy = CachePolicyFactory.get_cache_policy_cls(cls)(cache_capacity=slots)
            took, evicted = replay(policy, recorder)
            all_taken.append(took)
            victims.append(evicted)
        if victims[0] != victims[1]:
            sys.exit(f"{name}: the policies evict other chunks than each other")
    theirs, ours = seconds.values()
    calls: dict[str, int] = {}
    for segment in recorder.segments:
        for called, _ in segment.calls:
            calls[called] = calls.get(called, 0) + 1
    return {
        "policy": name,
        "calls": calls,
        "evicted": len(victims[0]),
        "vllm_seconds": statistics.median(theirs),
        "kvstrata_seconds": statistics.median(ours),
        "ratio": statistics.median(b / a for a, b in zip(theirs, ours, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workload",
        default="prompts",
        help="prompts, or a trace of benches/traces, e.g. mc_conv, in a cache of 5 %% (prompts)",
    )
    parser.add_argument("--policy", default="lru,arc", help="of vLLM's (lru,arc)")
    parser.add_argument("--requests", type=int, default=64, help="of prompts (64)")
    parser.add_argument("--keys", type=int, default=6000, help="of a prompt (6000)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median counts (5)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    plugin.register()
    results = []
    for workload in options.workload.split(","):
        for policy in options.policy.split(","):
            if workload == "prompts":
                slots = options.keys * SLOTS_IN_PROMPTS
                requests = prompts(options.requests, options.keys)
            else:
                content = (TRACES / f"{workload}.jsonl.gz").read_bytes()
                trace = Trace(gzip.decompress(content))
                slots, requests = trace.unique_blocks // SHARE, of_trace(trace)
            result = measure(policy, slots, requests, options.rounds)
            results.append({"workload": workload, "vllm": compat.release_name(), **result})
            if not options.json:
                print(
                    f"{workload}, {policy} of vLLM {compat.release_name()}: "
                    f"{sum(result['calls'].values())} calls, {result['evicted']} evicted; "
                    f"vLLM {result['vllm_seconds']:.3f} s, "
                    f"kvstrata {result['kvstrata_seconds']:.3f} s, ratio {result['ratio']:.3f}",
                    flush=True,
                )
    if options.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
