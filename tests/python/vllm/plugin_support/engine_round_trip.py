"""Run as a program: a real engine stores, forgets and reloads; the last line printed is JSON.

Arguments: model shape, folder for the model, URL of the tier's root, tier ("native" or "stand_in").
The engine core runs in this process, so that the stand-in and the primary tier are at hand.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        **COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "gemma3": {
        **COMMON,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 8,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 128,
        "query_pre_attn_scalar": 32,
    },
}


def main(shape: str, folder: str, url: str, kind: str) -> None:
    import kvstrata

    if kind == "stand_in":
        sys.path.insert(0, str(Path(__file__).parents[1]))
        import conftest  # noqa: F401 -- supplies the exceptions that the native module would

        from plugin_support.stand_in import Opener

        kvstrata.open_tier = Opener()  # type: ignore[attr-defined]
    from vllm import LLM, SamplingParams

    (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
    llm = LLM(
        model=folder,
        load_format="dummy",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=1024,
        block_size=32,
        disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "KVStrataConnector",
            "kv_connector_module_path": "kvstrata.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": 64 << 20,
                "secondary_tiers": [
                    {
                        "type": "KVStrataDiskTier",
                        "module_path": "kvstrata.vllm.tiers",
                        "url": url,
                        "capacity": "256MiB",
                    }
                ],
            },
        },
    )
    chance = random.Random(3)
    prompts = [{"prompt_token_ids": [chance.randrange(3, 1000) for _ in range(500)]} for _ in "ab"]
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

    def answers() -> tuple[list[list[int]], list[int]]:
        outputs = [llm.generate([prompt], sampling, use_tqdm=False)[0] for prompt in prompts]
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return tokens, [int(output.num_cached_tokens or 0) for output in outputs]

    cold, _ = answers()
    # Stores run one step behind: one more request lets the last of them end.
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)
    manager = llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler.manager
    manager.reset_cache()
    getattr(manager, "on_reset_flushed", lambda: None)()
    assert llm.reset_prefix_cache()
    warm, cached = answers()
    tier = manager.secondary_tiers[0].tier
    engine_id = llm.llm_engine.vllm_config.kv_transfer_config.engine_id
    faults, enabled = tier.faults.total, tier.enabled
    llm.llm_engine.engine_core.shutdown()
    report = {
        "same": cold == warm,
        "cached": cached,
        "faults": faults,
        "enabled": enabled,
        "left": [str(path) for path in Path("/dev/shm").glob(f"*{engine_id}*")],
        "tokens": cold,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
