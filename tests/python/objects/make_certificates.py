"""`make_certificates.py FOLDER`: an authority, a server's certificate from it, and a stranger.

Run by the servers' own Python, which has the package for it.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import sys
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def pem(key: Any) -> bytes:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    found: bytes = key.private_bytes(encoding, form, serialization.NoEncryption())
    return found


def certificate(name: str, key: Any, issuer: tuple[str, Any] | None) -> Any:
    """A certificate for a name: of an authority where nobody else issues it."""

    def called(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = dt.datetime.now(dt.UTC)
    issuer_name, issuer_key = issuer or (name, key)
    builder = (
        x509.CertificateBuilder()
        .subject_name(called(name))
        .issuer_name(called(issuer_name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer is not None:
        names = [
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def main(folder: Path) -> None:
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("ours", "server", "other")}
    made = {
        "authority": certificate("ours", keys["ours"], None),
        "server": certificate("server", keys["server"], ("ours", keys["ours"])),
        "stranger": certificate("other", keys["other"], None),
    }
    for name, one in made.items():
        (folder / f"{name}.pem").write_bytes(one.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(pem(keys["server"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
