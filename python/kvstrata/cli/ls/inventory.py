"""Reads a root without opening it: namespaces, other caches' directories, and how much they take.

Nothing is locked, changed or followed through a link, so a running server is not disturbed. Row
counts are not here: they are in the row tables, which the server is writing.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvstrata
from kvstrata import places

if TYPE_CHECKING:
    from collections.abc import Iterator

MANIFEST_NAME = "namespace.json"
LOCK_NAME = "kvstrata.lock"
# A block as stat counts them.
_BLOCK_BYTES = 512
_MANIFEST_BYTES_MAX = 1 << 20
_NAMESPACE = re.compile(r".+-([0-9a-f]{32})")
# vLLM's file tier: <model>_<12 digits>, and the rows of a rank beside it in ..._r<rank>.
_VLLM = re.compile(r".+_[0-9a-f]{12}(_r[0-9]+)?")


class UnreadableError(Exception):
    """Something that should be a root or a namespace cannot be read as one; in one line."""


@dataclass(frozen=True)
class Namespace:
    """One namespace. `problem` is why it could not be used; `bytes` what it takes on disk."""

    name: str
    model: str | None
    digest: str | None
    tenant: str | None
    proven: bool | None
    epoch: int | None
    files: int
    bytes: int
    problem: str | None
    manifest: dict[str, Any] | None = field(repr=False)


@dataclass(frozen=True)
class Other:
    """Something at the root that is not ours: left alone, listed so that nobody wonders."""

    name: str
    kind: str
    bytes: int


@dataclass(frozen=True)
class Inventory:
    """All that lies at a root."""

    root: str
    namespaces: list[Namespace]
    others: list[Other]

    def as_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return asdict(self)


def root_of(url: str) -> Path:
    """The directory of a URL or path, by the rules of `open_tier`: nothing is unquoted.

    # Errors
    :class:`UnreadableError` where it is no directory here, and for one that lies in a root.
    """
    try:
        path = places.directory(url)
    except ValueError as error:
        raise UnreadableError(str(error)) from error
    if not path.is_dir():
        msg = places.doubt(url) or f"{path} is not a directory"
        raise UnreadableError(msg)
    for outer in path.resolve().parents:
        if (outer / LOCK_NAME).is_file():
            msg = f"{path} lies in the root {outer} (which has a {LOCK_NAME}); name {outer}"
            raise UnreadableError(msg)
    if (path / MANIFEST_NAME).is_file():
        msg = f"{path} is the directory of a namespace (it has a {MANIFEST_NAME}), not a root"
        raise UnreadableError(msg)
    return path


def take(root: Path) -> Inventory:
    """List a root.

    # Errors
    :class:`UnreadableError` where it cannot be read.
    """
    namespaces, others = [], []
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError as error:
        raise UnreadableError(places.unusable(root, error)) from error
    for entry in entries:
        if entry.name == LOCK_NAME:
            continue
        is_directory = entry.is_dir(follow_symlinks=False)
        if is_directory and _NAMESPACE.fullmatch(entry.name):
            namespaces.append(_namespace(Path(entry.path)))
        else:
            of_vllm = is_directory and _VLLM.fullmatch(entry.name)
            kind = "vllm file tier" if of_vllm else "other"
            others.append(Other(entry.name, kind, _allocated(Path(entry.path))))
    return Inventory(str(root), namespaces, others)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a namespace's directory, or of a `namespace.json` itself.

    # Errors
    :class:`UnreadableError` where it is not there, was edited or cut.
    """
    file = path / MANIFEST_NAME if path.is_dir() else path
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            msg = f"{file} is no plain file"
            raise UnreadableError(msg)
        with file.open("rb") as opened:
            text = opened.read(_MANIFEST_BYTES_MAX + 1)
        stored = json.loads(text) if len(text) <= _MANIFEST_BYTES_MAX else None
    except FileNotFoundError as error:
        msg = f"{path} is not there"
        if file != path:
            msg = (
                f"{path} is no namespace: it has no {MANIFEST_NAME}; "
                f"`kvstrata ls {path}` lists those in it"
            )
        raise UnreadableError(msg) from error
    except OSError as error:
        msg = places.unusable(file, error)
        raise UnreadableError(msg) from error
    except (ValueError, RecursionError) as error:
        msg = f"{file} was cut or edited: {error}"
        raise UnreadableError(msg) from error
    manifest = stored.get("manifest") if isinstance(stored, dict) else None
    if not isinstance(stored, dict) or not isinstance(manifest, dict):
        msg = f"{file} holds no manifest"
        raise UnreadableError(msg)
    try:
        digest = kvstrata.manifest_digest(manifest)
    except kvstrata.ConfigError as error:
        msg = f"{file}: {error}"
        raise UnreadableError(msg) from error
    if stored.get("digest") != digest:
        msg = f"{file} was edited: its digest is that of another manifest"
        raise UnreadableError(msg)
    return manifest


def _namespace(path: Path) -> Namespace:
    problem = digest = manifest = None
    try:
        manifest = read_manifest(path)
        digest = kvstrata.manifest_digest(manifest)
    except UnreadableError as error:
        problem = str(error)
    else:
        if not path.name.endswith(f"-{digest[:32]}"):
            problem = f"the directory is named for another digest than {digest[:32]}"
    known = manifest or {}
    tenant = known.get("tenant")
    return Namespace(
        name=path.name,
        model=str(known["model"]) if "model" in known else None,
        digest=digest,
        tenant=tenant if isinstance(tenant, str) else None,
        proven=isinstance(known.get("byte_map"), dict) if known else None,
        epoch=_epoch(path / "epochs"),
        files=sum(1 for found in _files(path) if found.name.endswith(".rows")),
        bytes=_allocated(path),
        problem=problem,
        manifest=manifest,
    )


def _epoch(path: Path) -> int | None:
    try:
        names = [found.name for found in path.iterdir()]
    except OSError:
        return None
    return max((int(name) for name in names if re.fullmatch(r"[0-9]{10}", name)), default=None)


def _files(path: Path) -> Iterator[os.DirEntry[str]]:
    """Every plain file below a directory; links are not followed, what vanishes is skipped."""
    try:
        entries = list(os.scandir(path))
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield entry


def _allocated(path: Path) -> int:
    total = 0
    try:
        status = path.lstat()
    except OSError:
        return 0
    if not stat.S_ISDIR(status.st_mode):
        return status.st_blocks * _BLOCK_BYTES
    for entry in _files(path):
        try:
            total += entry.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES
        except OSError:
            continue
    return total
