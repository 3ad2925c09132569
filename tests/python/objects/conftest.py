"""Real servers of S3's protocol, each started for one session and ended by its process id."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import random
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvstrata
from kvstrata.cli.demo import bucket as demo

if TYPE_CHECKING:
    from collections.abc import Iterator

TOP = Path(__file__).parents[3]
PROGRAMS = Path(os.environ.get("KVSTRATA_TEST_SERVERS", TOP / ".cache" / "servers" / "bin"))
READY_SECONDS = 50.0
PATIENCE_SECONDS = 40.0
ROW_BYTES = 8192


@dataclass
class Server:
    """A server that runs."""

    kind: str
    endpoint: str
    # Of the authority that issued its certificate, where it has one.
    authority: Path | None = None

    def make_bucket(self, name: str) -> None:
        trusted = (
            None if self.authority is None else ssl.create_default_context(cafile=self.authority)
        )
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")  # noqa: S310
        with urllib.request.urlopen(request, timeout=5, context=trusted) as answer:  # noqa: S310
            answer.read()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAKVSTRATATEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret-of-these-tests")


def moto_command(_folder: Path) -> demo.ServerCommand:
    (port,) = demo.free_ports(1)
    program = PROGRAMS / "moto_server"
    command = [str(PROGRAMS / "python"), str(program), "-H", "127.0.0.1", "-p", str(port)]
    return demo.ServerCommand(command, port, [])


def seaweedfs_command(folder: Path) -> demo.ServerCommand:
    """The demo's, with volumes for the buckets of a whole session: each takes seven."""
    run = demo.server_command(PROGRAMS / "weed", folder)
    return dataclasses.replace(run, command=[*run.command, "-volume.max=1000"])


def tls_command(folder: Path) -> demo.ServerCommand:
    """The same as moto, behind a certificate of an authority that is made for it."""
    script = Path(__file__).with_name("make_certificates.py")
    subprocess.run([str(PROGRAMS / "python"), str(script), str(folder)], check=True)
    plain = moto_command(folder)
    own = ["-s", "-c", str(folder / "server.pem"), "-k", str(folder / "server.key")]
    return demo.ServerCommand([*plain.command, *own], plain.port, [])


COMMANDS = {"moto": moto_command, "seaweedfs": seaweedfs_command}


@contextlib.contextmanager
def running(kind: str, folder: Path) -> Iterator[Server]:
    make = tls_command if kind == "tls" else COMMANDS[kind]
    run = make(folder)
    if not Path(run.command[0]).exists():
        pytest.fail(f"{run.command[0]} is missing: scripts/env.sh servers installs it")
    log = (folder / "log").open("wb")
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    process = subprocess.Popen(
        run.command, stdout=log, stderr=log, cwd=folder, env=environment, start_new_session=True
    )
    server = Server(kind, f"http://127.0.0.1:{run.port}")
    if kind == "tls":
        server = Server(kind, f"https://127.0.0.1:{run.port}", folder / "authority.pem")
    try:
        until = time.monotonic() + READY_SECONDS
        while True:
            try:
                server.make_bucket(f"ready-{random.randrange(1 << 40)}")
                break
            except OSError:
                assert process.poll() is None, (folder / "log").read_text()[-2000:]
                assert time.monotonic() < until, f"{kind} is not ready"
                time.sleep(0.2)
        yield server
    finally:
        # SeaweedFS ignores SIGTERM.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        run.remove_sockets()
        log.close()


@pytest.fixture(scope="session", params=sorted(COMMANDS))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with running(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server


@pytest.fixture(scope="session")
def weed() -> Path:
    """SeaweedFS's program."""
    program = PROGRAMS / "weed"
    if not program.exists():
        pytest.fail(f"{program} is missing: scripts/env.sh servers installs it")
    return program


@pytest.fixture
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running("moto", tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running("tls", tmp_path_factory.mktemp("tls")) as server:
        yield server


@dataclass
class Bench:
    """Tiers on one bucket, an arena for each, and keys with payloads of their own."""

    url: str
    options: dict[str, Any]
    row_bytes: int = ROW_BYTES
    opened: list[tuple[Any, mmap.mmap]] = field(default_factory=list)
    jobs: int = 0

    def open(self, slots: int = 64, **options: Any) -> Any:
        arena = mmap.mmap(-1, slots * self.row_bytes)
        chosen = {
            "manifest": {"model": "m", "dtype": "bfloat16"},
            "row_bytes": self.row_bytes,
            "arena": arena,
            **self.options,
            **options,
        }
        url = chosen.pop("url", self.url)
        tier = kvstrata.open_tier(url, **chosen)
        self.opened.append((tier, arena))
        return tier

    def arena_of(self, tier: Any) -> mmap.mmap:
        return next(arena for own, arena in self.opened if own is tier)

    def key(self, number: int) -> bytes:
        return number.to_bytes(32, "big") + (0).to_bytes(4, "big")

    def keys(self, *numbers: int) -> list[bytes]:
        return [self.key(number) for number in numbers]

    def payload(self, key: bytes) -> bytes:
        return random.Random(key).randbytes(self.row_bytes)

    def store(self, tier: Any, keys: list[bytes]) -> list[str]:
        arena = self.arena_of(tier)
        for slot, key in enumerate(keys):
            arena[slot * self.row_bytes : (slot + 1) * self.row_bytes] = self.payload(key)
        return self.run(tier, tier.store, keys)

    def load(self, tier: Any, keys: list[bytes]) -> list[str]:
        """Load and compare: every slot with outcome ok holds its key's payload."""
        arena = self.arena_of(tier)
        arena[:] = b"\xee" * len(arena)
        outcomes = self.run(tier, tier.load, keys)
        for slot, (key, outcome) in enumerate(zip(keys, outcomes, strict=True)):
            if outcome == "ok":
                bytes_there = arena[slot * self.row_bytes : (slot + 1) * self.row_bytes]
                assert bytes_there == self.payload(key)
        return outcomes

    def run(self, tier: Any, begin: Any, keys: list[bytes]) -> list[str]:
        self.jobs += 1
        begin(self.jobs, keys, [slot * self.row_bytes for slot in range(len(keys))])
        (result,) = tier.wait(60.0)
        assert result.job_id == self.jobs
        return list(result.outcomes)

    def found(self, tier: Any, keys: list[bytes]) -> list[bool]:
        """What lookups say in the end."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            found = tier.lookup(keys)
            if None not in found:
                return list(found)
            assert time.monotonic() < until
            time.sleep(0.01)

    def close(self) -> None:
        for tier, arena in self.opened:
            tier.close()
            arena.close()
        self.opened.clear()


@pytest.fixture
def bench(server: Server) -> Iterator[Bench]:
    """A bucket of its own on each server."""
    name = f"bucket-{random.randrange(1 << 40)}"
    server.make_bucket(name)
    options = {
        "endpoint": server.endpoint,
        "allow_http": True,
        # A busy machine may answer late: where that is no test's subject, it is waited for.
        "lookup_wait_s": PATIENCE_SECONDS,
    }
    made = Bench(f"s3://{name}/some/prefix", options)
    yield made
    made.close()


@pytest.fixture
def memory() -> Iterator[Bench]:
    made = Bench(f"memory://test-{random.randrange(1 << 40)}/prefix", {})
    yield made
    made.close()
