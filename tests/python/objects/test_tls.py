"""Servers behind certificates: which are trusted, and what is said of one that is not."""

from __future__ import annotations

from typing import Any

import pytest

import kvstrata

UNTRUSTED = "TLS failed; check the scheme of the endpoint, or give ca_bundle"


def options(tls: Any, **more: Any) -> dict[str, Any]:
    name = "bucket-behind-tls"
    tls.make_bucket(name)
    return {"url": f"s3://{name}/x", "endpoint": tls.endpoint, "addressing": "path", **more}


def test_a_server_of_an_authority_in_the_bundle_is_trusted(memory: Any, tls: Any) -> None:
    tier = memory.open(**options(tls, ca_bundle=str(tls.authority)))
    keys = memory.keys(1, 2)
    assert memory.store(tier, keys) == ["ok", "ok"]
    assert memory.load(tier, keys) == ["ok", "ok"]
    assert tier.capabilities()["signed_payload"] is False


def test_without_its_authority_the_server_is_not_trusted(memory: Any, tls: Any) -> None:
    with pytest.raises(kvstrata.ConfigError, match=UNTRUSTED):
        memory.open(**options(tls))
    stranger = str(tls.authority.with_name("stranger.pem"))
    with pytest.raises(kvstrata.ConfigError, match=UNTRUSTED):
        memory.open(**options(tls, ca_bundle=stranger))


def test_a_server_that_speaks_no_tls_is_told_from_one_that_is_not_there(
    memory: Any, server: Any
) -> None:
    spoken = server.endpoint.replace("http://", "https://")
    with pytest.raises(kvstrata.ConfigError, match=UNTRUSTED):
        memory.open(url="s3://bucket/x", endpoint=spoken, addressing="path")


def test_a_bundle_without_a_certificate_is_named(memory: Any, tls: Any) -> None:
    key = str(tls.authority.with_name("server.key"))
    with pytest.raises(kvstrata.ConfigError, match=r"^ca_bundle: .*holds no certificate"):
        memory.open(**options(tls, ca_bundle=key))
