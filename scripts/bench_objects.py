"""GB/s and CPU seconds per GB of the object tier, beside a plain concurrent client (obstore).

    scripts/bench_objects.py [--server seaweedfs|plain] [--kib 64,256,2048] [--rounds 5] ...

Both clients are processes of their own that stay up; each round runs every kind of pass once with
each client, in turns, on rows that only it uses. `plain` is the tests' own server, which costs less
than a real one and so shows more of the clients. The CPU time is that of the client's process, user
and system; the server's is not counted. See benches/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOP = Path(__file__).parents[1]
SERVERS = TOP / ".cache" / "servers" / "bin"
PYTHONS = {"kvstrata": TOP / ".venv" / "bin" / "python", "obstore": SERVERS / "python"}
BUCKET = "bucket"
KINDS = ("put", "get")


def key_of(number: int) -> bytes:
    """A key; its first bytes make no difference to where its object lies."""
    return number.to_bytes(32, "big") + bytes(4)


def filled(rows: int, row_bytes: int) -> mmap.mmap:
    """Memory for rows, all with the same random bytes."""
    memory = mmap.mmap(-1, rows * row_bytes)
    memory[:row_bytes] = os.urandom(row_bytes)
    for row in range(1, rows):
        memory[row * row_bytes : (row + 1) * row_bytes] = memory[:row_bytes]
    return memory


class Kvstrata:
    """The tier: one job a pass, from and to an arena that holds all of its rows."""

    def __init__(self, endpoint: str, row_bytes: int, rows: int, concurrency: int) -> None:
        """Open the tier on a prefix of its own."""
        import kvstrata

        self._size = row_bytes
        self._rows = rows
        self._arena = filled(rows, row_bytes)
        self._tier = kvstrata.open_tier(
            f"s3://{BUCKET}/{uuid.uuid4().hex}",
            manifest={"model": "bench"},
            row_bytes=row_bytes,
            arena=self._arena,
            endpoint=endpoint,
            addressing="path",
            allow_http=True,
            requests_max=concurrency,
            in_flight_max=1 << 30,
            deadline_s=600,
        )
        self._job = 0

    def run(self, kind: str, first: int) -> None:
        """Move every row once."""
        self._job += 1
        keys = [key_of(first + row) for row in range(self._rows)]
        offsets = [row * self._size for row in range(self._rows)]
        begin = self._tier.store if kind == "put" else self._tier.load
        begin(self._job, keys, offsets)
        results = self._tier.wait(600.0)
        outcomes = {outcome for result in results for outcome in result.outcomes}
        if len(results) != 1 or outcomes != {"ok"}:
            message = f"{kind} ended with {outcomes}"
            raise RuntimeError(message)


class Obstore:
    """The plain client: as many tasks as requests may run."""

    def __init__(self, endpoint: str, row_bytes: int, rows: int, concurrency: int) -> None:
        """Make a client and the bytes that are put."""
        from obstore.store import S3Store

        self._rows = rows
        self._size = row_bytes
        # As the tier's: rows that no cache holds.
        self._memory = memoryview(filled(rows, row_bytes))
        self._concurrency = concurrency
        self._prefix = uuid.uuid4().hex
        self._store = S3Store(
            BUCKET,
            endpoint=endpoint,
            region="us-east-1",
            unsigned_payload=True,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )

    def run(self, kind: str, first: int) -> None:
        """Move every row once."""
        asyncio.run(self._run(kind, first))

    async def _run(self, kind: str, first: int) -> None:
        numbers = iter(range(first, first + self._rows))
        one = self._put if kind == "put" else self._get

        async def work() -> None:
            for number in numbers:
                await one(f"{self._prefix}/{key_of(number).hex()}", number - first)

        await asyncio.gather(*(work() for _ in range(self._concurrency)))

    async def _put(self, name: str, row: int) -> None:
        import obstore

        body = self._memory[row * self._size : (row + 1) * self._size]
        await obstore.put_async(self._store, name, body, use_multipart=False)

    async def _get(self, name: str, _row: int) -> None:
        import obstore

        got = await obstore.get_async(self._store, name)
        if len(await got.bytes_async()) != self._size:
            message = "a row is short"
            raise RuntimeError(message)


CLIENTS: dict[str, Callable[..., Any]] = {"kvstrata": Kvstrata, "obstore": Obstore}


def cpu_seconds() -> float:
    """User and system time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(name: str, endpoint: str) -> None:
    """Run passes as they are asked for, a JSON line each."""
    client: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "kind" not in asked:
            client = None
            client = CLIENTS[name](endpoint, **asked)
            print("{}", flush=True)
            continue
        cpu, begun = cpu_seconds(), time.perf_counter()
        client.run(asked["kind"], asked["first"])
        seconds = time.perf_counter() - begun
        print(json.dumps({"seconds": seconds, "cpu": cpu_seconds() - cpu}), flush=True)


