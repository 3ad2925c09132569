"""The options of a tier entry: `open_tier`'s own names, and the few that only the plug-in knows."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import Locality

import kvstrata
from kvstrata.vllm import compat

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

# open_tier's names; the values are passed on as they are and checked there.
OPEN_TIER = ("capacity", "min_free", "policy", "io_backend", "deadline_s", "share_mode", "required")
PLUGIN = ("url", "model_identity", "enable_kv_events", "locality")
# Known to open_tier, but not the user's to set under a stock manager.
RESERVED = ("manifest", "row_bytes", "arena", "honours_busy")
# Consumed by vLLM's factory before the tier sees the entry.
VLLM = (
    "type",
    "module_path",
    "backpressure",
    "tier_type",
    "offloading_spec",
    "primary_kv_view",
    "backpressure_detector",
)

_SIMILAR = 0.7


@dataclass(frozen=True)
class TierOptions:
    """A checked tier entry. `open_tier` holds only what was given: its defaults stay its own."""

    url: str
    open_tier: dict[str, Any] = field(default_factory=dict)
    model_identity: str | dict[str, Any] | None = None
    enable_kv_events: bool = False
    locality: Locality | None = None


def parse(options: Mapping[str, Any], written: Collection[str]) -> TierOptions:
    """Check a tier's keyword arguments; `written` are the keys the user wrote in the entry.

    A key of the entry that resembles one of ours is a misspelling and an error. Anything else that
    is unknown is ignored with one log line: a keyword that the user did not write comes from a
    newer vLLM.

    # Errors
    :class:`kvstrata.ConfigError` naming the option.
    """
    for name in options:
        if name in RESERVED:
            msg = f"{name!r} cannot be set in a kvstrata tier entry: the plug-in sets it"
            raise kvstrata.ConfigError(msg)
        if name not in OPEN_TIER and name not in PLUGIN:
            _unknown(name, written)
    missing = [name for name in ("url", "capacity") if options.get(name) is None]
    if missing:
        msg = f"a kvstrata tier entry needs {' and '.join(map(repr, missing))}"
        raise kvstrata.ConfigError(msg)
    return TierOptions(
        url=_typed(options, "url", str, ""),
        open_tier={name: options[name] for name in OPEN_TIER if name in options},
        model_identity=_identity(options.get("model_identity")),
        enable_kv_events=_typed(options, "enable_kv_events", bool, default=False),
        locality=_locality(options.get("locality")),
    )


def written_keys(extra_config: Mapping[str, Any], types: Iterable[str]) -> set[str]:
    """All keys of the entries in `secondary_tiers` whose `type` is one of `types`."""
    wanted = set(types)
    entries = extra_config.get("secondary_tiers") or []
    if not isinstance(entries, list):
        return set()
    return {
        str(key)
        for entry in entries
        if isinstance(entry, dict) and entry.get("type") in wanted
        for key in entry
    }


def _unknown(name: str, written: Collection[str]) -> None:
    known = [*OPEN_TIER, *PLUGIN, *VLLM]
    near = difflib.get_close_matches(name, known, n=1, cutoff=_SIMILAR)
    if name in written and near:
        msg = f"unknown option {name!r} in a kvstrata tier entry: did you mean {near[0]!r}?"
        raise kvstrata.ConfigError(msg)
    if name in written:
        compat.log_once(30, f"kvstrata: option {name!r} of a tier entry is unknown and ignored")
    else:
        compat.log_once(20, f"kvstrata: keyword {name!r} of this vLLM is unknown and ignored")


def _typed(options: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = options.get(name, default)
    if not isinstance(value, kind):
        msg = f"{name!r} of a kvstrata tier entry is {value!r}, not a {kind.__name__}"
        raise kvstrata.ConfigError(msg)
    return value


def _identity(value: object) -> str | dict[str, Any] | None:
    if value is None or (isinstance(value, dict) and value):
        return value
    if isinstance(value, str) and value.strip():
        return value
    msg = f"'model_identity' is {value!r}, not a string or a JSON object that names the weights"
    raise kvstrata.ConfigError(msg)


def _locality(value: object) -> Locality | None:
    if value is None:
        return None
    try:
        return Locality(value)
    except ValueError as error:
        allowed = ", ".join(repr(item.value) for item in Locality)
        msg = f"'locality' is {value!r}, not one of {allowed}"
        raise kvstrata.ConfigError(msg) from error
