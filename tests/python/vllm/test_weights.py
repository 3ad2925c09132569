"""What the weights are: by their content, read once; by a hub's names; by what the user says."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plugin_support.models import make_model, vllm_config

import kvstrata
from kvstrata.vllm import digests, weights

pytestmark = pytest.mark.skipif(
    not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built"
)

LATER = 10**18 * 4
# blake3 of b"abc", as its authors publish it.
ABC = "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_model(tmp_path / "my-model")


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Digests of files of any size are remembered here."""
    monkeypatch.setattr(digests, "REMEMBERED_BYTES_MIN", 1)
    return tmp_path / "memory"


def identify(model_dir: Path | str, load_format: str = "auto", **options: Any) -> Any:
    config = vllm_config(Path(model_dir), load_format=load_format)
    config.model_config.model = str(model_dir)
    return weights.identify(config.model_config, config.load_config, options)


def digest(path: Path, memory: Path, now: int = LATER) -> str:
    return digests.file_digest(path, memory, clock=lambda: now)


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The digests that were computed, not remembered."""
    computed: list[str] = []
    real = kvstrata.Fingerprint

    class Counting:
        def __init__(self) -> None:
            self.made = real()

        def update(self, data: bytes) -> None:
            self.made.update(data)

        def hexdigest(self) -> str:
            computed.append(self.made.hexdigest())
            return computed[-1]

    monkeypatch.setattr(kvstrata, "Fingerprint", Counting)
    return computed


def test_a_digest_is_blake3s(tmp_path: Path, memory: Path) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(b"abc")
    assert digest(path, memory) == ABC


def test_a_file_is_read_once_while_its_inode_size_and_times_are_the_same(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = reads(monkeypatch)
    path = tmp_path / "w.bin"
    path.write_bytes(b"abc")
    assert digest(path, memory) == digest(path, memory) == ABC
    assert len(computed) == 1
    link = tmp_path / "link.bin"
    link.symlink_to(path)
    assert digest(link, memory) == ABC
    assert len(computed) == 1


def test_changed_content_is_noticed_though_size_and_modification_time_are_put_back(
    tmp_path: Path, memory: Path
) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(b"abc")
    before = path.stat()
    assert digest(path, memory) == ABC
    path.write_bytes(b"xyz")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert digest(path, memory) != ABC


def test_another_file_in_the_same_place_is_read(tmp_path: Path, memory: Path) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(b"abc")
    assert digest(path, memory) == ABC
    fresh = tmp_path / "fresh"
    fresh.write_bytes(b"xyz")
    fresh.replace(path)
    assert digest(path, memory) != ABC


def test_a_file_changed_just_now_is_not_remembered(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = reads(monkeypatch)
    path = tmp_path / "w.bin"
    path.write_bytes(b"abc")
    now = path.stat().st_ctime_ns + 50 * 10**9
    digest(path, memory, now)
    digest(path, memory, now)
    assert len(computed) == 2


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"stamp":{},"blake3":"00"}', json.dumps({"stamp": None, "blake3": ABC})],
)
def test_a_spoilt_memory_is_read_over(tmp_path: Path, memory: Path, text: str) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(b"abc")
    digest(path, memory)
    (entry,) = memory.iterdir()
    entry.write_text(text)
    assert digest(path, memory) == ABC


def test_a_memory_that_others_may_write_to_is_not_believed(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = reads(monkeypatch)
    path = tmp_path / "w.bin"
    path.write_bytes(b"abc")
    memory.mkdir(mode=0o777)
    memory.chmod(0o777)
    digest(path, memory)
    digest(path, memory)
    assert len(computed) == 2
    assert not list(memory.iterdir())


def test_a_file_that_changes_while_it_is_read_has_no_digest(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(b"abc")
    real = kvstrata.Fingerprint

    class Slow:
        def __init__(self) -> None:
            self.made = real()

        def update(self, data: bytes) -> None:
            with path.open("ab") as file:
                file.write(b"x")
            self.made.update(data)

    monkeypatch.setattr(kvstrata, "Fingerprint", Slow)
    monkeypatch.setattr(digests, "PIECE_BYTES", 3)
    original = Slow.update

    def once(self: Slow, data: bytes) -> None:
        original(self, data)
        monkeypatch.setattr(Slow, "update", lambda *_: None)

    monkeypatch.setattr(Slow, "update", once)
    with pytest.raises(digests.UnstableFileError, match="changed while it was read"):
        digest(path, memory)


def test_two_models_of_one_name_that_differ_in_one_byte_differ_and_a_readme_does_not_count(
    tmp_path: Path,
) -> None:
    folders = []
    for index in range(2):
        (tmp_path / str(index)).mkdir()
        folders.append(make_model(tmp_path / str(index) / "m"))
    assert identify(folders[0]) == identify(folders[1])
    (folders[1] / "README.md").write_text("other words")
    assert identify(folders[0]) == identify(folders[1])
    file = folders[1] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"v")
    assert identify(folders[0]) != identify(folders[1])
    assert identify(folders[0])["files"]["model.safetensors"]["bytes"] == file.stat().st_size


def snapshot(cache: Path, blob: str) -> Path:
    """A hub cache's folder of one model: files are links to blobs named by their digest."""
    base = cache / "models--org--m"
    (base / "blobs").mkdir(parents=True)
    (base / "blobs" / blob).write_bytes(b"w")
    folder = base / "snapshots" / "c0ffee"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").symlink_to(Path("../../blobs") / blob)
    return folder


