"""A program: starts engines one after the other, and says what each found in the tier.

`engine_variants.py WORK RUNS`: RUNS is a JSON list, each run with a name, a model (`llama`, `opt`,
or a folder), a route (`stack`, `tier`, or none: no connector at all), arguments of `vllm.LLM`,
`extra` for the connector, and `recompute`: the same prompt again after a reset of everything.
All runs share one root, or `root`. Prints a JSON list, one report per run.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from pathlib import Path
from typing import Any

OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "vocab_size": 1024,
    "do_layer_norm_before": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": None,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENS = 200


def model_folder(work: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """The folder of a model, made where it is not there, and arguments it needs."""
    if "/" in name:
        return Path(name), {}
    folder = work / name
    if name == "opt":
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(OPT))
        return folder, {"load_format": "dummy"}
    if name == "mla":
        if not folder.exists():
            make_mla(folder)
        return folder, {}
    if not folder.exists():
        from kvstrata.cli.demo.model import make_model

        make_model(name, work)
    return folder, {}


def make_mla(folder: Path) -> None:
    """A latent-attention model with weights that make its answers depend on the whole prompt."""
    import numpy as np
    from safetensors.numpy import save_file

    generator = np.random.Generator(np.random.PCG64(7))
    hidden, heads, latent = MLA["hidden_size"], MLA["num_attention_heads"], MLA["kv_lora_rank"]
    nope, rope, value = (MLA[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))

    def normal(rows: int, columns: int, gain: float = 1.0) -> Any:
        drawn = generator.standard_normal((rows, columns)) * gain / columns**0.5
        return drawn.astype(np.float32)

    def ones(size: int) -> Any:
        return np.ones(size, np.float32)

    weights = {
        "model.embed_tokens.weight": normal(MLA["vocab_size"], hidden, hidden**0.5),
        "model.norm.weight": ones(hidden),
        "lm_head.weight": normal(MLA["vocab_size"], hidden, 4.0),
    }
    for layer in range(MLA["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": ones(hidden),
            f"{at}.post_attention_layernorm.weight": ones(hidden),
            f"{at}.self_attn.q_proj.weight": normal(heads * (nope + rope), hidden, 2.0),
            f"{at}.self_attn.kv_a_proj_with_mqa.weight": normal(latent + rope, hidden),
            f"{at}.self_attn.kv_a_layernorm.weight": ones(latent),
            f"{at}.self_attn.kv_b_proj.weight": normal(heads * (nope + value), latent, 2.0),
            f"{at}.self_attn.o_proj.weight": normal(hidden, heads * value),
            f"{at}.mlp.gate_proj.weight": normal(MLA["intermediate_size"], hidden),
            f"{at}.mlp.up_proj.weight": normal(MLA["intermediate_size"], hidden),
            f"{at}.mlp.down_proj.weight": normal(hidden, MLA["intermediate_size"]),
        }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MLA))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def transfer(route: str, root: str, more: dict[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {
        **more,
        "cpu_bytes_to_use": 32 << 20,
        "secondary_tiers": [{"type": "kvstrata_disk", "url": root, "capacity": "256MiB"}],
    }
    if route == "tier":
        extra |= {"spec_name": "StockSpec", "spec_module_path": "plugin_support.stock_spec"}
    return {
        "kv_connector": "KVStrataConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def seen_by_the_tier(llm: Any) -> dict[str, Any]:
    """The namespace, and the one directory that vLLM's file tier would take."""
    from vllm.v1.kv_offload.file_mapper import FileMapper

    core = llm.llm_engine.engine_core.engine_core
    (made,) = core.scheduler.connector.connector_scheduler.manager.secondary_tiers
    tier = getattr(made, "tier", made)
    mapper = FileMapper.from_offloading_spec("/r", made._offloading_spec, parallel_agnostic=True)
    return {
        "enabled": tier.enabled,
        "faults": tier.faults.total,
        "vllm_directory": mapper.base_path,
    }


def run(work: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    folder, arguments = model_folder(work, wanted["model"])
    route = wanted.get("route")
    root = work / wanted.get("root", "kv")
    root.mkdir(mode=0o700, exist_ok=True)
    if route:
        arguments["kv_transfer_config"] = transfer(route, root.as_uri(), wanted.get("extra", {}))
    llm = LLM(
        **{
            "model": str(folder),
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": 512,
            "block_size": 32,
            "kv_cache_memory_bytes": 32 << 20,
            "disable_log_stats": False,
            **arguments,
            **wanted.get("arguments", {}),
        }
    )
    chance = random.Random(5)
    prompt = {"prompt_token_ids": [chance.randrange(3, 1000) for _ in range(TOKENS)]}
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    output = llm.generate([prompt], sampling, use_tqdm=False)[0]
    recomputed = None
    if wanted.get("recompute"):
        assert llm.reset_prefix_cache(reset_connector=True)
        again = llm.generate([prompt], sampling, use_tqdm=False)[0]
        assert not again.num_cached_tokens
        recomputed = list(again.outputs[0].token_ids)
    # Stores run one step behind: one more request lets the last of them end.
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)
    report = {
        "name": wanted["name"],
        "cached": int(output.num_cached_tokens or 0),
        "tokens": list(output.outputs[0].token_ids),
        "recomputed": recomputed,
        "namespaces": sorted(path.name for path in root.iterdir() if path.is_dir()),
        **(seen_by_the_tier(llm) if route else {}),
    }
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return report


def main(work: str, runs: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    print(json.dumps([run(Path(work), wanted) for wanted in json.loads(runs)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
