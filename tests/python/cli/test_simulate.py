"""`kvstrata simulate`: traces replayed against policies and sizes."""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstrata.cli import main as entry
from kvstrata.cli.simulate import capacity, command
from kvstrata.cli.simulate import trace as trace_file

if TYPE_CHECKING:
    from collections.abc import Sequence

TRACES = Path(__file__).resolve().parents[3] / "benches" / "traces"
HEADER = {"format": "kvtrace-ranges-1", "name": "small", "block_tokens": 16}


def write(path: Path, requests: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in (HEADER, *requests)))
    return path


def request(t: float, *ranges: int) -> dict[str, Any]:
    return {"t": t, "s": 1, "o": 10, "h": 0, "r": list(ranges)}


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    assert entry.main(["simulate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_lookups_end_at_the_first_block_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Of 4 blocks, 3 stay when the second request has taken 1: the tail has gone, the head is hit.
    trace = write(tmp_path / "t", [request(0, 0, 4), request(1, 9, 1), request(2, 0, 4)])
    (result,) = simulate(capsys, "--trace", trace, "--capacity", "4", "--policy", "lru")
    assert result["trace"] == "small"
    assert result["policy"] == "lru"
    assert result["capacity"] == "4"
    assert (result["requested"], result["hits"], result["written"]) == (9, 3, 6)
    assert result["hit_ratio"] == 3 / 9
    assert result["prefill_tokens_saved"] == 48


def test_the_best_possible_cache_keeps_what_comes_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(
        tmp_path / "t", [request(0, 0, 2), request(1, 5, 3), request(2, 0, 2), request(3, 0, 2)]
    )
    results = simulate(capsys, "--trace", trace, "--capacity", "2", "--policy", "lru,opt")
    assert [result["hits"] for result in results] == [2, 4]


def test_a_gpu_cache_in_front_takes_its_hits_and_a_tier_below_gives_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(tmp_path / "t", [request(0, 0, 6), request(1, 0, 6)])
    sizes = ("--capacity", "4", "--gpu", "2", "--below", "6", "--below-policy", "lru")
    (result,) = simulate(capsys, "--trace", trace, "--policy", "lru", *sizes)
    assert (result["gpu_hits"], result["hits"], result["below_hits"]) == (2, 2, 2)


def test_blocks_that_too_few_requests_had_are_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first prompt comes three times, the others once.
    others = [request(number, 100 + number * 4, 4) for number in range(1, 4)]
    trace = write(tmp_path / "t", [request(0, 0, 4), *others, request(9, 0, 4), request(10, 0, 4)])
    arguments = ("--trace", trace, "--capacity", "100", "--policy", "lru")
    (all_of_it,) = simulate(capsys, *arguments)
    assert (all_of_it["hits"], all_of_it["written"], all_of_it["refused"]) == (8, 16, 0)
    (some,) = simulate(capsys, *arguments, "--store-threshold", "2")
    assert (some["hits"], some["written"], some["refused"]) == (4, 4, 16)


def test_a_small_directory_learns_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [request(number, number * 4, 4) for number in range(100)]
    trace = write(tmp_path / "t", lines)
    arguments = ("--trace", trace, "--capacity", "8", "--policy", "th")
    (large,) = simulate(capsys, *arguments)
    (small,) = simulate(capsys, *arguments, "--directory", "8")
    assert small["policy_bytes"] < large["policy_bytes"]


def test_traces_of_mooncakes_form_are_read_without_their_partial_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 9, 11]},
        {"timestamp": 500, "input_length": 1024, "output_length": 5, "hash_ids": [7, 9]},
    ]
    path = tmp_path / "mooncake.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    (result,) = simulate(capsys, "--trace", path, "--capacity", "100%", "--policy", "th")
    assert (result["trace"], result["requested"], result["hits"]) == ("mooncake", 4, 2)


def test_a_size_in_bytes_needs_the_bytes_of_a_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(tmp_path / "t", [request(0, 0, 6)])
    arguments = ["simulate", "--trace", str(trace), "--policy", "lru", "--capacity", "1MiB"]
    assert entry.main(arguments) == 2
    assert "--block-bytes" in capsys.readouterr().err
    (result,) = simulate(capsys, *arguments[1:], "--block-bytes", "256KiB")
    assert (result["blocks"], result["bytes_written"]) == (4, 4 * 256 * 1024)