def test_a_hub_caches_blob_is_named_by_its_digest_and_read_in_samples_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = reads(monkeypatch)
    folder = snapshot(tmp_path / "hub", "ab" * 32)
    found = identify(folder)
    samples = hashlib.sha256(b"w" * 65).hexdigest()
    expected = {"bytes": 1, "sha256": "ab" * 32, "samples": samples}
    assert found["files"]["model.safetensors"] == expected
    config = vllm_config(folder, hf={"_commit_hash": "c0ffee"})
    config.model_config.model = "org/m"
    config.load_config.download_dir = str(tmp_path / "hub")
    assert weights.identify(config.model_config, config.load_config) == found
    assert not computed


def test_a_blob_that_was_written_through_its_link_is_another(tmp_path: Path) -> None:
    folder = snapshot(tmp_path / "hub", "ab" * 32)
    before = identify(folder)
    (folder / "model.safetensors").write_bytes(b"v")
    assert (folder / "model.safetensors").is_symlink()
    assert identify(folder) != before


def test_a_blob_that_is_not_named_by_a_sha256_is_read(tmp_path: Path) -> None:
    folder = snapshot(tmp_path / "hub", "ab" * 20)
    assert set(identify(folder)["files"]["model.safetensors"]) == {"bytes", "blake3"}


def test_a_hub_name_without_files_here_is_named_by_its_commit_or_not_at_all(
    tmp_path: Path,
) -> None:
    config = vllm_config(tmp_path, hf={"_commit_hash": "c0ffee"})
    config.model_config.model = "org/m"
    config.load_config.download_dir = str(tmp_path)
    named = weights.identify(config.model_config, config.load_config)
    loading = {"format": "auto", "ignore": None, "extra": {}}
    assert named == {"kind": "commit", "commit": "c0ffee", "loading": loading}
    assert identify("org/unknown") is None


