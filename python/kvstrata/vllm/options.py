"""The options of a tier entry: `open_tier`'s own names, and the few that only the plug-in knows.

Also the names that belong beside the tiers; their values are read where they are used.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import Locality, OffloadPolicy

import kvstrata
from kvstrata import places
from kvstrata.vllm import compat, names
from kvstrata.vllm.names import CONNECTOR, STOCK_TIERS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from enum import Enum

# open_tier's names; the values are passed on as they are and checked there.
ADMISSION = ("theta", "store_threshold", "tracked_keys", "directory")
OPEN_TIER = (
    *("capacity", "min_free", "policy", "io_backend", "deadline_s", "share_mode", "required"),
    *ADMISSION,
)
OPEN_OBJECT_TIER = (
    "endpoint",
    "region",
    "addressing",
    "allow_http",
    "ca_bundle",
    "requests_max",
    "in_flight_max",
    "lookup_wait_s",
    "found_s",
    "absent_s",
    "deadline_s",
    "required",
    *ADMISSION,
)
# The beginnings of URLs by the kind of tier that takes them.
OBJECT_SCHEMES = ("s3://", "gs://", "az://", "memory://")
_SCHEMES = ("file", "s3", "gs", "az", "memory")
# Never read from an entry: it is shown in process lists and logs.
SECRETS = ("access_key", "secret", "session_token", "credentials", "sas_token")
PLUGIN = ("url", "model_identity", "enable_kv_events", "locality", "offload_policy")
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

# Beside the tiers these have another meaning, or none.
OF_ENTRIES = {*OPEN_TIER, *OPEN_OBJECT_TIER, *PLUGIN} - {*names.OURS, *names.VLLM}
_BESIDE = {*names.OURS, *names.VLLM} - {*VLLM}

_SIMILAR = 0.7


@dataclass(frozen=True)
class TierOptions:
    """A checked tier entry. `open_tier` holds only what was given: its defaults stay its own."""

    url: str
    open_tier: dict[str, Any] = field(default_factory=dict)
    model_identity: str | dict[str, Any] | None = None
    enable_kv_events: bool = False
    locality: Locality | None = None
    # Whether the tier is given a request's rows that were in the CPU tier before it came, too.
    offload_policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL


def parse(
    options: Mapping[str, Any], written: Collection[str], *, object_tier: bool = False
) -> TierOptions:
    """Check a tier's keyword arguments; `written` are the keys the user wrote in the entry.

    A key of the entry that resembles one of ours is a misspelling and an error. Anything else that
    is unknown is ignored with one log line: a keyword that the user did not write comes from a
    newer vLLM.

    # Errors
    :class:`kvstrata.ConfigError` naming the option.
    """
    own = OPEN_OBJECT_TIER if object_tier else OPEN_TIER
    for name in options:
        if name in RESERVED:
            msg = f"{name!r} cannot be set in a kvstrata tier entry: the plug-in sets it"
            raise kvstrata.ConfigError(msg)
        if any(secret in name.lower() for secret in SECRETS):
            msg = (
                f"{name!r} does not belong in a tier entry: credentials come from the environment, "
                "a credentials file or the instance"
            )
            raise kvstrata.ConfigError(msg)
        if name not in own and name not in PLUGIN:
            _misplaced(name, own)
            _unknown(name, written, own)
    needed = ("url",) if object_tier else ("url", "capacity")
    missing = [name for name in needed if options.get(name) is None]
    if missing:
        msg = f"a kvstrata tier entry needs {' and '.join(map(repr, missing))}"
        raise kvstrata.ConfigError(msg)
    url = _typed(options, "url", str, "")
    if (why := places.doubt(url)) is not None:
        msg = f"'url' is {why}"
        raise kvstrata.ConfigError(msg)
    scheme, is_url, _ = url.partition("://")
    if object_tier and is_url and scheme not in _SCHEMES:
        msg = f"'url' {scheme}://... is of no bucket: s3://, gs:// or az:// is expected"
        raise kvstrata.ConfigError(msg)
    if url.startswith(OBJECT_SCHEMES) != object_tier:
        right = "kvstrata_disk" if object_tier else "kvstrata_object"
        shown = f"{scheme}://..." if is_url else f"{url!r}, a path,"
        msg = f"'url' {shown} is for the tier type {right!r}"
        if not is_url:
            msg += "; a bucket is written s3://bucket/prefix"
        raise kvstrata.ConfigError(msg)
    return TierOptions(
        url=url,
        open_tier={name: options[name] for name in own if name in options},
        model_identity=_identity(options.get("model_identity")),
        enable_kv_events=_typed(options, "enable_kv_events", bool, default=False),
        locality=_member(options, "locality", Locality, None),
        offload_policy=_member(options, "offload_policy", OffloadPolicy, OffloadPolicy.CHUNK_LEVEL),
    )


def check_beside(extra_config: Mapping[str, Any]) -> None:
    """Check the identities beside the tiers (:mod:`kvstrata.vllm.stackconfig` checks the names).

    One that names nothing, or a text where a switch belongs, would stand for any weights.

    # Errors
    :class:`kvstrata.ConfigError` naming the option and its value.
    """
    _identity(extra_config.get("model_identity"))
    weights_id = extra_config.get("weights_id")
    if weights_id is not None and not (isinstance(weights_id, str) and weights_id.strip()):
        msg = f"'weights_id' is {weights_id!r}, not a text that names the weights"
        raise kvstrata.ConfigError(msg)
    sampling = extra_config.get("weights_sampling")
    if sampling is not None and not isinstance(sampling, bool):
        msg = f"'weights_sampling' is {sampling!r}, not true or false"
        raise kvstrata.ConfigError(msg)


def check_other_connector(extra_config: Mapping[str, Any]) -> None:
    """Refuse rules that nobody would keep under a connector that is not ours.

    # Errors
    :class:`kvstrata.ConfigError` naming the option.
    """
    for name in CONNECTOR:
        if name in extra_config:
            msg = f"{name!r} has no effect under this connector: use kv_connector=KVStrataConnector"
            raise kvstrata.ConfigError(msg)


def written_keys(extra_config: Mapping[str, Any], types: Iterable[str]) -> set[str]:
    """All keys of the entries in `secondary_tiers` whose `type` is one of `types`."""
    wanted = set(types)
    entries = extra_config.get(STOCK_TIERS) or []
    if not isinstance(entries, list):
        return set()
    return {
        str(key)
        for entry in entries
        if isinstance(entry, dict) and entry.get("type") in wanted
        for key in entry
    }


def _misplaced(name: str, own: Collection[str]) -> None:
    if name in (*OPEN_TIER, *OPEN_OBJECT_TIER) and name not in own:
        kinds = ("kvstrata_disk", "kvstrata_object")
        right, wrong = kinds if own is OPEN_OBJECT_TIER else reversed(kinds)
        msg = f"{name!r} is an option of {right!r}, not of {wrong!r}"
        raise kvstrata.ConfigError(msg)


def _unknown(name: str, written: Collection[str], own: Collection[str]) -> None:
    if name in written and name in _BESIDE:
        msg = (
            f"{name!r} does not belong in a kvstrata tier entry: it stands beside "
            "'tiers' or 'secondary_tiers' in kv_connector_extra_config"
        )
        raise kvstrata.ConfigError(msg)
    known = [*own, *PLUGIN, *VLLM]
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


def _member(options: Mapping[str, Any], name: str, kind: type[Enum], default: Any) -> Any:
    value = options.get(name)
    if value is None:
        return default
    try:
        return kind(value)
    except ValueError as error:
        allowed = ", ".join(repr(item.value) for item in kind)
        msg = f"{name!r} is {value!r}, not one of {allowed}"
        raise kvstrata.ConfigError(msg) from error
