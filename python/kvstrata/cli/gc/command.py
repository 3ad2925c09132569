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
from kvstrata.cli.gc import directory
from kvstrata.cli.ls.command import size

EXIT_FAILED = 1
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_BUCKETS = ("s3://", "gs://", "az://", "memory://")

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
    what.add_argument("--capacity", metavar="SIZE", help="leave no more than this, e.g. 500GiB")
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
    parser.add_argument(
        "--deadline", type=age, metavar="TIME", help="longest time of one request (default 30s)"
    )
    parser.add_argument("--endpoint", metavar="URL", help="of a server that is not the provider's")
    parser.add_argument("--region", metavar="NAME", help="the provider's region")
    parser.add_argument("--addressing", choices=("auto", "path", "virtual"))
    parser.add_argument("--allow-http", action="store_true", help="plain HTTP is fine")
    parser.add_argument("--ca-bundle", metavar="FILE", help="PEM certificates to trust, too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def age(text: str) -> float:
    """`14d` in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if found is None:
        message = f"{text!r} is not a number with s, m, h, d or w, such as 14d"
        raise argparse.ArgumentTypeError(message)
    return float(found[1]) * _SECONDS[found[2]]


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        report = _collect(options)
    except (kvstrata.ConfigError, directory.UnusableError) as error:
        print(f"kvstrata gc: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except KeyboardInterrupt as interrupt:
        print("kvstrata gc: interrupted", file=sys.stderr)
        so_far = getattr(interrupt, "report", None)
        if so_far is not None:
            _print(so_far, options)
        return EXIT_INTERRUPTED
    if report["ended"] != "done":
        print(f"kvstrata gc: not done: {report['ended']}", file=sys.stderr)
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
        return directory.collect(options.url, **what)
    for name in ("endpoint", "region", "addressing", "ca_bundle"):
        value = getattr(options, name)
        if value is not None:
            what[name] = value
    if options.deadline is not None:
        what["deadline_s"] = options.deadline
    if options.allow_http:
        what["allow_http"] = True
    return kvstrata.collect_garbage(options.url, **what)


def _told(report: dict[str, Any], *, dry_run: bool) -> str:
    verb = "would remove" if dry_run else "removed"
    what = report.get("unit", "rows")
    lines = [
        f"{verb} {report['removed_rows']} {what}, {size(report['removed_bytes'])}",
        f"kept {report['kept_rows']} {what}, {size(report['kept_bytes'])}",
    ]
    lines += [f"empty now: {name}" for name in report["emptied"]]
    if report["failed_rows"]:
        why = f" ({report['last_error']})" if report["last_error"] else ""
        lines.append(f"could not remove {report['failed_rows']} {what}{why}")
    if report["odd_names"]:
        lines.append(f"left alone {report['odd_names']} objects whose names are not ours")
    return "\n".join(lines)
