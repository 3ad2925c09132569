"""`kvstrata gc URL --capacity SIZE | --older-than AGE`.

Exit status: 0; 1 where something that was to be removed was not, because it could not be or because
the time was over; 2 where nothing can be done; 130 where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any

import kvstrata
from kvstrata import units
from kvstrata.cli.gc import directory
from kvstrata.cli.ls.command import size

EXIT_FAILED = 1
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_BUCKETS = ("s3://", "gs://", "az://", "memory://")
_OF_BUCKETS = ("endpoint", "region", "addressing", "ca_bundle")
_BYTES_MAX = (1 << 63) - 1

_DESCRIPTION = """\
Removes rows: of whole idle namespaces first (nothing stored there for a day), then the oldest.

In a bucket, rows go by the time they were stored: S3 keeps no time of access. Engines may go on
meanwhile; a row that is still in use is stored again. Manifests and records of epochs stay.

In a directory, rows go in whole row files, first those that were used longest ago, whatever the
tier's policy. A directory that an engine uses is left alone: the engine keeps its own capacity.
"""


def add_parser(subparsers: Any) -> None:
    """Add `gc` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "gc",
        help="remove rows from a bucket or a directory",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", help="s3://bucket/prefix, or file:///var/kv")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--capacity", type=capacity, metavar="SIZE", help="leave no more than this, e.g. 500GiB"
    )
    what.add_argument(
        "--older-than",
        type=age,
        metavar="AGE",
        help="remove what is older: 30m, 12h, 14d or 2w (in a directory: not used for so long)",
    )
    parser.add_argument("--dry-run", action="store_true", help="remove nothing, say what would be")
    parser.add_argument(
        "--time-limit", type=age, metavar="TIME", help="do no more after so long: 30m, 12h"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    bucket = parser.add_argument_group("of a bucket alone")
    bucket.add_argument(
        "--deadline",
        type=deadline,
        metavar="TIME",
        help="longest time of one request, or of all attempts at a page of a listing "
        "(default 30s, at most 1d)",
    )
    bucket.add_argument("--endpoint", metavar="URL", help="of a server that is not the provider's")
    bucket.add_argument("--region", metavar="NAME", help="the provider's region")
    bucket.add_argument(
        "--addressing",
        choices=("auto", "path", "virtual"),
        help="where the bucket's name stands (default auto)",
    )
    bucket.add_argument("--allow-http", action="store_true", help="plain HTTP is fine")
    bucket.add_argument("--ca-bundle", metavar="FILE", help="PEM certificates to trust, too")
    parser.set_defaults(run=run)


def age(text: str) -> float:
    """`14d` in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if found is None:
        message = f"{text!r} is not a number with s, m, h, d or w, such as 14d"
        raise argparse.ArgumentTypeError(message)
    return float(found[1]) * _SECONDS[found[2]]


def deadline(text: str) -> float:
    """`30s` in seconds, as `open_tier` takes it."""
    seconds = age(text)
    if not 0 < seconds <= _SECONDS["d"]:
        message = f"{text!r} is not more than 0s and at most 1d"
        raise argparse.ArgumentTypeError(message)
    return seconds


def capacity(text: str) -> int:
    """`500GiB` in bytes."""
    found = units.parse(text)
    if found is None or found[1] == "%":
        message = f"{text!r} is not a number of bytes such as 500GiB"
        raise argparse.ArgumentTypeError(message)
    return min(int(found[0] * units.UNITS[found[1]]), _BYTES_MAX)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        report = _collect(options)
    except (kvstrata.ConfigError, directory.UnusableError) as error:
        print(f"kvstrata gc: {_by_option(str(error))}", file=sys.stderr)
        return EXIT_UNUSABLE
    except KeyboardInterrupt as interrupt:
        print("kvstrata gc: interrupted", file=sys.stderr)
        so_far = getattr(interrupt, "report", None)
        if so_far is not None:
            _print({"unit": "rows", **so_far}, options)
        return EXIT_INTERRUPTED
    if report["ended"] != "done":
        print(f"kvstrata gc: not done: {report['ended']}", file=sys.stderr)
    elif not any(report[f"{what}_rows"] for what in ("removed", "kept", "failed")):
        print(f"kvstrata gc: no rows lie below {options.url}", file=sys.stderr)
    _print(report, options)
    return EXIT_FAILED if report["failed_rows"] or report["ended"] != "done" else 0


def _print(report: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print(_told(report, dry_run=options.dry_run))


def _collect(options: argparse.Namespace) -> dict[str, Any]:
    what: dict[str, Any] = {"dry_run": options.dry_run}
    if options.capacity is not None:
        what["capacity"] = options.capacity
    if options.older_than is not None:
        what["older_than_s"] = options.older_than
    if options.time_limit is not None:
        what["time_limit_s"] = options.time_limit
    if not options.url.startswith(_BUCKETS):
        _check_directory(options)
        return directory.collect(options.url, **what)
    for name in _OF_BUCKETS:
        value = getattr(options, name)
        if value is not None:
            what[name] = value
    if options.deadline is not None:
        what["deadline_s"] = options.deadline
    if options.allow_http:
        what["allow_http"] = True
    return {"unit": "rows", **kvstrata.collect_garbage(options.url, **what)}


def _check_directory(options: argparse.Namespace) -> None:
    scheme, is_url, _ = options.url.partition("://")
    if is_url and scheme != "file":
        message = f"{options.url!r}: {', '.join(_BUCKETS[:3])}, file:/// or a path is expected"
        raise directory.UnusableError(message)
    for name in (*_OF_BUCKETS, "deadline", "allow_http"):
        if getattr(options, name) not in (None, False):
            message = f"--{name.replace('_', '-')} is for buckets alone"
            raise directory.UnusableError(message)


def _by_option(message: str) -> str:
    """A message of `collect_garbage`, which names its arguments, with the options' names."""
    name, colon, rest = message.partition(":")
    if colon and name in _OF_BUCKETS:
        message = f"--{name.replace('_', '-')}:{rest}"
    return message.replace("allow_http=True", "--allow-http")


def _told(report: dict[str, Any], *, dry_run: bool) -> str:
    removed, kept, emptied = (
        ("would remove", "would keep", "would be empty")
        if dry_run
        else ("removed", "kept", "empty now")
    )
    lines = [
        f"{removed} {_count(report, 'removed_rows')}, {size(report['removed_bytes'])}",
        f"{kept} {_count(report, 'kept_rows')}, {size(report['kept_bytes'])}",
    ]
    lines += [f"{emptied}: {name}" for name in report["emptied"]]
    if report["failed_rows"]:
        why = f" ({report['last_error']})" if report["last_error"] else ""
        lines.append(f"could not remove {_count(report, 'failed_rows')}{why}")
    if report["odd_names"]:
        lines.append(f"left alone {report['odd_names']} objects whose names are not ours")
    return "\n".join(lines)


def _count(report: dict[str, Any], name: str) -> str:
    count, unit = report[name], report["unit"]
    return f"{count} {unit.removesuffix('s') if count == 1 else unit}"
