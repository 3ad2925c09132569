"""A program: a real engine that answers prompts until it is killed; `killed_engine.py WORK WITH`.

`WITH` is `ours`, with slots that fit and a tier on disk, or `none`: no connector at all. The engine
core is a process of its own. Prints a line when it begins to serve, with its process ids.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from plugin_support.exact_engine import folder_of


def main(work: str, what: str) -> None:
    from vllm import LLM, SamplingParams

    more: dict[str, Any] = {}
    if what == "ours":
        place = Path(work) / "kv"
        place.mkdir(mode=0o700, exist_ok=True)
        more["kv_transfer_config"] = {
            "kv_connector": "KVStrataConnector",
            "kv_connector_module_path": "kvstrata.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "engine_id": Path(work).name,
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": "64MiB",
                "tiers": [
                    {"type": "disk", "url": place.as_uri(), "capacity": "256MiB", "min_free": 0}
                ],
            },
        }
    llm = LLM(
        model=str(folder_of(Path(work), "gemma3")),
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=768,
        block_size=32,
        num_gpu_blocks_override=200,
        **more,
    )
    chance = random.Random(1)
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    documents = [[chance.randrange(3, 1000) for _ in range(600)] for _ in range(8)]
    print(json.dumps("serving"), flush=True)
    while True:
        prompts = [{"prompt_token_ids": chance.choice(documents)} for _ in range(4)]
        llm.generate(prompts, sampling, use_tqdm=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
