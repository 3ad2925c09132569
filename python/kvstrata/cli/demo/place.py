"""Where one model's rows are kept: in a directory, or below that in a bucket, too."""

from __future__ import annotations

import dataclasses
import os
import shutil
from typing import TYPE_CHECKING, Any

from kvstrata.cli.demo import bucket as buckets
from kvstrata.cli.demo import rows

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Place:
    """A directory for the disk tier and, for `--tier s3`, the bucket below it."""

    root: Path
    bucket: buckets.Bucket | None = None

    @property
    def words(self) -> str:
        """Where the second engine finds the rows."""
        return "disk" if self.bucket is None else "the bucket"

    def environment(self) -> Mapping[str, str]:
        """What an engine process sees."""
        return os.environ if self.bucket is None else buckets.environment()

    def flip(self, block_hash: bytes) -> dict[str, Any] | None:
        """Invert a byte of a block's row in the lowest tier; `None` where there is no such row."""
        if self.bucket is not None:
            return self.bucket.flip_byte(block_hash)
        row = rows.row_of_block(self.root, block_hash)
        if row is None:
            return None
        return {"file": str(row.path), "offset": rows.flip_byte(row), "group": row.group}

    def wipe(self) -> int:
        """Remove the local tiers where a bucket lies below; returns how many row files there were.

        As if the second engine ran on another machine: all it can find is in the bucket.
        """
        if self.bucket is None:
            return 0
        files = len(list(self.root.rglob("*.rows")))
        shutil.rmtree(self.root)
        self.root.mkdir(mode=0o700)
        return files
