"""Small models made on the spot: Llama-shaped and Gemma-3-shaped, random weights, fixed seed.

The weights are scaled so that greedy output depends on the whole prompt. Weights as an
initialiser leaves them give attention that averages thousands of tokens into nearly nothing:
such a model answers alike whatever its KV cache holds, and a comparison with it proves nothing.
Here attention is sharp (its scores have a standard deviation of a few units), what it reads
weighs as much as the token itself, and the output logits are spread.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    Weight = NDArray[np.float32]

SHAPES = ("llama", "gemma3")
VOCAB_SIZE = 1024
MAX_POSITIONS = 8192

_HIDDEN = 256
_INTERMEDIATE = 512
_LAYERS = 4
_HEADS = 4
_KV_HEADS = 2
_HEAD_DIM = 64
_SLIDING_WINDOW = 256
_SEED = 20261129

# Standard deviation of the attention scores. At 4 units a query reads a handful of the
# tokens before it; at 1 it would read all of them, and at 10 a single one.
_SCORE_STD = 4.0
# Growth of the residual stream by one attention block, relative to the token embedding.
_ATTENTION_GAIN = 1.5
_MLP_GAIN = 0.5
_LOGIT_STD = 4.0


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """Where a model lies and what one of its tokens looks like to the engine."""

    shape: str
    path: Path
    layers: int = _LAYERS


def make_model(shape: str, directory: Path) -> ModelFiles:
    """Write `config.json` and `model.safetensors` of one shape into `directory/shape`.

    The files are the same bytes on every run. numpy and safetensors (both come with vLLM) are
    imported here, so that the command line itself does without them.
    """
    import numpy as np
    from safetensors.numpy import save_file

    config = _CONFIGS[shape]
    path = directory / shape
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    generator = np.random.Generator(np.random.PCG64(_SEED))
    weights = _weights(generator, gemma=shape == "gemma3")
    save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})
    return ModelFiles(shape=shape, path=path)


def _common_config() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "bfloat16",
        "use_cache": True,
    }


def _llama_config() -> dict[str, Any]:
    return _common_config() | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def _gemma_config() -> dict[str, Any]:
    return _common_config() | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        # A tied head would mostly repeat the last token, whatever the cache holds.
        "tie_word_embeddings": False,
        "query_pre_attn_scalar": _HEAD_DIM,
        "sliding_window": _SLIDING_WINDOW,
        "layer_types": ["sliding_attention"] * (_LAYERS - 1) + ["full_attention"],
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }


_CONFIGS = {"llama": _llama_config(), "gemma3": _gemma_config()}


def _weights(generator: np.random.Generator, *, gemma: bool) -> dict[str, Weight]:
    """All tensors of one model, under the names both families share."""
    import numpy as np

    def normal(rows: int, columns: int, std: float) -> Weight:
        return (generator.standard_normal((rows, columns)) * std).astype(np.float32)

    # Gemma multiplies embeddings by sqrt(hidden) and norms by (1 + weight).
    embedding_std = 1.0 / math.sqrt(_HIDDEN) if gemma else 1.0
    plain_norm = np.zeros(_HIDDEN, np.float32) if gemma else np.ones(_HIDDEN, np.float32)
    weights = {
        "model.embed_tokens.weight": normal(VOCAB_SIZE, _HIDDEN, embedding_std),
        "model.norm.weight": plain_norm,
        "lm_head.weight": normal(VOCAB_SIZE, _HIDDEN, _LOGIT_STD / math.sqrt(_HIDDEN)),
    }
    unit = 1.0 / math.sqrt(_HIDDEN)
    sharp = math.sqrt(_SCORE_STD)
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        # Gemma normalises queries and keys per head: there the norm's weight sets the sharpness.
        query_key_std = unit if gemma else unit * sharp
        for name, rows, columns, std in (
            ("self_attn.q_proj", _HEADS * _HEAD_DIM, _HIDDEN, query_key_std),
            ("self_attn.k_proj", _KV_HEADS * _HEAD_DIM, _HIDDEN, query_key_std),
            ("self_attn.v_proj", _KV_HEADS * _HEAD_DIM, _HIDDEN, unit),
            (
                "self_attn.o_proj",
                _HIDDEN,
                _HEADS * _HEAD_DIM,
                _ATTENTION_GAIN / math.sqrt(_HEADS * _HEAD_DIM),
            ),
            ("mlp.gate_proj", _INTERMEDIATE, _HIDDEN, unit),
            ("mlp.up_proj", _INTERMEDIATE, _HIDDEN, unit),
            ("mlp.down_proj", _HIDDEN, _INTERMEDIATE, _MLP_GAIN / math.sqrt(_INTERMEDIATE)),
        ):
            weights[f"{prefix}{name}.weight"] = normal(rows, columns, std)
        weights[f"{prefix}input_layernorm.weight"] = plain_norm
        if gemma:
            weights |= {
                f"{prefix}self_attn.q_norm.weight": _norm(_HEAD_DIM, sharp),
                f"{prefix}self_attn.k_norm.weight": _norm(_HEAD_DIM, sharp),
                f"{prefix}post_attention_layernorm.weight": _norm(_HIDDEN, _ATTENTION_GAIN),
                f"{prefix}pre_feedforward_layernorm.weight": plain_norm,
                f"{prefix}post_feedforward_layernorm.weight": _norm(_HIDDEN, _MLP_GAIN),
            }
        else:
            weights[f"{prefix}post_attention_layernorm.weight"] = plain_norm
    return weights


def _norm(size: int, gain: float) -> Weight:
    """A Gemma norm weight that multiplies by `gain`: the layer itself adds one."""
    import numpy as np

    return np.full(size, gain - 1.0, np.float32)
