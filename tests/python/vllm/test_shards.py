"""Engines with other shard coordinates on one root: the same keys, and everyone's own bytes."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from plugin_support.configs import PAGE
from plugin_support.models import make_model
from plugin_support.namespaces import identity, make_namespace

import kvstrata

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built"
)

ROW = 2 * PAGE
KEYS = [bytes([index]) * 32 + bytes(4) for index in range(6)]
# Tensor, pipeline, prefill and decode context sizes of eight engines.
SHARDS = [
    {"world_size": tp * pp * pcp, "tp_size": tp, "pp_size": pp, "pcp_size": pcp, "dcp_size": dcp}
    for tp, pp, pcp, dcp in [
        (1, 1, 1, 1),
        (2, 1, 1, 1),
        (4, 1, 1, 1),
        (1, 2, 1, 1),
        (1, 1, 2, 1),
        (2, 2, 1, 1),
        (2, 1, 1, 2),
        (4, 1, 1, 2),
    ]
]


def row(shard: int, key: bytes) -> bytes:
    return hashlib.shake_128(bytes([shard]) + key).digest(ROW)


def opened(root: Path, fields: dict[str, Any], arena: bytearray) -> kvstrata.Tier:
    return kvstrata.open_tier(
        root, manifest=fields, row_bytes=ROW, arena=arena, capacity="64MiB", min_free=0
    )


def test_eight_engines_that_differ_only_in_their_shards_never_read_each_others_rows(
    tmp_path: Path, root: Path
) -> None:
    model_dir = make_model(tmp_path / "m")
    offsets = [index * ROW for index in range(len(KEYS))]
    identities = [identity(model_dir, spec={"parallel": shard}) for shard in SHARDS]
    for number, fields in enumerate(identities):
        arena = bytearray(b"".join(row(number, key) for key in KEYS))
        with opened(root, fields, arena) as tier:
            assert tier.lookup(KEYS) == [False] * len(KEYS)
            tier.store(1, KEYS, offsets)
            assert tier.wait(20)[0].success
    assert len([path for path in root.iterdir() if path.is_dir()]) == len(SHARDS)
    for number, fields in enumerate(identities):
        arena = bytearray(ROW * len(KEYS))
        with opened(root, fields, arena) as tier:
            tier.load(1, KEYS, offsets)
            assert tier.wait(20)[0].outcomes == ["ok"] * len(KEYS)
        assert arena == b"".join(row(number, key) for key in KEYS)


def test_a_second_engine_of_one_identity_and_another_row_size_is_refused_naming_the_field(
    tmp_path: Path, root: Path
) -> None:
    """By itself it has another name; here its directory holds the first one's manifest."""
    fields = identity(make_model(tmp_path / "m"))
    first = make_namespace(root, fields, row_bytes=ROW)
    second = make_namespace(root, fields, row_bytes=2 * ROW)
    assert first != second
    stored = json.loads((first / "namespace.json").read_text())
    (second / "namespace.json").write_text(json.dumps(stored))
    with pytest.raises(
        kvstrata.ConfigError, match=rf"row_bytes\.0.*{ROW}.*{2 * ROW}.*another root"
    ):
        kvstrata.open_tier(
            root,
            manifest=fields,
            row_bytes=2 * ROW,
            arena=bytearray(2 * ROW),
            capacity="64MiB",
            min_free=0,
        )
