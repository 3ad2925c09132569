"""What the weights are: an identity that changes when they do.

In this order:

* `weights_id` of ``kv_connector_extra_config``, where the user gives one: nothing is read;
* dummy weights: that they are dummies, the seed, the torch release that draws them and the number
  of ranks, each of which draws its own part (the shape of the model is a fact of its own). Where
  they are quantised they have no identity: vLLM leaves whole numbers as memory happens to be;
* weight files: each one's size and digest, and what chooses among them. In a hub cache a file is a
  link to a blob that is named by the SHA-256 of its content, and that name is taken, with samples
  of the content; any other file is read once
  (:mod:`kvstrata.vllm.digests`). With ``weights_sampling`` files are only sampled, and the
  namespace is then private to this host, because equal samples are no proof;
* a hub name whose files are not found here: the commit it was resolved to.

Anything else has no identity here, and the tier then needs `model_identity` or `weights_id`.
"""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvstrata.vllm import digests, modelconfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ID_OPTION = "weights_id"
SAMPLING_OPTION = "weights_sampling"
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")
# Files with a model's configuration that may say how its weights and inputs are used.
BESIDE_SUFFIXES = (".json", ".py", ".yaml", ".yml")
# The configuration is read field by field; the others belong to the tokeniser and to generation.
NOT_BESIDE = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    }
)
HEAD_BYTES = 1 << 20
SAMPLE_BYTES = 64 << 10
SAMPLES = 64
# Loaders that read the checkpoint files as they lie there.
FILE_LOADERS = frozenset(
    {"auto", "hf", "safetensors", "pt", "gguf", "bitsandbytes", "mistral", "fastsafetensors"}
)
_SHA256_DIGITS = 64


def identify(
    model_config: Any,
    load_config: Any,
    options: Mapping[str, Any] | None = None,
    *,
    ranks: int = 1,
) -> dict[str, Any] | None:
    """The identity of a model's weights, or `None` where there is none to be had.

    `ranks` share the weights: dummies are drawn by each rank in the shape of its own part.

    # Errors
    `OSError` or :class:`kvstrata.vllm.digests.UnstableFileError` where a file cannot be read.
    """
    given = options or {}
    if given.get(ID_OPTION):
        return {"kind": "named", "id": given[ID_OPTION]}
    load_format = _name(getattr(load_config, "load_format", "auto"))
    if load_format == "dummy":
        return _dummies(model_config, ranks)
    if load_format not in FILE_LOADERS:
        return None
    files = _weight_files(model_config, load_config)
    loading = _loading(load_config, load_format)
    if files and given.get(SAMPLING_OPTION):
        return sampled(files) | {"loading": loading}
    if files:
        described = {path.name: describe(path) for path in files}
        return {"kind": "files", "files": described, "loading": loading}
    commit = commit_of(model_config)
    return {"kind": "commit", "commit": commit, "loading": loading} if commit else None


def _dummies(model_config: Any, ranks: int) -> dict[str, Any] | None:
    if getattr(model_config, "quantization", None) is not None:
        return None
    return {
        "kind": "dummy",
        "seed": getattr(model_config, "seed", None),
        "torch": str(torch.__version__),
        "ranks": ranks,
    }


def beside(model_config: Any, load_config: Any) -> dict[str, str]:
    """Digests of the small files that lie with a model's configuration, by name.

    Among them are the image processor's settings, code of the model's own, the quantisation's
    settings and the index that chooses among weight files. What is known to change no KV byte is
    left out.
    """
    folder = _folder(str(model_config.model), model_config, load_config)
    if folder is None:
        return {}
    return {
        path.name: digests.file_digest(path)
        for path in sorted(folder.iterdir())
        if path.suffix in BESIDE_SUFFIXES and path.name not in NOT_BESIDE and path.is_file()
    }


def _loading(load_config: Any, load_format: str) -> dict[str, Any]:
    """What chooses among the files that are there: a loader reads some of them."""
    return {
        "format": load_format,
        "ignore": modelconfig.plain(getattr(load_config, "ignore_patterns", None)),
        "extra": modelconfig.plain(getattr(load_config, "model_loader_extra_config", None) or {}),
    }


def commit_of(model_config: Any) -> str | None:
    """The commit that a hub name was resolved to, where vLLM knows it."""
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    return commit if isinstance(commit, str) and commit else None


def _weight_files(model_config: Any, load_config: Any) -> list[Path]:
    source = getattr(model_config, "model_weights", None) or model_config.model
    path = Path(source)
    if path.is_file():
        return [path]
    folder = _folder(str(source), model_config, load_config)
    if folder is None:
        return []
    return [p for p in sorted(folder.iterdir()) if p.is_file() and p.suffix in SUFFIXES]


def _folder(source: str, model_config: Any, load_config: Any) -> Path | None:
    """Where the files of a model lie, if they lie here."""
    path = Path(source)
    return path if path.is_dir() else _snapshot(source, commit_of(model_config), load_config)


def _snapshot(model: str, commit: str | None, load_config: Any) -> Path | None:
    """The folder of a hub cache that holds a model's files at a commit."""
    if commit is None:
        return None
    base = getattr(load_config, "download_dir", None)
    if base is None:
        try:
            from huggingface_hub.constants import HF_HUB_CACHE
        except ImportError:
            return None
        base = HF_HUB_CACHE
    folder = Path(base) / f"models--{model.replace('/', '--')}" / "snapshots" / commit
    return folder if folder.is_dir() else None


def describe(path: Path) -> dict[str, Any]:
    """Size and digest of one weight file. A hub cache's blob is named by its digest.

    Whoever writes through the link changes the blob and not its name: samples tell most of that.
    """
    blob = path.resolve()
    size = blob.stat().st_size
    if path.is_symlink() and blob.parent.name == "blobs" and _is_sha256(blob.name):
        samples = hashlib.sha256()
        _sample(blob, size, samples)
        return {"bytes": size, "sha256": blob.name, "samples": samples.hexdigest()}
    return {"bytes": size, "blake3": digests.file_digest(path)}


def _is_sha256(name: str) -> bool:
    return len(name) == _SHA256_DIGITS and set(name) <= set("0123456789abcdef")


def sampled(files: Iterable[Path]) -> dict[str, Any]:
    """Sizes, times, heads (a safetensors header lies there) and samples; private to this host."""
    listed = list(files)
    digest = hashlib.sha256()
    for path in listed:
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        _sample(path, status.st_size, digest)
    return {
        "kind": "sampled",
        "host": host_identity(),
        "files": len(listed),
        "samples": digest.hexdigest(),
    }


def host_identity() -> str:
    """A name of this host that outlives restarts, as a digest."""
    try:
        name = Path("/etc/machine-id").read_text(encoding="utf-8").strip()
    except OSError:
        name = ""
    return hashlib.sha256((name or socket.gethostname()).encode()).hexdigest()[:32]


def _sample(path: Path, size: int, digest: Any) -> None:
    with path.open("rb") as file:
        digest.update(file.read(HEAD_BYTES))
        for index in range(1, SAMPLES + 1):
            file.seek(max(0, size - SAMPLE_BYTES) * index // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))


def _name(load_format: object) -> str:
    return str(getattr(load_format, "value", load_format)).lower()
