"""`kvstrata ls`: what lies at a root, and why two namespaces differ."""

from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

import kvstrata
from kvstrata.cli import main as entry

if TYPE_CHECKING:
    from pathlib import Path

ROW = 4096
KEY = b"k" * 32 + b"\0\0\0\0"


def open_tier(root: Path, arena: bytearray, **fields: Any) -> kvstrata.Tier:
    manifest = {"model": "m", "a": 1, "deep": {"list": [1, 2], "text": "x"}, **fields}
    return kvstrata.open_tier(
        root, manifest=manifest, row_bytes=ROW, arena=arena, capacity="8MiB", min_free=0
    )


def store(root: Path, **fields: Any) -> str:
    """One row in a namespace of its own; returns the name of its directory."""
    before = {path.name for path in root.iterdir()}
    with open_tier(root, bytearray(b"r" * ROW), **fields) as tier:
        tier.store(1, [KEY], [0])
        (result,) = tier.wait(20)
        assert result.success
    (made,) = {path.name for path in root.iterdir() if path.is_dir()} - before
    return made


def listed(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert entry.main(["ls", f"file://{root}", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_namespaces_are_listed_with_what_they_take_and_strangers_are_named_and_left_alone(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = store(root, tenant="acme", byte_map={"version": 1})
    vllm = root / "org_model_0123456789ab_r0" / "abc"
    vllm.mkdir(parents=True)
    (vllm / "row.bin").write_bytes(b"x" * 10_000)
    (root / "notes.txt").write_text("mine")
    found = listed(root, capsys)
    (namespace,) = found["namespaces"]
    assert namespace["name"] == name
    assert namespace["model"] == "m"
    assert namespace["tenant"] == "acme"
    assert namespace["proven"] is True
    assert namespace["epoch"] == 1
    assert namespace["files"] == 1
    assert namespace["bytes"] >= 2 * ROW
    assert namespace["problem"] is None
    assert namespace["digest"].startswith(name.rpartition("-")[2])
    assert [(item["name"], item["kind"]) for item in found["others"]] == [
        ("notes.txt", "other"),
        ("org_model_0123456789ab_r0", "vllm file tier"),
    ]
    assert found["others"][1]["bytes"] >= 10_000
    assert (vllm / "row.bin").read_bytes() == b"x" * 10_000


def test_a_table_names_each_namespace(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = store(root)
    (root / "other").mkdir()
    assert entry.main(["ls", str(root)]) == 0
    head, row, _, _, other = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "namespace"
    assert row.startswith(name)
    assert row.split()[-1] == "unproved"
    assert other.startswith("other")


def test_the_difference_of_two_namespaces_is_the_field_and_both_values(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = store(root), store(root, deep={"list": [1, 3], "text": "x"}, more=None)
    for arguments in (
        ["ls", "--diff", str(root / first), str(root / second / "namespace.json")],
        ["ls", str(root), "--diff", first, second.rpartition("-")[2][:12]],
    ):
        assert entry.main(arguments) == 1
        assert capsys.readouterr().out.splitlines() == [
            "deep.list.1: 2 -> 3",
            "more: (absent) -> null",
        ]
    assert entry.main(["ls", "--json", "--diff", str(root / first), str(root / second)]) == 1
    assert json.loads(capsys.readouterr().out)[0] == {"field": "deep.list.1", "a": 2, "b": 3}
    assert entry.main(["ls", "--diff", str(root / first), str(root / first)]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"digest":"', "was cut or edited"),
        ("[1]", "holds no manifest"),
        ('{"digest":"00","manifest":{"model":"m"}}', "was edited"),
        ('{"digest":"00","manifest":{"model":7}}', "model"),
        ("[" * 100_000, "was cut or edited"),
    ],
)
def test_a_namespace_that_was_edited_is_listed_with_its_problem(
    root: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    name = store(root)
    (root / name / "namespace.json").write_text(text)
    (namespace,) = listed(root, capsys)["namespaces"]
    assert problem in namespace["problem"]
    assert entry.main(["ls", "--diff", str(root / name), str(root / name)]) == 2
    assert problem in capsys.readouterr().err


def test_a_directory_named_for_another_manifest_is_a_problem(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = store(root), store(root, a=2)
    (root / first / "namespace.json").write_bytes((root / second / "namespace.json").read_bytes())
    problems = [item["problem"] for item in listed(root, capsys)["namespaces"]]
    assert sum("another digest" in (problem or "") for problem in problems) == 1


def test_links_are_neither_followed_nor_counted(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = store(root)
    before = listed(root, capsys)["namespaces"][0]["bytes"]
    big = tmp_path / "big"
    big.write_bytes(b"x" * (1 << 20))
    (root / name / "rows" / "link.rows").symlink_to(big)
    manifest = root / name / "namespace.json"
    moved = tmp_path / "moved.json"
    manifest.rename(moved)
    manifest.symlink_to(moved)
    (namespace,) = listed(root, capsys)["namespaces"]
    assert namespace["bytes"] <= before
    assert namespace["files"] == 1
    assert "no plain file" in namespace["problem"]


def test_what_cannot_be_listed_ends_with_status_two(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for url in (str(root / "absent"), "s3://bucket", f"file://host{root}", "file://kv", ""):
        arguments = ["ls", url]
        assert entry.main(arguments) == 2
        assert capsys.readouterr().err.startswith("kvstrata ls: ")
    for url, told in (
        ("~/kv", "'~/kv': ~ is expanded by the shell alone; write the whole path"),
        ("file:/kv", "'file:/kv': a URL has two slashes after its scheme"),
        ("s3://bucket", "kvstrata gc URL --capacity SIZE --dry-run"),
    ):
        assert entry.main(["ls", url]) == 2
        assert told in capsys.readouterr().err
    assert entry.main(["ls", str(root), "--diff", "m", "n"]) == 2
    assert "stands for 0" in capsys.readouterr().err
    assert entry.main(["ls", "--diff", str(root), str(root)]) == 2
    told = capsys.readouterr().err
    assert f"{root} is no namespace: it has no namespace.json; `kvstrata ls {root}`" in told
    assert entry.main(["ls", "--diff", str(root / "absent"), str(root)]) == 2
    assert capsys.readouterr().err == f"kvstrata ls: {root / 'absent'} is not there\n"
    with pytest.raises(SystemExit) as ended:
        entry.main(["ls"])
    assert ended.value.code == 2


def test_a_root_of_another_user_is_told_to_be_so(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("kvstrata.cli.ls.inventory.os.scandir", refuse)
    assert entry.main(["ls", str(root)]) == 2
    assert capsys.readouterr().err == (
        f"kvstrata ls: {root} cannot be read: Permission denied; run this as its owner, "
        f"uid {os.geteuid()}, or as root\n"
    )


def test_a_directory_in_a_root_is_no_root_and_the_root_is_named(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = root / store(root)
    capacity = ["--capacity", "0"]
    rows = list(root.rglob("*.rows"))
    assert rows
    monkeypatch.chdir(namespace)
    for url in (str(namespace), f"file://{namespace}/rows", ".", "rows/g0"):
        for command in (["ls", url], ["ls", url, "--diff", "m", "n"], ["gc", url, *capacity]):
            assert entry.main(command) == 2, command
            told = capsys.readouterr().err
            assert f" lies in the root {root} (which has a kvstrata.lock); name {root}" in told
    moved = root.parent / "moved"
    namespace.rename(moved)
    for command in (["ls", str(moved)], ["gc", str(moved), *capacity]):
        assert entry.main(command) == 2, command
        assert f"{moved} is the directory of a namespace" in capsys.readouterr().err
    assert len(list(moved.rglob("*.rows"))) == len(rows)


def test_a_url_names_the_directory_that_a_tier_would_open(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = root / "a%20b?c#d"
    odd.mkdir(mode=0o700)
    with kvstrata.open_tier(
        f"file://{odd}",
        manifest={"model": "m"},
        row_bytes=ROW,
        arena=bytearray(ROW),
        capacity="8MiB",
        min_free=0,
    ):
        assert len(listed(odd, capsys)["namespaces"]) == 1


def test_a_running_tier_is_listed_and_not_disturbed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arena = bytearray(b"r" * ROW)
    with open_tier(root, arena) as tier:
        tier.store(1, [KEY], [0])
        assert tier.wait(20)[0].success
        assert len(listed(root, capsys)["namespaces"]) == 1
        assert tier.lookup([KEY]) == [True]
