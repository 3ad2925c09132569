"""Unpacks the Python sources and data of a wheel, and none of its compiled parts.

    python scripts/unpack_python.py WHEEL DIRECTORY

The result is laid over an installed older release with `PYTHONPATH`, for unit tests of pure
Python code. The wheel's metadata stays behind, so that what is installed keeps its name.
"""

import sys
import zipfile
from pathlib import Path

SUFFIXES = {".py", ".json", ".jinja", ".typed"}


def unpack(wheel: Path, directory: Path) -> int:
    """Writes the sources of `wheel` below `directory` and returns how many files these are."""
    with zipfile.ZipFile(wheel) as archive:
        names = [
            name
            for name in archive.namelist()
            if Path(name).suffix in SUFFIXES and ".dist-info/" not in name
        ]
        archive.extractall(directory, names)
    return len(names)


def main() -> int:
    """Runs the command line; 1 when the wheel holds no Python source."""
    wheel, directory = map(Path, sys.argv[1:3])
    return 0 if unpack(wheel, directory) else 1


if __name__ == "__main__":
    sys.exit(main())
