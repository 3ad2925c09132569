"""`kv_connector_extra_config` under :class:`kvstrata.vllm.connector.KVStrataConnector`.

Names of ours are checked strictly, names that vLLM reads pass, and others are warned about once.
"""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import kvstrata
from kvstrata.vllm import compat, names, options, sizes
from kvstrata.vllm.loadlimits import LoadLimits
from kvstrata.vllm.names import STOCK_TIERS, TIERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.config import VllmConfig

RESET_ALL = "all"
RESET_CPU = "cpu"
EXACT = "exact"
UNIFORM = "uniform"
DEFAULT_POLICY = "lru"
# What the connector itself puts there.
INTERNAL_PREFIX = "kvstrata_"
_SIMILAR = 0.8
# What the CPU tier knows; vLLM's manager has policies of its own.
POLICIES = ("lru", "th", "arc_vllm", "s3fifo")
# What kvstrata.memory.numa knows; the first is the default.
NUMA = ("off", "local", "interleave")


# The names that the same have with slots of one size.
_OF_UNIFORM_SLOTS = {"arc": "arc_vllm", **{f"kvstrata_{name}": name for name in POLICIES}}


@dataclass(frozen=True)
class CpuConfig:
    """What the CPU tier takes, and keeps."""

    policy: str = DEFAULT_POLICY
    # Least probability of a use within an hour, and how many requests must have had a key.
    theta: float = 0.0
    store_threshold: int = 1
    tracked_keys: int | None = None
    # Keys that what predicts knows at most.
    directory: int | None = None
    protect_waiting: bool = True

    def options(self) -> dict[str, Any]:
        """Keyword arguments of :class:`kvstrata._native.CpuTier`."""
        given = {"tracked_keys": self.tracked_keys, "directory": self.directory}
        return {
            "policy": self.policy,
            "theta": self.theta,
            "store_threshold": self.store_threshold,
            "protect_waiting": self.protect_waiting,
            **{name: value for name, value in given.items() if value is not None},
        }


@dataclass(frozen=True)
class StackConfig:
    """What was configured, and the defaults of what was not."""

    cpu_bytes: int
    slots: str
    eviction_policy: str
    cpu: CpuConfig
    tiers: tuple[dict[str, Any], ...]
    stock_tiers: tuple[dict[str, Any], ...]
    numa: str
    large_pages: bool
    # vLLM's default is to store only prompts. The answer of one turn is part of the next turn's
    # prompt, so that it is stored here, too: one more row per block of new tokens.
    offload_prompt_only: bool
    loads: LoadLimits

    @property
    def is_exact(self) -> bool:
        """Whether a slot takes what its group needs."""
        return self.slots == EXACT


def check_names(extra_config: Mapping[str, Any]) -> None:
    """Refuse a name that resembles one that is known, and warn once about any other.

    # Errors
    :class:`kvstrata.ConfigError` naming both.
    """
    known = (*names.OURS, *names.VLLM)
    for name in extra_config:
        if name in known or name.startswith(INTERNAL_PREFIX):
            continue
        if name in options.OF_ENTRIES:
            msg = f"{name!r} belongs in an entry of {TIERS!r} or {STOCK_TIERS!r}, not beside them"
            raise kvstrata.ConfigError(msg)
        near = difflib.get_close_matches(name, known, n=1, cutoff=_SIMILAR)
        if near:
            msg = f"unknown option {name!r} in kv_connector_extra_config: did you mean {near[0]!r}?"
            raise kvstrata.ConfigError(msg)
        compat.log_once(
            logging.WARNING,
            f"kvstrata: option {name!r} in kv_connector_extra_config is unknown and ignored",
        )


def slots_of(extra_config: Mapping[str, Any]) -> str:
    """How slots are made: to fit their group, unless tiers of vLLM's kind are configured.

    # Errors
    :class:`kvstrata.ConfigError` for any other word.
    """
    default = UNIFORM if extra_config.get(STOCK_TIERS) else EXACT
    slots = extra_config.get("slots", default)
    if slots not in (EXACT, UNIFORM):
        msg = f"'slots' is {slots!r}, not {EXACT!r} or {UNIFORM!r}"
        raise kvstrata.ConfigError(msg)
    return str(slots)


