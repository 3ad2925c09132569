"""A program: one real engine whose slots fit their group; the last line printed is JSON.

`exact_engine.py WORK SHAPE URL PHASE TP`. Phase `first` answers cold, again from the engine's own
prefix cache, and again after that was reset. Phase `later` answers what an earlier process stored.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from engine_variants import model_folder

BLOCK = 32
TOKENS = 500
LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "full_attn_idxs": [1, 3],
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "tie_embedding": True,
    # Names that vLLM's model still reads.
    "conv_dim": 128,
    "conv_dim_out": 128,
    "block_dim": 128,
    "block_ff_dim": 256,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "block_norm_eps": 1e-5,
}


def make_lfm2(folder: Path) -> None:
    """A short-convolution hybrid with weights that make its answers depend on the prompt."""
    import numpy as np
    from safetensors.numpy import save_file

    generator = np.random.Generator(np.random.PCG64(11))
    hidden, wide = LFM2["hidden_size"], LFM2["intermediate_size"]
    head = hidden // LFM2["num_attention_heads"]
    keys = head * LFM2["num_key_value_heads"]

    def normal(*shape: int, gain: float = 1.0) -> Any:
        drawn = generator.standard_normal(shape) * gain / shape[-1] ** 0.5
        return drawn.astype(np.float32)

    def ones(size: int, value: float = 1.0) -> Any:
        return np.full(size, value, np.float32)

    weights = {
        "model.embed_tokens.weight": normal(LFM2["vocab_size"], hidden, gain=4.0),
        "model.embedding_norm.weight": ones(hidden),
    }
    for layer, kind in enumerate(LFM2["layer_types"]):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.operator_norm.weight": ones(hidden),
            f"{at}.ffn_norm.weight": ones(hidden),
            f"{at}.feed_forward.w1.weight": normal(wide, hidden),
            f"{at}.feed_forward.w3.weight": normal(wide, hidden),
            f"{at}.feed_forward.w2.weight": normal(hidden, wide),
        }
        if kind == "conv":
            weights |= {
                f"{at}.conv.in_proj.weight": normal(3 * hidden, hidden, gain=1.5),
                f"{at}.conv.conv.weight": normal(hidden, 1, LFM2["conv_L_cache"]),
                f"{at}.conv.out_proj.weight": normal(hidden, hidden),
            }
        else:
            weights |= {
                f"{at}.self_attn.q_proj.weight": normal(hidden, hidden),
                f"{at}.self_attn.k_proj.weight": normal(keys, hidden),
                f"{at}.self_attn.v_proj.weight": normal(keys, hidden),
                f"{at}.self_attn.out_proj.weight": normal(hidden, hidden, gain=2.0),
                f"{at}.self_attn.q_layernorm.weight": ones(head, 2.0),
                f"{at}.self_attn.k_layernorm.weight": ones(head, 2.0),
            }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LFM2))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def folder_of(work: Path, shape: str) -> Path:
    if shape != "lfm2":
        return model_folder(work, shape)[0]
    folder = work / shape
    if not folder.exists():
        make_lfm2(folder)
    return folder


def entry_of(url: str) -> dict[str, Any]:
    """The tier below: a directory, or a bucket of a server that the environment names."""
    if not url.startswith("s3://"):
        return {"type": "disk", "url": url, "capacity": "256MiB", "min_free": 0}
    endpoint = os.environ["KVSTRATA_TEST_ENDPOINT"]
    return {"type": "object", "url": url, "endpoint": endpoint, "allow_http": True}


class Engine:
    """A running engine and the two prompts asked of it."""

    def __init__(self, folder: Path, shape: str, url: str, tp: int) -> None:
        from vllm import LLM, SamplingParams

        more: dict[str, Any] = {"tensor_parallel_size": tp} if tp > 1 else {}
        if shape == "lfm2":
            more |= {"mamba_cache_mode": "align", "enable_prefix_caching": True}
        self.llm = LLM(
            model=str(folder),
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=1024,
            block_size=BLOCK,
            disable_log_stats=False,
            max_logprobs=1024,
            kv_transfer_config={
                "kv_connector": "KVStrataConnector",
                "kv_connector_module_path": "kvstrata.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "cpu_bytes_to_use": "64MiB",
                    "tiers": [entry_of(url)],
                },
            },
            **more,
        )
        chance = random.Random(3)
        self.prompts = [
            {"prompt_token_ids": [chance.randrange(3, 1000) for _ in range(TOKENS)]} for _ in "ab"
        ]
        self.sampling = SamplingParams(
            temperature=0,
            # Two ranks on two busy cores take seconds for a token.
            max_tokens=8 if tp == 1 else 2,
            ignore_eos=True,
            detokenize=False,
            logprobs=1024,
        )

    def answers(self) -> dict[str, Any]:
        """Tokens, the logprobs of the whole vocabulary, and how much was not computed."""
        outputs = [
            self.llm.generate([prompt], self.sampling, use_tqdm=False)[0] for prompt in self.prompts
        ]
        found = [output.outputs[0] for output in outputs]
        return {
            "tokens": [list(one.token_ids) for one in found],
            "cached": [int(output.num_cached_tokens or 0) for output in outputs],
            "logprobs": [
                [[at[token].logprob for token in sorted(at)] for at in one.logprobs]
                for one in found
            ],
        }

    @property
    def core(self) -> Any:
        """The scheduler of an engine core in this process."""
        return self.llm.llm_engine.engine_core.engine_core

    def settle(self) -> None:
        """Let the stores end: a step behind their request, and further below later still."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            self.llm.generate([{"prompt_token_ids": [5, 6, 7]}], self.sampling, use_tqdm=False)
            connector = self.core.scheduler.connector
            if not connector.has_pending_push_work():
                return
            time.sleep(0.05)


def main(work: str, shape: str, url: str, phase: str, tp: str) -> None:
    engine = Engine(folder_of(Path(work), shape), shape, url, int(tp))
    manager = engine.core.scheduler.connector.connector_scheduler.manager
    report: dict[str, Any] = {}
    if phase == "first":
        report["cold"] = engine.answers()
        report["own"] = engine.answers()
        engine.settle()
        assert engine.llm.reset_prefix_cache()
        report["cpu"] = engine.answers()
    else:
        report["disk"] = engine.answers()
    engine.settle()
    tiers = manager.secondary_tiers
    report |= {
        "stats": manager.cpu.stats(),
        "tiers": [tier.native.stats() for tier in tiers],
        "faults": [manager.faults.total, *(tier.faults.total for tier in tiers)],
    }
    engine_id = engine.llm.llm_engine.vllm_config.kv_transfer_config.engine_id
    engine.llm.llm_engine.engine_core.shutdown()
    report["left"] = [str(path) for path in Path("/dev/shm").glob(f"*{engine_id}*")]
    print(json.dumps(report))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(*sys.argv[1:])
