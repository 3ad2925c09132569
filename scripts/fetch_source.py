"""Downloads the source archive of a release and unpacks one folder of it.

    python scripts/fetch_source.py NAME VERSION FOLDER DIRECTORY

`pip download` would build the package's metadata, for which large packages need their whole build
environment. Here the index that pip is configured with is asked (the "simple" API, PEP 503), and
the archive is compared with the SHA-256 that the index names.
"""

import hashlib
import io
import re
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path, PurePosixPath

TIMEOUT_S = 120


def index_url() -> str:
    """The index that pip uses: of its settings, else its own default."""
    settings = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"^(?::env:|global|user|site)\.index-url='(.+)'$", settings, re.MULTILINE)
    if found is not None:
        return found[1]
    from pip._internal.models.index import PyPI

    return str(PyPI.simple_url)


def read(url: str) -> bytes:
    """What an address of the index, or one that it names, holds."""
    if not url.startswith(("https://", "http://")):
        raise SystemExit(f"not an address of a package index: {url}")
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 -- looked at above
        content: bytes = answer.read()
    return content


def archive(name: str, version: str) -> bytes:
    """The release's source archive.

    # Errors
    `SystemExit` where the index has none, or where it has another checksum than the index says.
    """
    page = f"{index_url().rstrip('/')}/{name}/"
    wanted = f"{name}-{version}.tar.gz"
    for link in re.findall(r'href="([^"]+)"', read(page).decode()):
        address = urllib.parse.urljoin(page, link.replace("&amp;", "&"))
        parts = urllib.parse.urlsplit(address)
        if PurePosixPath(parts.path).name != wanted:
            continue
        content = read(urllib.parse.urldefrag(address).url)
        digest = dict(urllib.parse.parse_qsl(parts.fragment)).get("sha256")
        if hashlib.sha256(content).hexdigest() != digest:
            raise SystemExit(f"{wanted} is not what the index says")
        return content
    raise SystemExit(f"the index has no {wanted}")


def main() -> int:
    """Runs the command line; 1 when the archive has no such folder."""
    name, version, folder, directory = sys.argv[1:5]
    top = PurePosixPath(f"{name}-{version}")
    with tarfile.open(fileobj=io.BytesIO(archive(name, version))) as packed:
        members = [one for one in packed if PurePosixPath(one.name).is_relative_to(top / folder)]
        for member in members:
            member.name = str(PurePosixPath(member.name).relative_to(top))
        packed.extractall(Path(directory), members, filter="data")
    return 0 if members else 1


if __name__ == "__main__":
    sys.exit(main())
