"""The model's configuration as a namespace has it: every field that could change a KV byte.

Fields are taken by a deny list, so that one nobody thought of separates namespaces rather than
mixing them. :data:`DENY_VERSION` is part of the facts and grows whenever the list changes. The
fields go into the manifest as they are, so that a person can read which of them differs; the
namespace's digest is over all of them.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)

DENY_VERSION = 2
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


# A part of a configuration with a longer text stands in the manifest as its digest.
PART_BYTES_MAX = 64 << 10


def fields(model_config: Any) -> dict[str, Any]:
    """The relevant fields of a model's configuration: ``full``, and ``text`` where it is no part.

    Read anew from the model's files, with the overrides: loading a model rewrites the
    configuration in the process that loads it, which may be this one or another.
    """
    config = _read_again(model_config) or model_config.hf_config
    full = relevant(config)
    text = relevant(_text_part(config, model_config))
    found = {"full": _bounded(full)}
    if text != full and text not in full.values():
        found["text"] = _bounded(text)
    return found


def _read_again(model_config: Any) -> Any:
    """The configuration from the files, or `None` where that is not how it came about."""
    overrides = getattr(model_config, "hf_overrides", None) or {}
    as_function = overrides if callable(overrides) else None
    given = {} if as_function else dict(overrides)
    nested = {key: value for key, value in given.items() if isinstance(value, dict)}
    flat = {key: value for key, value in given.items() if key not in nested}
    try:
        from vllm.transformers_utils.config import get_config

        config = get_config(
            model_config.hf_config_path or model_config.model,
            model_config.trust_remote_code,
            getattr(model_config, "_hf_config_revision", None) or model_config.revision,
            model_config.code_revision,
            model_config.config_format,
            hf_overrides_kw=flat,
            hf_overrides_fn=as_function,
            token=model_config.hf_token,
        )
        if nested:
            model_config._apply_dict_overrides(config, nested)  # noqa: SLF001 -- as vLLM does
    except Exception as error:  # noqa: BLE001 -- the loaded one is the next best
        logger.debug("kvstrata: the model's configuration is taken as loaded: %s", error)
        return None
    return config


def _text_part(config: Any, model_config: Any) -> Any:
    if config is model_config.hf_config:
        return model_config.hf_text_config
    try:
        from vllm.transformers_utils.config import get_hf_text_config

        return get_hf_text_config(config)
    except Exception:  # noqa: BLE001 -- one that vLLM cannot take apart is used whole
        return config


def _bounded(value: dict[str, Any]) -> dict[str, Any]:
    """Long lists, such as the names of layers that are not quantised, as their digest."""
    return {
        key: {"sha256": digest(item)}
        if len(json.dumps(item, ensure_ascii=True)) > PART_BYTES_MAX
        else item
        for key, item in value.items()
    }


def plain(value: object) -> Any:
    """A JSON value that is the same in every process for the same configuration.

    Numbers that JSON lacks, and texts that are no Unicode, stand as objects with their spelling.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return _scalar(value)
    if isinstance(value, dict):
        return {_name(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(plain(item), sort_keys=True) for item in value)
    return _object(value)


def _object(value: Any) -> Any:
    """An object by its fields, or by its name where its text is only where it lies in memory."""
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    named = value if hasattr(value, "__qualname__") else type(value)
    text = str(value)
    is_named = named is value or " at 0x" in text
    return f"{named.__module__}.{named.__qualname__}" if is_named else text


def _scalar(value: object) -> Any:
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return {"int": str(value)}
    if isinstance(value, str) and not _is_unicode(value):
        return {"text": ascii(value)}
    return value


def _name(key: object) -> str:
    text = str(key)
    return text if _is_unicode(text) else ascii(text)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def relevant(config: Any) -> dict[str, Any]:
    """The configuration without denied fields, and so its parts that are configurations.

    Elsewhere the same names may mean something else: `top_k` of a router are its experts.
    """
    return _strip(plain(config), is_config=True)


def _strip(value: Any, *, is_config: bool = False) -> Any:
    if isinstance(value, dict):
        denies = is_config or "model_type" in value
        return {key: _strip(item) for key, item in value.items() if not (denies and key in DENY)}
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
