"""Certificates for servers of the tests: an authority of its own for each folder, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.servers.programs import missing

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-sha256", "-days", "2")


@dataclass(frozen=True, slots=True)
class Authority:
    """PEM files. Clients that are given `authority` believe the server that has `certificate` and `key`."""

    authority: Path
    certificate: Path
    key: Path

    @property
    def chain(self) -> Path:
        """Key and certificate in one file, as Kafka reads them."""
        return self.certificate.with_name("chain.pem")


def authority(folder: Path) -> Authority:
    """Names 127.0.0.1 and no other address. Without openssl: a failure in CI, a skip elsewhere."""
    if shutil.which("openssl") is None:
        missing("openssl not found; it makes the certificates of these tests")
    made = Authority(folder / "authority.pem", folder / "server.pem", folder / "server.key")
    own_key = folder / "authority.key"
    # Python 3.13 and newer ask for what RFC 5280 wants an authority to say of itself.
    may_sign = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
    _openssl("req", "-x509", *CURVE, *may_sign, "-subj", "/CN=tests", "-keyout", own_key, "-out", made.authority)
    signed = ("-CA", made.authority, "-CAkey", own_key, "-addext", "subjectAltName=IP:127.0.0.1")
    plain = ("-addext", "basicConstraints=critical,CA:FALSE")
    _openssl(
        "req", "-x509", *CURVE, *signed, *plain, "-subj", "/CN=server", "-keyout", made.key, "-out", made.certificate
    )
    made.chain.write_bytes(made.key.read_bytes() + made.certificate.read_bytes())
    return made


def _openssl(*arguments: object) -> None:
    command = ["openssl", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if ended.returncode != 0:
        raise RuntimeError(f"openssl {arguments[0]}:\n{ended.stderr[-2000:]}")
