"""A digest of the model's configuration: every field that could change a KV byte, no other.

Fields are taken by a deny list, so that one nobody thought of separates namespaces rather than
mixing them. :data:`DENY_VERSION` is part of the facts and grows whenever the list changes.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

DENY_VERSION = 1
# Names, provenance, and what only sampling and generation read.
DENY = frozenset(
    {
        "_name_or_path",
        "_commit_hash",
        "_attn_implementation",
        "_attn_implementation_internal",
        "_auto_class",
        "_experts_implementation",
        "_experts_implementation_internal",
        "_output_attentions",
        "attn_implementation",
        "bad_words_ids",
        "begin_suppress_tokens",
        "chunk_size_feed_forward",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "name_or_path",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "prefix",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "transformers_version",
        "typical_p",
        "use_cache",
    }
)
# RoPE variants whose rotation does not depend on the longest length the model is built for.
LENGTH_FREE_ROPE = frozenset(
    {"default", "linear", "llama3", "yarn", "mrope", "proportional", "none"}
)


def plain(value: object) -> Any:
    """A JSON value that is the same in every process for the same configuration."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(plain(item), sort_keys=True) for item in value)
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    text = str(value)
    # An object's default text holds its address, which differs from process to process.
    return f"{type(value).__module__}.{type(value).__qualname__}" if " at 0x" in text else text


def relevant(config: Any) -> dict[str, Any]:
    """The configuration without denied fields, at every depth."""
    return _strip(plain(config))


def _strip(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strip(item) for key, item in value.items() if key not in DENY}
    if isinstance(value, list):
        return [_strip(item) for item in value]
    return value


def digest(value: object) -> str:
    """SHA-256 of a JSON value in canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def depends_on_length(config: dict[str, Any]) -> bool:
    """Whether a RoPE variant of it may rotate differently under another maximum length."""
    kinds = set(_rope_kinds(config, inside=False))
    return bool(kinds - LENGTH_FREE_ROPE)


def _rope_kinds(value: Any, *, inside: bool) -> list[str]:
    found: list[str] = []
    if isinstance(value, dict):
        for key, item in value.items():
            if inside and key in {"rope_type", "type"} and isinstance(item, str):
                found.append(item)
            else:
                found += _rope_kinds(item, inside=inside or "rope" in key)
    elif isinstance(value, list):
        for item in value:
            found += _rope_kinds(item, inside=inside)
    return found