class Client:
    """One of the two, in a process of its own."""

    def __init__(self, name: str, endpoint: str) -> None:
        """Start it."""
        environment = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
        }
        self._process = subprocess.Popen(
            [str(PYTHONS[name]), __file__, "--serve", name, endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, **asked: Any) -> dict[str, float]:
        """Have it do something; its answer."""
        assert self._process.stdin is not None  # noqa: S101 -- both are pipes
        assert self._process.stdout is not None  # noqa: S101
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return answer

    def end(self) -> None:
        """End it, and wait until it has."""
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def server(kind: str, mib: int) -> Iterator[str]:
    """The endpoint of a server that has an empty bucket; passes have so many MiB."""
    if kind.startswith("http"):
        yield kind
        return
    if kind == "plain":
        subprocess.run(
            ["cargo", "build", "--quiet", "--release", "-p", "kvstrata-testkit", "--bin", "bucket"],
            cwd=TOP,
            check=True,
        )
        program = Path(os.environ.get("CARGO_TARGET_DIR", TOP / "target")) / "release" / "bucket"
        process = subprocess.Popen(
            # Rows of two rounds of each client: then the server's memory is used again.
            [str(program), str(2 * len(CLIENTS) * mib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None  # noqa: S101
        try:
            yield process.stdout.readline().strip()
        finally:
            told, _ = process.communicate()
            print(f"connections: {told.strip()}", file=sys.stderr)
        return
    from kvstrata.cli.demo import bucket

    with (
        tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder,
        bucket.serving(
            SERVERS / "weed", Path(folder) / "weed", print, name=BUCKET, volume_mib=512
        ) as served,
    ):
        yield served.endpoint


def measure(options: argparse.Namespace, endpoint: str) -> list[dict[str, Any]]:
    """All passes; one entry for each row size and kind."""
    clients = {name: Client(name, endpoint) for name in options.clients}
    found = []
    try:
        for kib in options.kib:
            rows = max(options.mib * 1024 // kib, options.concurrency)
            for client in clients.values():
                client.ask(row_bytes=kib * 1024, rows=rows, concurrency=options.concurrency)
            seen: dict[tuple[str, str], list[dict[str, float]]] = {}
            for round_ in range(options.rounds + 1):
                for kind in KINDS:
                    names = list(clients)[:: 1 if round_ % 2 else -1]
                    for name in names:
                        answer = clients[name].ask(kind=kind, first=round_ * rows)
                        if round_:  # the first round opens connections
                            seen.setdefault((kind, name), []).append(answer)
            gigabytes = rows * kib * 1024 / 1e9
            found += [entry_of(kib, kind, clients, seen, gigabytes) for kind in KINDS]
            print(line_of(found[-2]), line_of(found[-1]), sep="\n", flush=True)
    finally:
        for client in clients.values():
            client.end()
    return found


def entry_of(
    kib: int,
    kind: str,
    clients: dict[str, Client],
    seen: dict[tuple[str, str], list[dict[str, float]]],
    gigabytes: float,
) -> dict[str, Any]:
    """What one kind of pass gave."""
    entry: dict[str, Any] = {"kib": kib, "kind": kind}
    for name in clients:
        passes = seen[kind, name]
        entry[name] = {
            "gb_per_s": [round(gigabytes / one["seconds"], 3) for one in passes],
            "median": statistics.median(gigabytes / one["seconds"] for one in passes),
            "cpu_s_per_gb": statistics.median(one["cpu"] / gigabytes for one in passes),
        }
    return entry


def line_of(entry: dict[str, Any]) -> str:
    """An entry as a line."""
    text = f"{entry['kib']:5} KiB {entry['kind']}"
    for name in PYTHONS:
        if name in entry:
            own = entry[name]
            text += f"  {name} {own['median']:.2f} GB/s, {own['cpu_s_per_gb']:.2f} s/GB"
    if all(name in entry for name in PYTHONS):
        own, plain = (entry[name] for name in PYTHONS)
        speed = own["median"] / plain["median"]
        cost = own["cpu_s_per_gb"] / plain["cpu_s_per_gb"]
        text += f"  ratio {speed:.2f}, of CPU {cost:.2f}"
    return text


def numbers(text: str) -> list[int]:
    """Numbers between commas."""
    return [int(number) for number in text.split(",")]


def main() -> None:
    """Read the options, measure, print."""
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--server", default="seaweedfs", help="seaweedfs, plain, or a URL")
    parser.add_argument("--kib", type=numbers, default=[64, 256, 2048], help="row sizes")
    parser.add_argument("--mib", type=int, default=128, help="MiB of a pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=16, help="requests at a time")
    parser.add_argument("--clients", type=lambda text: text.split(","), default=list(PYTHONS))
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    with server(options.server, options.mib) as endpoint:
        found = measure(options, endpoint)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