def refuse_size_option(vllm_config: VllmConfig) -> None:
    """`--kv-offloading-size` puts vLLM's own connector in our place, and its number in ours.

    # Errors
    :class:`kvstrata.ConfigError` where it is set.
    """
    size = getattr(vllm_config.cache_config, "kv_offloading_size", None)
    if size is not None:
        msg = (
            f"--kv-offloading-size={size} sets up vLLM's own offloading: remove it, and set "
            f"'cpu_bytes_to_use' to '{size:g}GiB' in kv_connector_extra_config"
        )
        raise kvstrata.ConfigError(msg)


def on_reset(extra: Mapping[str, Any]) -> str:
    """Which tiers a reset forgets: :data:`RESET_ALL` or :data:`RESET_CPU`.

    # Errors
    :class:`kvstrata.ConfigError` for any other word.
    """
    chosen = extra.get("on_reset", RESET_ALL)
    if chosen not in (RESET_ALL, RESET_CPU):
        msg = f"'on_reset' is {chosen!r}, not {RESET_ALL!r} or {RESET_CPU!r}"
        raise kvstrata.ConfigError(msg)
    return str(chosen)


def parse(extra_config: Mapping[str, Any], memory: Callable[[], int] = sizes.memory) -> StackConfig:
    """Read the options; `memory` says what a percentage is a part of.

    # Errors
    :class:`kvstrata.ConfigError` naming the option, and what it can be.
    """
    slots = slots_of(extra_config)
    tiers = _entries(extra_config, TIERS)
    stock = _entries(extra_config, STOCK_TIERS)
    if slots == EXACT and stock:
        msg = (
            f"{STOCK_TIERS!r} need slots of one size: leave 'slots' out or set it to {UNIFORM!r}, "
            f"or name kvstrata's own tiers in {TIERS!r}"
        )
        raise kvstrata.ConfigError(msg)
    if slots == UNIFORM and tiers:
        msg = (
            f"{TIERS!r} are for slots that fit their group: leave 'slots' out or set it to "
            f"{EXACT!r}, or name the tiers in {STOCK_TIERS!r}"
        )
        raise kvstrata.ConfigError(msg)
    numa = extra_config.get("numa", NUMA[0])
    if numa not in NUMA:
        msg = f"'numa' is {numa!r}, not one of {', '.join(map(repr, NUMA))}"
        raise kvstrata.ConfigError(msg)
    policy = _text(extra_config, "eviction_policy", DEFAULT_POLICY)
    if slots == EXACT:
        _refuse_stock_options(extra_config)
        _refuse_other_policies(policy)
    else:
        _refuse_options_of_ours(extra_config)
    return StackConfig(
        cpu_bytes=_cpu_bytes(extra_config, memory),
        slots=slots,
        eviction_policy=policy,
        cpu=_cpu(extra_config, policy) if slots == EXACT else CpuConfig(),
        tiers=tiers,
        stock_tiers=stock,
        numa=numa,
        large_pages=_flag(extra_config, "large_pages", default=True),
        offload_prompt_only=_flag(extra_config, "offload_prompt_only"),
        loads=_load_limits(extra_config),
    )


def _cpu(extra_config: Mapping[str, Any], policy: str) -> CpuConfig:
    theta = extra_config.get("theta", 0.0)
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 <= theta <= 1:
        msg = f"'theta' is {theta!r}, not a probability from 0 to 1"
        raise kvstrata.ConfigError(msg)
    return CpuConfig(
        policy=policy,
        theta=float(theta),
        # vLLM's 0 and 1 mean the same.
        store_threshold=max(1, _count(extra_config, "store_threshold", 0) or 1),
        tracked_keys=_count(extra_config, "max_tracker_size", 1),
        directory=_count(extra_config, "directory", 1),
        protect_waiting=_flag(extra_config, "protect_waiting", default=True),
    )


