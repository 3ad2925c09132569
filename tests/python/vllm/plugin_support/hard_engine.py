"""A program: one real engine that is not spared; the last line printed is JSON.

`hard_engine.py WORK SHAPE PHASE`. Phase `first`, and `short` with fewer rounds, has 32 requests at
a time in a KV space that is too small for them, others that are aborted, a tier whose rows fail,
one that hangs, and at last a reset of everything. Phase `later` asks an engine that was started
after that reset.

What an answer ought to be is what the same engine computes without reading any cache.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from plugin_support.exact_engine import folder_of
from plugin_support.flaky_tier import FlakyTier
from plugin_support.flat_rope import flatten_rope
from plugin_support.held_worker import HeldWorker

BLOCK = 32
REQUESTS = 32
BLOCKS = {"llama": 90, "gemma3": 240, "lfm2": 240}
# Far less than what is stored: loads come from below.
CPU_BYTES = {"llama": "4MiB", "gemma3": "4MiB", "lfm2": "1MiB"}
# How long a request waits for a tier that hangs, instead of our own default.
WAIT_S = 1.0


def spy_on_tiers() -> list[FlakyTier]:
    """Tiers that this process opens from now on are behind planted faults."""
    import kvstrata

    opened: list[FlakyTier] = []
    inner = kvstrata.open_tier

    def opener(url: str, *, row_bytes: Any, arena: Any, **options: Any) -> Any:
        native = inner(url, row_bytes=row_bytes, arena=arena, **options)
        opened.append(FlakyTier(native, row_bytes, arena))
        return opened[-1]

    kvstrata.open_tier = opener  # type: ignore[assignment]
    return opened


class Engine:
    def __init__(self, work: Path, shape: str) -> None:
        from vllm import LLM

        self.natives = spy_on_tiers()
        more: dict[str, Any] = {}
        if shape == "lfm2":
            flatten_rope()
            more = {"mamba_cache_mode": "align", "enable_prefix_caching": True}
        tiers = []
        for name in ("near", "far"):
            place = work / name
            place.mkdir(mode=0o700, exist_ok=True)
            tiers.append(
                {"type": "disk", "url": place.as_uri(), "capacity": "256MiB", "min_free": 0}
            )
        self.llm = LLM(
            model=str(folder_of(work, shape)),
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=512,
            block_size=BLOCK,
            num_gpu_blocks_override=BLOCKS[shape],
            max_num_seqs=REQUESTS,
            disable_log_stats=False,
            kv_transfer_config={
                "kv_connector": "KVStrataConnector",
                "kv_connector_module_path": "kvstrata.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "cpu_bytes_to_use": CPU_BYTES[shape],
                    "tiers": tiers,
                    "load_wait_s": WAIT_S,
                },
            },
            **more,
        )
        self.rounds = 0
        self.seen: Counter[str] = Counter()
        core: Any = self.llm.llm_engine.engine_core
        self.scheduler = core.engine_core.scheduler
        self.connector = self.scheduler.connector
        self.manager = self.connector.connector_scheduler.manager
        self._watch()

    def _watch(self) -> None:
        inner = self.scheduler._preempt_request

        def preempt(*arguments: Any, **named: Any) -> Any:
            self.seen["preempted"] += 1
            return inner(*arguments, **named)

        self.scheduler._preempt_request = preempt

    def documents(self) -> list[list[int]]:
        chance = random.Random(16)
        return [[chance.randrange(3, 1000) for _ in range(300)] for _ in range(4)]

    def probe(self) -> dict[str, Any]:
        """The documents themselves, one after the other: no request gives another anything."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        outputs = [
            self.llm.generate([{"prompt_token_ids": document}], sampling, use_tqdm=False)[0]
            for document in self.documents()
        ]
        return {
            "tokens": [list(one.outputs[0].token_ids) for one in outputs],
            "cached": [int(one.num_cached_tokens or 0) for one in outputs],
        }

    def prompts(self) -> list[dict[str, Any]]:
        """Four documents, and questions about them of any length."""
        chance = random.Random(17)
        made = []
        for number in range(REQUESTS):
            document = self.documents()[number % 4][: chance.randrange(100, 300)]
            question = [chance.randrange(3, 1000) for _ in range(chance.randrange(4, 40))]
            made.append({"prompt_token_ids": document + question})
        return made

    def ask(self, *, cold: bool = False, aborted: int = 0) -> dict[str, Any]:
        """All prompts at once, and as many more that are given up on their way."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0,
            max_tokens=32,
            ignore_eos=True,
            detokenize=False,
            skip_reading_prefix_cache=cold,
        )
        engine = self.llm.llm_engine
        self.rounds += 1
        prompts = self.prompts()
        for number, prompt in enumerate(prompts):
            engine.add_request(f"{self.rounds}.{number}", prompt, sampling)
        doomed = [f"{self.rounds}.doomed.{number}" for number in range(aborted)]
        for name, prompt in zip(doomed, prompts, strict=False):
            engine.add_request(name, prompt, sampling)
        found: dict[str, Any] = {}
        steps = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    found[output.request_id] = output
            steps += 1
            if doomed and steps % 2 == 0:
                engine.abort_request([doomed.pop()])
                self.seen["aborted"] += 1
        answers = [found[f"{self.rounds}.{number}"] for number in range(REQUESTS)]
        return {
            "tokens": [list(one.outputs[0].token_ids) for one in answers],
            "reasons": sorted({str(one.outputs[0].finish_reason) for one in answers}),
            "cached": [int(one.num_cached_tokens or 0) for one in answers],
            "steps": steps,
        }

    def settle(self) -> None:
        """Let every job end."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            self.llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)
            if not self.connector.has_pending_push_work():
                return
            time.sleep(0.02)
        msg = "jobs never ended"
        raise RuntimeError(msg)

    def forget(self) -> None:
        """The engine's own prefix cache, so that answers come from below."""
        self.settle()
        assert self.llm.reset_prefix_cache()

    def left(self) -> dict[str, Any]:
        stats = self.manager.cpu.stats()
        slots = ("rows_in_use", "orphaned_rows", "writing_rows")
        # vLLM tells of the last request's end with the next step, which an idle engine never takes.
        return {name: stats[name] for name in (*slots, "awaited_requests", "awaited_bytes")}

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def first(engine: Engine, *, short: bool) -> dict[str, Any]:
    near, far = engine.natives
    hold = HeldWorker(find_worker(), lambda _: None)
    report: dict[str, Any] = {"cold": engine.ask(cold=True)}
    engine.forget()
    if not short:
        report["reloaded"] = engine.ask(aborted=8)
        engine.forget()
    near.failing = far.failing = 0.1
    hold.misfit = 0.1
    report["failing"] = engine.ask(aborted=8)
    near.failing = far.failing = hold.misfit = 0.0
    engine.forget()
    near.hanging = True
    report["hanging"] = engine.ask(aborted=8)
    near.hanging = False
    engine.forget()
    if not short:
        report["again"] = engine.ask()
        engine.forget()
    report["before a reset"] = engine.probe()
    engine.settle()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    report["after a reset"] = engine.probe()
    engine.settle()
    # Twice in a row: what is stored again must go, too.
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    return report


def find_worker() -> Any:
    """The worker of ours in this very process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    return connector.connector_worker.worker


def main(work: str, shape: str, phase: str) -> None:
    engine = Engine(Path(work), shape)
    if phase == "later":
        report = {"later": engine.probe()}
    else:
        report = first(engine, short=phase == "short")
    engine.settle()
    engine_id = engine.llm.llm_engine.vllm_config.kv_transfer_config.engine_id
    report |= {
        "seen": engine.seen,
        "natives": [native.seen for native in engine.natives],
        "left": engine.left(),
        "faults": [
            engine.manager.faults.total,
            *(t.faults.total for t in engine.manager.secondary_tiers),
        ],
        "stats": engine.manager.cpu.stats(),
    }
    engine.close()
    report["shared memory"] = [str(path) for path in Path("/dev/shm").glob(f"*{engine_id}*")]
    print(json.dumps(report))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(*sys.argv[1:])
