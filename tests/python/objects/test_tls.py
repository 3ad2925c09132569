"""Servers behind certificates: which are trusted, and what is said of one that is not."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

import kvstrata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


class Relay:
    """A way to a server, on a port of its own, which can become slow."""

    def __init__(self, endpoint: str) -> None:
        there = urlsplit(endpoint)
        self._there = (there.hostname, there.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"{there.scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_slow = threading.Event()
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                self._sockets.append(here)
                there = socket.create_connection(self._there)
                self._sockets.append(there)
                self._start(self._copy, here, there, self.is_slow)
                self._start(self._copy, there, here, threading.Event())

    def _copy(self, source: socket.socket, target: socket.socket, slow: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while taken := source.recv(64 << 10):
                target.sendall(taken)
                if slow.is_set():
                    time.sleep(0.05)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()


@pytest.fixture
def relay(tls: Any) -> Iterator[Relay]:
    made = Relay(tls.endpoint)
    yield made
    made.close()


def test_a_slot_is_given_back_at_the_deadline_though_its_row_is_taken_slowly(
    memory: Any, tls: Any, relay: Relay
) -> None:
    memory.row_bytes = 32 << 20
    with_bundle = options(tls, ca_bundle=str(tls.authority))
    tier = memory.open(1, **{**with_bundle, "endpoint": relay.endpoint}, deadline_s=5.0)
    relay.is_slow.set()
    begun = time.monotonic()
    # At this pace it would take 25 s, of which the kernel and TLS spare less than 5 s.
    assert memory.store(tier, memory.keys(1)) == ["timeout"]
    assert time.monotonic() - begun < 15
