"""The promises of every tier, kept on servers that others wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvstrata

SCRIPT = Path(__file__).with_name("writer_script.py")


def test_rows_come_back_after_close_and_reopen_with_every_byte(bench: Any) -> None:
    keys = bench.keys(*range(40))
    tier = bench.open()
    assert bench.found(tier, keys) == [False] * 40
    assert bench.load(tier, keys) == ["miss"] * 40
    assert bench.store(tier, keys) == ["ok"] * 40
    assert bench.found(tier, keys) == [True] * 40
    assert bench.load(tier, keys) == ["ok"] * 40
    tier.close()
    again = bench.open()
    assert bench.found(again, keys) == [True] * 40
    assert bench.load(again, keys) == ["ok"] * 40
    assert bench.store(again, keys[:5]) == ["present"] * 5
    assert again.stats()["corrupt_rows"] == 0


def test_a_reset_hides_everything_also_after_a_restart(bench: Any) -> None:
    keys = bench.keys(1, 2, 3)
    tier = bench.open()
    assert bench.store(tier, keys) == ["ok"] * 3
    assert tier.reset() is True
    assert bench.found(tier, keys) == [False] * 3
    assert bench.load(tier, keys) == ["miss"] * 3
    assert bench.store(tier, keys[:1]) == ["ok"]
    again = bench.open()
    assert bench.found(again, keys) == [True, False, False]


def test_a_peer_that_goes_on_in_the_old_epoch_never_publishes_into_the_new_one(bench: Any) -> None:
    keys = bench.keys(1, 2)
    old, new = bench.open(), bench.open()
    assert bench.store(old, keys[:1]) == ["ok"]
    assert new.reset() is True
    assert bench.store(old, keys[1:]) == ["ok"]
    assert bench.load(new, keys) == ["miss", "miss"]
    assert bench.load(bench.open(), keys) == ["miss", "miss"]
    # The peer itself goes on with what it has.
    assert bench.load(old, keys) == ["ok", "ok"]
    assert new.stats()["epoch"].startswith("0000000002-")
    assert new.reset() is True
    assert old.reset() is True
    assert old.stats()["epoch"].startswith("0000000004-")


def test_what_one_process_stored_another_reloads(bench: Any) -> None:
    endpoint = bench.options["endpoint"]
    told = subprocess.run(
        [sys.executable, str(SCRIPT), bench.url, endpoint, "store", "20"],
        check=True,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert told.stdout.split() == ["ok"] * 20
    tier = bench.open()
    keys = bench.keys(*range(20))
    assert bench.found(tier, keys) == [True] * 20
    assert bench.load(tier, keys) == ["ok"] * 20


@pytest.mark.parametrize("what", ["store", "load"])
def test_proxies_that_the_environment_names_are_not_used(bench: Any, what: str) -> None:
    names = [f"{kind}_PROXY" for kind in ("HTTP", "HTTPS", "ALL")]
    refusing = dict.fromkeys([*names, *map(str.lower, names)], "http://127.0.0.1:1")
    if what == "load":
        assert bench.store(bench.open(), bench.keys(*range(4))) == ["ok"] * 4
    told = subprocess.run(
        [sys.executable, str(SCRIPT), bench.url, bench.options["endpoint"], what, "4"],
        check=True,
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, **refusing},
    )
    assert told.stdout.split() == ["ok"] * 4


def test_removed_rows_are_gone_and_can_be_stored_again(bench: Any) -> None:
    keys = bench.keys(1, 2)
    tier = bench.open()
    assert bench.store(tier, keys) == ["ok", "ok"]
    tier.remove(keys[:1])
    assert bench.found(tier, keys) == [False, True]
    assert bench.store(tier, keys[:1]) == ["ok"]
    assert bench.load(tier, keys) == ["ok", "ok"]


def test_a_bucket_that_is_not_there_is_named(bench: Any, server: Any) -> None:
    # SeaweedFS says 403 of what is not there.
    words = {"moto": "there is no such bucket", "seaweedfs": "refuses these credentials"}
    with pytest.raises(kvstrata.ConfigError, match=words[server.kind]):
        bench.open(url="s3://no-such-bucket-of-ours/x", addressing="path")


def test_capabilities_say_what_was_found_out(bench: Any) -> None:
    tier = bench.open()
    told = tier.capabilities()
    assert told["scheme"] == "s3"
    assert told["addressing"] == "path"
    assert told["conditional_put"] is True
    assert told["signed_payload"] is False
