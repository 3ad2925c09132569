"""`kvstrata ls URL [--json]` and `kvstrata ls [URL] --diff A B`.

Exit status: 0, for `--diff` 1 where the two differ, 2 where something cannot be read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvstrata
from kvstrata.cli.ls import inventory

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

EXIT_SAME = 0
EXIT_DIFFERENT = 1
EXIT_UNREADABLE = 2
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_UNIT = 1024
_BUCKETS = ("s3://", "gs://", "az://")
_HOW_MUCH = "`kvstrata gc URL --capacity SIZE --dry-run` says how much a bucket holds"


def add_parser(subparsers: Any) -> None:
    """Add `ls` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "ls",
        help="list the namespaces at a root, or show why two of them differ",
        description="List the namespaces at a root, and what else lies there. With --diff: print "
        "each field in which two namespaces differ. Nothing is changed or locked.",
    )
    parser.add_argument("url", nargs="?", metavar="URL", help="file:///var/kv or a path")
    parser.add_argument(
        "--diff",
        nargs=2,
        metavar=("A", "B"),
        help="two namespaces: directories, their namespace.json, or (with URL) the beginnings of "
        "their names or digests",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if options.url is None and options.diff is None:
        options.parser.error("URL or --diff A B is needed")
    try:
        root = None if options.url is None else inventory.root_of(options.url)
        if options.diff is not None:
            return _diff(root, *options.diff, as_json=options.json)
        assert root is not None  # noqa: S101 -- argparse has seen to it
        _list(inventory.take(root), as_json=options.json)
    except inventory.UnreadableError as error:
        hint = f"; {_HOW_MUCH}" if str(options.url).startswith(_BUCKETS) else ""
        print(f"kvstrata ls: {error}{hint}", file=sys.stderr)
        return EXIT_UNREADABLE
    return EXIT_SAME


def _list(found: inventory.Inventory, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
        return
    rows = [
        (
            item.name,
            size(item.bytes),
            str(item.files),
            "-" if item.epoch is None else str(item.epoch),
            item.tenant or "-",
            {True: "proven", False: "unproved", None: "-"}[item.proven],
            item.problem or "",
        )
        for item in found.namespaces
    ]
    _table(("namespace", "on disk", "files", "epoch", "tenant", "bytes are", ""), rows)
    if found.others:
        print()
        others = [(item.name, size(item.bytes), item.kind) for item in found.others]
        _table(("not ours, left alone", "on disk", "kind"), others)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def size(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in _UNITS:
        if value < _UNIT or unit == _UNITS[-1]:
            break
        value /= _UNIT
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def _diff(root: Path | None, first: str, second: str, *, as_json: bool) -> int:
    a, b = (inventory.read_manifest(_place(root, name)) for name in (first, second))
    differences = kvstrata.manifest_differences(a, b)
    if as_json:
        listed = [
            {"field": field, "a": _value(mine), "b": _value(theirs)}
            for field, mine, theirs in differences
        ]
        print(json.dumps(listed, indent=2, ensure_ascii=False))
    else:
        for field, mine, theirs in differences:
            print(f"{field}: {_shown(mine)} -> {_shown(theirs)}")
    return EXIT_DIFFERENT if differences else EXIT_SAME


def _value(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def _shown(text: str | None) -> str:
    return "(absent)" if text is None else text


def _place(root: Path | None, name: str) -> Path:
    """The namespace that a path, or the beginning of a name or digest at the root, stands for."""
    if root is None or Path(name).exists():
        return Path(name)
    found = [
        item.name
        for item in inventory.take(root).namespaces
        if item.name.startswith(name) or item.name.rpartition("-")[2].startswith(name)
    ]
    if len(found) == 1:
        return root / found[0]
    msg = f"{name!r} stands for {len(found)} of the namespaces at {root}"
    raise inventory.UnreadableError(msg)