@pytest.mark.parametrize("line", ["{", "[]", '{"t": 1}', '{"t": -1, "r": [0, 1]}'])
def test_what_is_not_a_trace_is_named_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    path = tmp_path / "t"
    path.write_text(json.dumps(HEADER) + "\n" + line + "\n")
    assert entry.main(["simulate", "--trace", str(path)]) == 2
    assert "line 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        {"t": 1, "r": [0, 2**62]},
        {"t": 1, "r": [2**63, 2**63 - 1]},
        {"t": 1, "r": [0, 2**19] * 3},
        {"timestamp": 1, "input_length": 2**32 - 1, "hash_ids": [5] * (2**20 + 1)},
    ],
)
def test_a_request_of_more_blocks_than_any_has_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: dict[str, Any]
) -> None:
    path = write(tmp_path / "t", [request(0, 0, 6), line])
    assert entry.main(["simulate", "--trace", str(path)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "line 3 of the trace: a request of" in told
    assert "at most 1048576" in told


def test_ids_at_the_end_of_their_range_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(tmp_path / "t", [request(0, 2**64 - 4, 3), request(1, 2**64 - 4, 3)])
    (result,) = simulate(capsys, "--trace", trace, "--capacity", "3", "--policy", "lru")
    assert (result["requested"], result["hits"]) == (6, 3)


def test_a_small_file_of_very_many_lines_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "_TEXT_MAX", 1 << 20)
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(bytes(1 << 24)))
    assert entry.main(["simulate", "--trace", str(path)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.endswith("GiB of lines")


@pytest.mark.parametrize(
    "wrong",
    [
        ["--capacity", ""],
        ["--policy", ""],
        ["--directory", "-1"],
        ["--store-threshold", "-1"],
        ["--capacity", str(10**30)],
    ],
)
def test_what_cannot_be_simulated_is_an_error_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    path = write(tmp_path / "t", [request(0, 0, 6)])
    assert entry.main(["simulate", "--trace", str(path), *wrong]) == 2
    assert capsys.readouterr().err.startswith("kvstrata simulate: ")


def test_an_unknown_policy_is_refused_with_those_that_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(tmp_path / "t", [request(0, 0, 6)])
    command = ["simulate", "--trace", str(trace), "--policy", "fifo", "--capacity", "3"]
    assert entry.main(command) == 2
    assert "arc_vllm, lru, s3fifo, th" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            ["--policy", "lru,fifo"],
            'policy "fifo" is not known; one of arc_vllm, lru, s3fifo, th is expected, or opt',
        ),
        (["--capacity", "3,1%"], "--capacity '1%' is less than one block of the trace's 6"),
        (["--capacity", str(10**30)], "--capacity '1000000000000000000000000000000' is more"),
        (["--gpu", "0"], "--gpu '0' is less than one block"),
        (["--below", "x"], "--below 'x' is not a size"),
        (["--block-bytes", "5%"], "--block-bytes '5%' is a share"),
        (["--theta", "2"], "--theta is 2.0; a probability from 0 to 1"),
        (["--theta", "nan"], "--theta is nan; a probability from 0 to 1"),
        (["--below", "3", "--below-theta", "-1"], "--below-theta is -1.0; a probability"),
        (["--below-theta", "0.1"], "--below-theta is of the tier below: --below SIZE is needed"),
        (["--below-policy", "lru"], "--below-policy is of the tier below"),
        (["--store-threshold", "-1"], "--store-threshold is -1; 0 to 4294967295"),
        (["--directory", "0"], "--directory is 0; 1 to "),
        (["--directory", str(10**30)], "--directory is 1000000000000000000000000000000; 1 to "),
    ],
)
def test_a_refusal_names_the_option_before_anything_is_replayed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wrong: list[str],
    told: str,
) -> None:
    monkeypatch.setattr(command, "_one", lambda *_: pytest.fail("replayed"))
    path = write(tmp_path / "t", [request(0, 0, 6)])
    usual = [] if "--capacity" in wrong else ["--capacity", "3"]
    assert entry.main(["simulate", "--trace", str(path), *usual, *wrong]) == 2
    assert capsys.readouterr().err.startswith(f"kvstrata simulate: {told}")


def test_a_trace_that_is_not_there_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none"
    assert entry.main(["simulate", "--trace", str(path)]) == 2
    assert capsys.readouterr().err == f"kvstrata simulate: {path}: No such file or directory\n"


def test_a_picture_for_no_directory_is_refused_before_anything_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "absent" / "x.svg"
    assert entry.main(["simulate", "--trace", "none", "--plot", str(picture)]) == 2
    assert capsys.readouterr().err.endswith(f"there is no directory {picture.parent}\n")


def test_curves_are_drawn_as_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "t", [request(0, 0, 6), request(1, 0, 6)])
    picture = tmp_path / "curves.svg"
    simulate(capsys, "--trace", trace, "--capacity", "2,6", "--policy", "lru", "--plot", picture)
    assert picture.read_text().startswith("<svg ")
    assert picture.read_text().count("<circle") == 2


