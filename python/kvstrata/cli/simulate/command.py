"""`kvstrata simulate --trace FILE --capacity 1%,5% --policy th,lru`.

Exit status: 0, or 2 where an argument or a trace is wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstrata._native import CacheOrder
from kvstrata.cli.simulate import capacity, plot, trace
from kvstrata.errors import ArgumentError, ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvstrata._native import Trace

EXIT_GOOD = 0
EXIT_WRONG = 2
OPTIMUM = "opt"
POLICIES = "th,lru,arc_vllm,s3fifo,opt"
CAPACITIES = "1%,2%,5%,10%,25%"


def add_parser(subparsers: Any) -> None:
    """Add `simulate` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "simulate",
        help="replay a request trace against eviction policies and sizes of a tier",
        description="Replay request traces as vLLM would: blocks are looked up in order to the "
        "first miss, then what is missing is stored. Prints the share of requested blocks that "
        "the tier had. docs/EVICTION.md defines the policies and the forms of traces.",
    )
    parser.add_argument(
        "--trace",
        action="append",
        required=True,
        type=Path,
        metavar="FILE",
        help="a trace, plain or gzipped; may be given several times (no default)",
    )
    parser.add_argument(
        "--capacity",
        default=CAPACITIES,
        help="sizes of the tier: shares of the trace's blocks, bytes (with --block-bytes), or "
        f"blocks ({CAPACITIES})".replace("%", "%%"),
    )
    parser.add_argument(
        "--policy", default=POLICIES, help=f"policies, and opt for the best possible ({POLICIES})"
    )
    parser.add_argument(
        "--block-bytes",
        metavar="SIZE",
        help="KV bytes of one of the trace's blocks (not known: sizes in bytes are refused)",
    )
    parser.add_argument(
        "--theta",
        type=float,
        default=0.0,
        help="admission: least probability of a use within an hour of what the tier takes (0)",
    )
    parser.add_argument(
        "--store-threshold",
        type=int,
        default=1,
        metavar="N",
        help="admission: requests that must have had a block before a tier takes it (1)",
    )
    parser.add_argument(
        "--directory",
        type=int,
        metavar="KEYS",
        help="keys that th's directory, or what predicts for other policies, knows at most "
        "(those of the last hour, up to 4,194,304 or eight for each block of the tier)",
    )
    parser.add_argument(
        "--gpu",
        metavar="SIZE",
        help="size of a GPU cache (LRU) in front of the tier (no such cache)",
    )
    parser.add_argument(
        "--head-untold",
        action="store_true",
        help="requests that load leave the head that they found on the GPU untouched in the tier, "
        "as vLLM 0.33's managers do (they touch it)",
    )
    parser.add_argument(
        "--told-late",
        action="store_true",
        help="the tier's policy is told of requests only when they end, as inside vLLM's managers "
        "(told when they arrive)",
    )
    parser.add_argument(
        "--below", metavar="SIZE", help="size of a second tier below (no such tier)"
    )
    parser.add_argument("--below-policy", help="its policy (th)")
    parser.add_argument("--below-theta", type=float, help="its --theta (0)")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON, with what the GPU and the tier below found (a table)",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the curves into FILE.svg or FILE.png, which needs Pillow (no picture)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        if options.plot is not None:
            plot.check(options.plot)
        _check(options)
        results = [result for path in options.trace for result in _replay_file(path, options)]
        if not results:
            raise ValueError("--policy or --capacity names nothing")
        if options.plot is not None:
            _plot(options.plot, results)
    except (
        *(ArgumentError, ConfigError, trace.UnreadableError),
        *(ValueError, OverflowError, OSError),
    ) as error:
        print(f"kvstrata simulate: {error}", file=sys.stderr)
        return EXIT_WRONG
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        _print(results)
    return EXIT_GOOD


