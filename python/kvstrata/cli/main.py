"""Entry point of the `kvstrata` command."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from typing import TYPE_CHECKING

from kvstrata.cli.demo import command as demo
from kvstrata.cli.gc import command as gc
from kvstrata.cli.ls import command as ls
from kvstrata.cli.record import command as record
from kvstrata.cli.simulate import command as simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# As shells have it for SIGINT.
INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="kvstrata",
        description="KV-cache storage tiers below the GPU for vLLM.",
    )
    parser.add_argument("--version", action="version", version=f"kvstrata {_version()}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo.add_parser(subparsers)
    ls.add_parser(subparsers)
    gc.add_parser(subparsers)
    record.add_parser(subparsers)
    simulate.add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status. argparse itself exits with 2 on bad input."""
    options = build_parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        status = run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who read has seen enough; what is left is not written at the end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def _version() -> str:
    try:
        return importlib.metadata.version("kvstrata")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