def test_curves_are_drawn_as_an_image_of_several_colours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("PIL.Image")
    trace = write(
        tmp_path / "t", [request(0, 0, 2), request(1, 5, 3), request(2, 0, 2), request(3, 0, 2)]
    )
    picture = tmp_path / "curves.png"
    options = ("--capacity", "2,6", "--policy", "lru,opt", "--plot", picture)
    simulate(capsys, "--trace", trace, *options)
    with image.open(picture) as read:
        assert read.format == "PNG"
        read.load()
        pixels = read.convert("RGB")
        assert pixels.size == (1440, 880)
        count = {colour: many for many, colour in pixels.getcolors(1 << 20)}
    # The ground, a line of the grid, and the two curves.
    for colour in ((255, 255, 255), (0xDD, 0xDD, 0xDD), (0x1B, 0x6C, 0xA8), (0xC8, 0x55, 0x3D)):
        assert count.get(colour, 0) > 10, colour


def test_a_picture_of_another_form_is_refused_before_anything_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["simulate", "--trace", str(tmp_path / "none"), "--plot", str(tmp_path / "x.gif")]
    assert entry.main(command) == 2
    assert capsys.readouterr().err.endswith("a picture's name ends with .svg or .png\n")


def test_a_png_without_pillow_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    command = ["simulate", "--trace", str(tmp_path / "none"), "--plot", str(tmp_path / "x.png")]
    assert entry.main(command) == 2
    assert "pip install pillow" in capsys.readouterr().err


def test_the_help_states_the_default_of_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    subparsers = argparse.ArgumentParser().add_subparsers()
    command.add_parser(subparsers)
    _, *options = subparsers.choices["simulate"]._actions
    assert len(options) > 10
    for option in options:
        assert re.search(r"\([^()]+\)$", option.help or ""), option.dest
    with pytest.raises(SystemExit):
        entry.main(["simulate", "--help"])
    assert "1%,2%,5%,10%,25%)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "blocks"),
    [("5%", 50), ("12", 12), ("1MiB", 16), ("0.5MiB", 8), ("64kib", 1), ("1M", 16)],
)
def test_sizes_are_read(text: str, blocks: int) -> None:
    assert capacity.blocks(text, 1000, 65536) == blocks


@pytest.mark.parametrize("text", ["", "x", "-1", "5 %%", "3 furlongs", "0", "0.01%"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"capacity|size"):
        capacity.blocks(text, 1000, 65536)


def test_th_keeps_its_lead_over_lru_on_the_chat_trace(capsys: pytest.CaptureFixture[str]) -> None:
    results = simulate(capsys, "--trace", TRACES / "mc_conv.jsonl.gz", "--policy", "th,lru")
    ratios = {(result["policy"], result["capacity"]): result["hit_ratio"] for result in results}
    lru = [round(ratios["lru", size], 4) for size in ("1%", "2%", "5%", "10%", "25%")]
    assert lru == [0.0544, 0.0801, 0.2022, 0.2882, 0.3683]
    least = {"1%": 1.75, "2%": 1.75, "5%": 1.14, "10%": 1.05, "25%": 0.997}
    for size, ratio in least.items():
        assert ratios["th", size] >= ratio * ratios["lru", size], size


@pytest.mark.timeout(300)
def test_th_keeps_its_lead_over_lru_on_the_agents_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = simulate(capsys, "--trace", TRACES / "cc6a.jsonl.gz", "--policy", "th,lru")
    ratios = {(result["policy"], result["capacity"]): result["hit_ratio"] for result in results}
    least = {"1%": 1.09, "2%": 1.0, "5%": 1.0, "10%": 0.999, "25%": 0.998}
    for size, ratio in least.items():
        assert ratios["th", size] >= ratio * ratios["lru", size], size


@pytest.mark.parametrize(("size", "least"), [("2%", 3.0), ("5%", 1.15)])
def test_behind_a_gpu_cache_th_gains_more(
    capsys: pytest.CaptureFixture[str], size: str, least: float
) -> None:
    command = ("--trace", TRACES / "mc_conv.jsonl.gz", "--gpu", "1%", "--capacity", size)
    (th,) = simulate(capsys, *command, "--policy", "th")
    (lru,) = simulate(capsys, *command, "--policy", "lru", "--head-untold")
    assert th["hits"] >= least * lru["hits"]


def test_admission_costs_little_however_little_its_directory_holds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tier = ("--trace", TRACES / "mc_conv.jsonl.gz", "--capacity", "25%", "--policy", "lru")
    (everything,) = simulate(capsys, *tier)
    for directory in ("1365", "16384", "65536"):
        admits = ("--theta", "0.05", "--directory", directory)
        (admitted,) = simulate(capsys, *tier, *admits)
        assert admitted["hit_ratio"] >= everything["hit_ratio"] - 0.005, directory
