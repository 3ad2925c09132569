"""`kvstrata record PLACE... --out FILE`.

Exit status: 0, or 2 where there is nothing to be read.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstrata import places
from kvstrata.cli.record import merge

if TYPE_CHECKING:
    import argparse

EXIT_GOOD = 0
EXIT_WRONG = 2

_DESCRIPTION = """\
Makes one trace of what engines recorded, for `kvstrata simulate`. An engine records with the option
"record" of KVStrataConnector, e.g. "record": "/var/kv-recordings": digests of blocks, never tokens.
The trace has numbers in their place.
"""


def add_parser(subparsers: Any) -> None:
    """Add `record` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "record", help="make a trace of what engines recorded", description=_DESCRIPTION
    )
    parser.add_argument(
        "place",
        nargs="+",
        metavar="PLACE",
        help="directories that engines record to, or files of them; of one directory's salt",
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="trace.jsonl or trace.jsonl.gz"
    )
    parser.add_argument("--name", help="name of the trace; that of the file")
    parser.set_defaults(run=run)


def _place(text: str) -> Path:
    try:
        path = places.directory(text)
    except ValueError as error:
        raise merge.UnreadableError(str(error)) from error
    why = None if path.exists() else places.doubt(text)
    if why is not None:
        raise merge.UnreadableError(why)
    return path


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    found = merge.Recordings()
    try:
        for path in merge.files_of(map(_place, options.place)):
            found.add(path)
        found.check()
        merge.write(options.out, found.lines(options.name or options.out.name.split(".")[0]))
    except merge.UnreadableError as error:
        print(f"kvstrata record: {error}", file=sys.stderr)
        return EXIT_WRONG
    except OSError as error:
        print(f"kvstrata record: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_WRONG
    blocks = {digest for request in found.requests for digest in request.path}
    torn = f"; {found.torn} unfinished lines were left out" if found.torn else ""
    print(f"{options.out}: {len(found.requests)} requests, {len(blocks)} different blocks{torn}")
    return EXIT_GOOD