def _count(extra_config: Mapping[str, Any], name: str, least: int) -> int | None:
    value = extra_config.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        msg = f"{name!r} is {value!r}, not a whole number from {least} on"
        raise kvstrata.ConfigError(msg)
    return value


def _cpu_bytes(extra_config: Mapping[str, Any], memory: Callable[[], int]) -> int:
    given = extra_config.get("cpu_bytes_to_use")
    if given is None:
        msg = (
            "'cpu_bytes_to_use' is missing in kv_connector_extra_config: the CPU memory of this "
            "engine, all ranks together, as '64GiB', '50%' or a number of bytes"
        )
        raise kvstrata.ConfigError(msg)
    whole = memory()
    size = sizes.parse("cpu_bytes_to_use", given, whole)
    if size > whole:
        msg = (
            f"'cpu_bytes_to_use' is {given!r}, {sizes.shown(size)}; this process can be given "
            f"{sizes.shown(whole)} of memory at most"
        )
        raise kvstrata.ConfigError(msg)
    return size


def _entries(extra_config: Mapping[str, Any], name: str) -> tuple[dict[str, Any], ...]:
    given = extra_config.get(name) or []
    if not isinstance(given, (list, tuple)) or not all(isinstance(one, dict) for one in given):
        msg = f"{name!r} is {given!r}, not a list of objects, each with a 'type'"
        raise kvstrata.ConfigError(msg)
    for entry in given:
        if not isinstance(entry.get("type"), str):
            msg = f"an entry of {name!r} has no 'type': {entry!r}"
            raise kvstrata.ConfigError(msg)
    return tuple(given)


def _refuse_stock_options(extra_config: Mapping[str, Any]) -> None:
    for name in names.OF_STOCK_MANAGERS:
        if name in extra_config:
            msg = (
                f"{name!r} is an option of vLLM's own manager, and nothing obeys it with slots "
                f"that fit their group: remove it, or set 'slots' to {UNIFORM!r}"
            )
            raise kvstrata.ConfigError(msg)


def _refuse_options_of_ours(extra_config: Mapping[str, Any]) -> None:
    for name in (*names.OF_ARENA, *names.OF_CPU_TIER, *names.OF_LOADS):
        if name in extra_config:
            msg = (
                f"{name!r} is an option of slots that fit their group, and vLLM's own manager does "
                f"not obey it: remove it, or leave 'slots' and {STOCK_TIERS!r} out and name "
                f"kvstrata's own tiers in {TIERS!r}"
            )
            raise kvstrata.ConfigError(msg)


def _refuse_other_policies(policy: str) -> None:
    if policy not in POLICIES:
        msg = f"'eviction_policy' is {policy!r}, not one of {', '.join(map(repr, POLICIES))}"
        if (ours := _OF_UNIFORM_SLOTS.get(policy)) is not None:
            msg += f": with exact slots that is {ours!r}"
        raise kvstrata.ConfigError(msg)


def _text(extra_config: Mapping[str, Any], name: str, default: str) -> str:
    value = extra_config.get(name, default)
    if not isinstance(value, str):
        msg = f"{name!r} is {value!r}, not a text"
        raise kvstrata.ConfigError(msg)
    return value


def _flag(extra_config: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = extra_config.get(name, default)
    if not isinstance(value, bool):
        msg = f"{name!r} is {value!r}, not true or false"
        raise kvstrata.ConfigError(msg)
    return value


def _load_limits(extra_config: Mapping[str, Any]) -> LoadLimits:
    usual = LoadLimits()
    return LoadLimits(
        wait_s=_number(extra_config, "load_wait_s", usual.wait_s, most=3600.0),
        share=_number(extra_config, "load_share", usual.share, most=1.0),
        request_share=_number(extra_config, "request_load_share", usual.request_share, most=1.0),
    )


def _number(extra_config: Mapping[str, Any], name: str, default: float, *, most: float) -> float:
    value = extra_config.get(name, default)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= most:
        msg = f"{name!r} is {value!r}, not a number above 0 and up to {most:g}"
        raise kvstrata.ConfigError(msg)
    return float(value)
