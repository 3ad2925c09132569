"""What `open_tier` says of buckets that cannot be used, and what it never says."""

from __future__ import annotations

import logging
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

import kvstrata
from kvstrata.cli.main import main


@pytest.mark.parametrize("name", ["capacity", "min_free", "policy", "io_backend", "share_mode"])
def test_what_only_directories_have_is_refused_for_buckets(memory: Any, name: str) -> None:
    with pytest.raises(kvstrata.ConfigError, match=f"^{name}: "):
        memory.open(**{name: "1GiB"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("endpoint", "http://h"),
        ("region", "x"),
        ("addressing", "path"),
        ("allow_http", True),
        ("ca_bundle", "/x"),
        ("requests_max", 1),
        ("in_flight_max", 1),
        ("lookup_wait_s", 1.0),
        ("found_s", 1.0),
        ("absent_s", 1.0),
    ],
)
def test_what_only_buckets_have_is_refused_for_directories(
    memory: Any, tmp_path: Path, name: str, value: object
) -> None:
    with pytest.raises(kvstrata.ConfigError, match=f"^{name}: "):
        memory.open(url=tmp_path.as_uri(), capacity="1GiB", **{name: value})


def test_a_directory_needs_a_capacity(memory: Any, tmp_path: Path) -> None:
    with pytest.raises(kvstrata.ConfigError, match=r"^capacity: is missing"):
        memory.open(url=tmp_path.as_uri())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "s3://"}, "names no bucket"),
        ({"url": "s3://me:secret@host/x"}, "contains '@'"),
        ({"url": "s3://b", "endpoint": "h:1"}, "endpoint"),
        ({"url": "s3://b", "endpoint": "http://h:1"}, "allow_http"),
        ({"url": "s3://b", "addressing": "somehow"}, "addressing"),
        ({"url": "s3://b", "ca_bundle": "/not/there"}, "ca_bundle"),
        ({"requests_max": 0}, "requests_max"),
        ({"requests_max": True}, "requests_max"),
        ({"in_flight_max": "5%"}, "in_flight_max"),
        ({"found_s": -1}, "found_s"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"row_bytes": 65 << 20}, "row_bytes"),
        ({"arena": bytearray(10)}, "arena: 10 bytes hold no row of group 0"),
    ],
)
def test_a_wrong_option_is_named(memory: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(kvstrata.ConfigError, match=words) as caught:
        memory.open(**options)
    assert "secret" not in str(caught.value)


def test_a_tier_in_memory_is_the_same_one_each_time(memory: Any) -> None:
    keys = memory.keys(1, 2)
    tier = memory.open()
    assert memory.store(tier, keys) == ["ok", "ok"]
    tier.close()
    again = memory.open()
    assert memory.load(again, keys) == ["ok", "ok"]
    assert again.stats()["health"] == "ok"


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_refused_connection_and_an_unknown_host_are_told_apart(memory: Any) -> None:
    refused = {"url": "s3://bucket/x", "endpoint": f"http://127.0.0.1:{closed_port()}"}
    with pytest.raises(kvstrata.ConfigError, match="no connection; check endpoint"):
        memory.open(**refused, allow_http=True)
    nowhere = {"url": "s3://bucket/x", "endpoint": "http://no.such.host.invalid"}
    with pytest.raises(kvstrata.ConfigError, match="name cannot be resolved"):
        memory.open(**nowhere, allow_http=True)


def test_without_credentials_opening_fails_soon_and_says_so(
    memory: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    # Nobody hands out credentials there.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    begun = time.monotonic()
    with pytest.raises(kvstrata.ConfigError, match="no credentials; give them by") as caught:
        memory.open(url="s3://bucket/x", endpoint="http://127.0.0.1:1", allow_http=True)
    assert time.monotonic() - begun < 10
    for place in (
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (not set)",
        f"the credentials file {tmp_path}/.aws/credentials cannot be read",
        "the instance's role by http://127.0.0.1:",
    ):
        assert place in str(caught.value)
    status = main(["gc", "s3://bucket/x", "--capacity", "1GiB"])
    assert status == 2
    said = capsys.readouterr().err
    assert said.startswith("kvstrata gc: cannot list s3://bucket/x: no credentials; give them by")
    assert f"the credentials file {tmp_path}/.aws/credentials cannot be read" in said


def test_half_of_the_credentials_is_named(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(kvstrata.ConfigError, match="AWS_SECRET_ACCESS_KEY is not"):
        memory.open(url="s3://bucket/x", endpoint="http://127.0.0.1:1", allow_http=True)


def test_an_engine_starts_without_its_bucket_and_the_tier_joins_later(
    memory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"url": "s3://bucket/x", "endpoint": f"http://127.0.0.1:{closed_port()}"}
    begun = time.monotonic()
    with caplog.at_level(logging.INFO):
        tier = memory.open(**options, allow_http=True, required=False)
    assert time.monotonic() - begun < 10
    stats = tier.stats()
    assert stats["health"] == "unusable"
    assert "no connection" in stats["last_error"]["text"]
    assert tier.capabilities() == {}
    keys = memory.keys(1)
    assert tier.lookup(keys) == [False]
    assert memory.store(tier, keys) == ["dropped"]
    assert memory.load(tier, keys) == ["miss"]
    assert tier.reset() is False


def test_no_secret_is_told_anywhere(
    bench: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "a-secret-that-nobody-may-see"  # noqa: S105
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with caplog.at_level(logging.DEBUG):
        tier = bench.open()
        bench.store(tier, bench.keys(1))
        told = [repr(tier), repr(tier.stats()), repr(tier.capabilities())]
        with pytest.raises(kvstrata.ConfigError) as caught:
            bench.open(url="s3://no-such-bucket-of-ours/x")
    told += [str(caught.value), *(record.getMessage() for record in caplog.records)]
    assert all(secret not in text for text in told)


def test_virtual_addressing_needs_a_host_with_a_name(memory: Any) -> None:
    options = {"url": "s3://bucket/x", "endpoint": "http://127.0.0.1:1", "allow_http": True}
    with pytest.raises(kvstrata.ConfigError, match=r"^endpoint: .* needs a name"):
        memory.open(**options, addressing="virtual")


def test_every_statistic_of_a_bucket_is_documented(memory: Any) -> None:
    page = (Path(__file__).parents[3] / "docs" / "STATS.md").read_text()
    told = set(re.findall(r"^\| `([^`]+)`", page, re.MULTILINE))
    section = page.split("\n## Object tiers\n", 1)[1]
    own = set(re.findall(r"^\| `([^`]+)`", section, re.MULTILINE))
    stats = memory.open().stats()
    assert own <= set(stats)
    plain = {key for key, value in stats.items() if not isinstance(value, dict)}
    assert plain <= told
    for name in memory.open().capabilities():
        assert f"`{name}`" in section