def test_what_the_user_says_overrides_and_nothing_is_read(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = reads(monkeypatch)
    assert identify(model_dir, weights_id="r7") == {"kind": "named", "id": "r7"}
    assert not computed


def test_dummies_are_named_by_what_draws_them(model_dir: Path) -> None:
    config = vllm_config(model_dir, load_format="dummy", model={"seed": 3})
    found = weights.identify(config.model_config, config.load_config)
    assert found is not None
    assert (found["kind"], found["seed"]) == ("dummy", 3)


def test_dummies_of_several_ranks_are_others_because_each_draws_its_own_part(
    model_dir: Path,
) -> None:
    config = vllm_config(model_dir, load_format="dummy")
    drawn = [
        weights.identify(config.model_config, config.load_config, ranks=ranks) for ranks in (1, 2)
    ]
    assert drawn[0] != drawn[1]


def test_quantised_dummies_have_no_identity_because_nobody_draws_them(model_dir: Path) -> None:
    config = vllm_config(model_dir, load_format="dummy", model={"quantization": "awq"})
    assert weights.identify(config.model_config, config.load_config) is None


def test_which_of_the_files_a_loader_reads_is_part_of_the_identity(model_dir: Path) -> None:
    config = vllm_config(model_dir)
    config.load_config.ignore_patterns = ["model-2*"]
    found = [
        identify(model_dir),
        identify(model_dir, load_format="pt"),
        weights.identify(config.model_config, config.load_config),
    ]
    assert found[0] != found[1]
    assert found[0] != found[2]
    assert all(one is not None and one["kind"] == "files" for one in found)


@pytest.mark.parametrize(
    "name",
    [
        "preprocessor_config.json",
        "quantize_config.json",
        "model.safetensors.index.json",
        "modeling_own.py",
    ],
)
def test_files_that_say_how_weights_and_inputs_are_used_count(model_dir: Path, name: str) -> None:
    config = vllm_config(model_dir)
    found = []
    for text in ("{}", "{ }"):
        (model_dir / name).write_text(text)
        found.append(weights.beside(config.model_config, config.load_config))
    assert found[0] != found[1]
    assert set(found[0]) == {name}


@pytest.mark.parametrize(
    "name", ["README.md", "config.json", "generation_config.json", "tokenizer_config.json"]
)
def test_files_that_change_no_byte_do_not_count(model_dir: Path, name: str) -> None:
    config = vllm_config(model_dir)
    (model_dir / name).write_text("{}")
    assert weights.beside(config.model_config, config.load_config) == {}


def test_a_file_in_memory_is_read_each_time_because_a_mapping_does_not_touch_its_times(
    memory: Path,
) -> None:
    if not digests.UNTIMED & _kinds_of_mounts("/dev/shm"):
        pytest.skip("/dev/shm is not in memory")
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        path = Path(file.name)
        path.write_bytes(b"xyz")
        with path.open("r+b") as opened, mmap.mmap(opened.fileno(), 3) as mapped:
            mapped[:] = b"abc"
            before = path.stat()
            assert digest(path, memory) == ABC
            mapped[:] = b"xyz"
            after = path.stat()
            assert digest(path, memory) != ABC
        assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)


def _kinds_of_mounts(place: str) -> set[str]:
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    return {line.split()[2] for line in lines if line.split()[1] == place}


def test_a_loader_that_does_not_read_files_has_no_identity(model_dir: Path) -> None:
    assert identify(model_dir, load_format="tensorizer") is None


def test_samples_are_taken_only_where_they_are_asked_for_and_are_private_to_the_host(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert identify(model_dir)["kind"] == "files"
    found = identify(model_dir, weights_sampling=True)
    assert found["kind"] == "sampled"
    assert found == identify(model_dir, weights_sampling=True)
    monkeypatch.setattr(weights, "host_identity", lambda: "another")
    assert identify(model_dir, weights_sampling=True)["host"] == "another"


def test_the_memory_lies_under_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert digests.default_memory() == Path("/c/kvstrata/weights")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: Path("/h"))
    assert digests.default_memory() == Path("/h/.cache/kvstrata/weights")


def test_a_draft_model_is_not_named_by_the_targets_id(model_dir: Path) -> None:
    from kvstrata.vllm import facts

    draft = vllm_config(model_dir).model_config
    config = vllm_config(
        model_dir,
        extra={"weights_id": "r7"},
        speculative=SimpleNamespace(method="eagle", draft_model_config=draft),
    )
    options = facts._options(config)
    found = facts._draft(config, options)
    assert found is not None
    assert found["weights"]["kind"] == "files"