def _check(options: argparse.Namespace) -> None:
    """What would otherwise end the command after the first replays, which may take long."""
    for policy in _list(options.policy):
        if policy != OPTIMUM:
            try:
                CacheOrder(policy, 1, tail_first=True)
            except ConfigError as error:
                raise ValueError(f"{error}, or {OPTIMUM}") from error
    for name in ("theta", "below_theta"):
        share = getattr(options, name)
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"{_option(name)} is {share}; a probability from 0 to 1 is expected")
    for name, least, most in (("store_threshold", 0, 2**32 - 1), ("directory", 1, 2**62)):
        count = getattr(options, name)
        if count is not None and not least <= count <= most:
            raise ValueError(f"{_option(name)} is {count}; {least} to {most} is expected")
    for name in ("below_policy", "below_theta"):
        if options.below is None and getattr(options, name) is not None:
            raise ValueError(f"{_option(name)} is of the tier below: --below SIZE is needed")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _replay_file(path: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    source = trace.read(path)
    name = source.name or path.name.split(".")[0]
    block_bytes = None if options.block_bytes is None else capacity.size(options.block_bytes)

    def blocks(text: str, option: str) -> int:
        return capacity.blocks(text, source.unique_blocks, block_bytes, option)

    tiers: dict[str, Any] = {
        "theta": options.theta,
        "store_threshold": options.store_threshold,
        "directory": options.directory,
        "head_untold": options.head_untold,
        "told_late": options.told_late,
    }
    if options.gpu is not None:
        tiers["gpu_blocks"] = blocks(options.gpu, "--gpu")
    if options.below is not None:
        tiers["below_policy"] = options.below_policy or "th"
        tiers["below_capacity"] = blocks(options.below, "--below")
        tiers["below_theta"] = options.below_theta or 0.0
    asked = max(source.requested, 1)
    results: list[dict[str, Any]] = []
    sizes = {text: blocks(text, "--capacity") for text in _list(options.capacity)}
    for policy in _list(options.policy):
        for text, size in sizes.items():
            found = {"trace": name, "policy": policy, "capacity": text, "blocks": size}
            if policy == OPTIMUM:
                hits = source.optimum(size)
                results.append({**found, "hit_ratio": hits / asked, "hits": hits})
            else:
                results.append({**found, **_one(source, policy, size, tiers, block_bytes)})
    return results


def _one(
    source: Trace, policy: str, blocks: int, tiers: dict[str, Any], block_bytes: int | None
) -> dict[str, Any]:
    counts = source.replay(policy, blocks, **tiers)
    asked = max(counts["requested"], 1)
    saved = counts["hits"] + counts["below_hits"]
    result = {
        "hit_ratio": counts["hits"] / asked,
        **counts,
        "gpu_hit_ratio": counts["gpu_hits"] / asked,
        "below_hit_ratio": counts["below_hits"] / asked,
        "prefill_tokens_saved": saved * source.block_tokens,
    }
    if block_bytes is not None:
        result["bytes_written"] = counts["written"] * block_bytes
        result["below_bytes_written"] = counts["below_written"] * block_bytes
    return result


def _list(text: str) -> list[str]:
    return [part for part in (part.strip() for part in text.split(",")) if part]


def _print(results: Sequence[dict[str, Any]]) -> None:
    for name in dict.fromkeys(result["trace"] for result in results):
        own = [result for result in results if result["trace"] == name]
        sizes = list(dict.fromkeys(result["capacity"] for result in own))
        ratios = {(result["policy"], result["capacity"]): result["hit_ratio"] for result in own}
        print(f"{name}: share of requested blocks found")
        print(f"{'':10}" + "".join(f"{size:>16}" for size in sizes))
        for policy in dict.fromkeys(result["policy"] for result in own):
            cells = []
            for size in sizes:
                ratio, lru = ratios[policy, size], ratios.get(("lru", size))
                against = f" ({ratio / lru:.3f})" if lru else ""
                cells.append(f"{f'{ratio:.4f}{against}':>16}")
            print(f"{policy:10}" + "".join(cells))
        if any(policy == "lru" and ratio for (policy, _), ratio in ratios.items()):
            print("In parentheses: as a multiple of lru's.")


def _plot(path: Path, results: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(result["trace"] for result in results))
    curves: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        label = result["policy"] if len(names) == 1 else f"{result['policy']}, {result['trace']}"
        curves.setdefault(label, []).append((result["blocks"], result["hit_ratio"]))
    title = f"{', '.join(names)}: share of requested blocks found, by size of the tier"
    plot.write(path, title, list(curves.items()))
