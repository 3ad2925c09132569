"""One engine process: `python -m kvstrata.cli.demo.engine REQUEST RESULT PROGRESS`.

It starts a vLLM engine, answers the steps of the request one at a time, ends the engine in good
order and writes what it saw. Only this process imports torch and vLLM.

What is measured, and by whom:

* `cached_tokens`: vLLM's `RequestOutput.num_cached_tokens`, prompt tokens that were not computed.
* `external_tokens`: growth of vLLM's counter `vllm:external_prefix_cache_hits` over the step:
  prompt tokens that the KV connector supplied.
* `local_tokens`: the same of `vllm:prefix_cache_hits`: tokens found in the engine's own cache.
* `first_token_s`: vLLM's `first_token_latency` of the request, seconds.
* `bytes_stored`, `bytes_loaded`, `failed_loads`: vLLM's per-tier counters of the tiering manager
  (`vllm:kv_offload_tiering_write_bytes`, `..._read_bytes`, `..._promotion_job_failures`).
  vLLM counts whole slots of its CPU tier.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

_SETTLE_TIMEOUT_S = 60.0
_SHUTDOWN_TIMEOUT_S = 60.0

_LOCAL = "vllm:prefix_cache_hits"
_EXTERNAL = "vllm:external_prefix_cache_hits"
_STORED = "vllm:kv_offload_tiering_write_bytes"
_LOADED = "vllm:kv_offload_tiering_read_bytes"
_FAILED_LOADS = "vllm:kv_offload_tiering_promotion_job_failures"
_STORES_IN_FLIGHT = "vllm:kv_offload_tiering_active_cascade_jobs"
_STORED_BY_WORKER = "vllm:kv_offload_store_bytes"


class Engine:
    """A running vLLM engine and the few things the demo asks of it."""

    def __init__(self, request: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self._request = request
        self._llm = LLM(**request["engine"])
        self._sampling = SamplingParams(
            temperature=0.0,
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            logprobs=request["vocab_size"],
            detokenize=False,
        )
        self._probes = 0

    def warm_up(self) -> None:
        """Answer a prompt shorter than a block: first use of every kernel, nothing to store."""
        self._answer([3 + self._probes % 900, *([5] * 8)])
        self._probes += 1

    def run(self, step: dict[str, Any]) -> dict[str, Any]:
        """Answer one step; returns tokens, the log probabilities of the vocabulary, counts."""
        trigger = Path(self._request["trigger"]) if step["arm"] else None
        if trigger is not None:
            trigger.write_text("armed\n", encoding="utf-8")
        before = self.counters()
        output = self._answer(self._request["prompts"][step["prompt"]])
        after = self.counters()
        completion = output.outputs[0]
        vocabulary = range(self._request["vocab_size"])
        return {
            "name": step["name"],
            "prompt": step["prompt"],
            "prompt_tokens": len(output.prompt_token_ids),
            "token_ids": list(completion.token_ids),
            "logprobs": [
                [position[token].logprob for token in vocabulary]
                for position in completion.logprobs
            ],
            "cached_tokens": output.num_cached_tokens,
            "first_token_s": output.metrics.first_token_latency,
            "external_tokens": after[_EXTERNAL] - before[_EXTERNAL],
            "local_tokens": after[_LOCAL] - before[_LOCAL],
            "failed_loads": after[_FAILED_LOADS] - before[_FAILED_LOADS],
            "replaced": _read_replaced(trigger),
        }

    def settle(self) -> bool:
        """Step the engine until no store is on its way to the tier; False when time is up.

        An idle offline engine reports nothing, so a tiny prompt carries the counters out.
        """
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        last: dict[str, int] = {}
        quiet = 0
        while time.monotonic() < deadline:
            self.warm_up()
            now = self.counters()
            in_flight = now[_STORES_IN_FLIGHT]
            watched = {name: now[name] for name in (_STORED, _LOADED, _STORED_BY_WORKER)}
            quiet = quiet + 1 if in_flight == 0 and watched == last else 0
            if quiet >= 3:  # noqa: PLR2004 - three quiet looks in a row
                return True
            last = watched
            time.sleep(0.2)
        return False

    def counters(self) -> dict[str, int]:
        """The engine's counters, summed over their labels; one that was never touched is 0."""
        wanted = (
            _LOCAL,
            _EXTERNAL,
            _STORED,
            _LOADED,
            _FAILED_LOADS,
            _STORES_IN_FLIGHT,
            _STORED_BY_WORKER,
        )
        totals = dict.fromkeys(wanted, 0)
        for metric in self._llm.get_metrics():
            if metric.name in totals:
                totals[metric.name] += int(metric.value)
        return totals

    def block_hashes(self, prompt: str) -> list[str]:
        """The hex hashes of a prompt's full blocks, by the engine's own hash function."""
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import (
            hash_block_tokens,
            init_none_hash,
        )

        config = self._llm.llm_engine.vllm_config.cache_config
        hash_function = get_hash_fn_by_name(config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        tokens = self._request["prompts"][prompt]
        size = self._request["block_tokens"]
        hashes: list[Any] = []
        for start in range(0, len(tokens) - size + 1, size):
            parent = hashes[-1] if hashes else None
            block = tuple(tokens[start : start + size])
            hashes.append(hash_block_tokens(hash_function, parent, block, None))
        return [block_hash.hex() for block_hash in hashes]

    def end(self) -> None:
        """End the engine in good order: the tier is closed, the shared region removed."""
        self._llm.llm_engine.engine_core.shutdown(timeout=_SHUTDOWN_TIMEOUT_S)

    def _answer(self, token_ids: list[int]) -> Any:
        prompt = {"prompt_token_ids": token_ids}
        return self._llm.generate([prompt], self._sampling, use_tqdm=False)[0]


def _read_replaced(trigger: Path | None) -> dict[str, str] | None:
    """What the row-replacing tier wrote when it acted; None when it was not asked, or did not."""
    if trigger is None:
        return None
    trigger.unlink(missing_ok=True)
    record = trigger.with_suffix(".done")
    if not record.exists():
        return None
    replaced: dict[str, str] = json.loads(record.read_text(encoding="utf-8"))
    return replaced


def run(request: dict[str, Any], progress: Path) -> dict[str, Any]:
    """Serve one request from start to end of an engine."""

    def say(text: str) -> None:
        with progress.open("a", encoding="utf-8") as lines:
            lines.write(text + "\n")

    say("engine starting")
    started = time.monotonic()
    engine = Engine(request)
    engine.warm_up()
    say(f"engine ready after {time.monotonic() - started:.0f} s")
    steps = []
    for step in request["steps"]:
        say(step["name"])
        steps.append(engine.run(step))
    say("waiting for stores")
    settled = engine.settle()
    counters = engine.counters()
    hashes = engine.block_hashes(request["hash_prompt"])
    say("engine ending")
    engine.end()
    return {
        "steps": steps,
        "settled": settled,
        "bytes_stored": counters[_STORED],
        "bytes_loaded": counters[_LOADED],
        "block_hashes": hashes,
    }


def main(arguments: list[str]) -> int:
    """Entry of the child process."""
    request_path, result_path, progress_path = (Path(argument) for argument in arguments)
    request = json.loads(request_path.read_text(encoding="utf-8"))
    result = run(request, progress_path)
    partial = result_path.with_suffix(".partial")
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.rename(result_path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
