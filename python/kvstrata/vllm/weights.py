"""What the weights are: an identity that changes when they do, as far as that is cheap.

* dummy weights: the fact that they are dummies, the seed, and the torch release that draws them;
* a directory: name, size and digest of every weight file. The files' whole content where they hold
  at most :data:`WHOLE_BYTES_MAX` together; else the head of each file (a safetensors header lies
  there), samples spread evenly over it and its modification time;
* a hub name: the commit the configuration was resolved to.

Anything else has no identity here, and the tier then needs `model_identity` from the user.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")
WHOLE_BYTES_MAX = 1 << 30
HEAD_BYTES = 1 << 20
SAMPLE_BYTES = 64 << 10
SAMPLES = 64
# Loaders that read the checkpoint files as they lie there.
FILE_LOADERS = frozenset(
    {"auto", "hf", "safetensors", "pt", "gguf", "bitsandbytes", "mistral", "fastsafetensors"}
)


def identify(model_config: Any, load_config: Any) -> dict[str, Any] | None:
    """The identity of a model's weights, or `None` where there is none to be had."""
    load_format = _name(getattr(load_config, "load_format", "auto"))
    if load_format == "dummy":
        return {
            "kind": "dummy",
            "seed": getattr(model_config, "seed", None),
            "torch": str(torch.__version__),
        }
    if load_format not in FILE_LOADERS:
        return None
    source = getattr(model_config, "model_weights", None) or model_config.model
    path = Path(source)
    if path.is_file():
        return {"kind": "files", **digest_files([path])}
    if path.is_dir():
        files = [p for p in sorted(path.iterdir()) if p.is_file() and p.suffix in SUFFIXES]
        return {"kind": "files", **digest_files(files)} if files else None
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    if isinstance(commit, str) and commit:
        return {"kind": "commit", "commit": commit}
    return None


def digest_files(files: Iterable[Path], whole_bytes_max: int = WHOLE_BYTES_MAX) -> dict[str, Any]:
    """Digest of files by name, size and content; `how` says whether all of the content went in."""
    listed = list(files)
    sizes = [path.stat().st_size for path in listed]
    whole = sum(sizes) <= whole_bytes_max
    digest = hashlib.sha256()
    for path, size in zip(listed, sizes, strict=True):
        digest.update(f"{path.name}\0{size}\0".encode())
        if whole:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        else:
            _sample(path, size, digest)
    return {
        "how": "content" if whole else "head, samples and modification time",
        "files": len(listed),
        "bytes": sum(sizes),
        "sha256": digest.hexdigest(),
    }


def _sample(path: Path, size: int, digest: Any) -> None:
    digest.update(str(path.stat().st_mtime_ns).encode())
    with path.open("rb") as file:
        digest.update(file.read(HEAD_BYTES))
        for index in range(1, SAMPLES + 1):
            file.seek(max(0, size - SAMPLE_BYTES) * index // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))


def _name(load_format: object) -> str:
    return str(getattr(load_format, "value", load_format)).lower()
