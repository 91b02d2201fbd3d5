"""Certificates by openssl, for doors that ask for one."""

import subprocess
from pathlib import Path

from fastrt.net.grpc.auth import TlsFiles

_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"


def certificates(folder: Path) -> TlsFiles:
    """Make an authority, and a certificate of this machine's loopback address that it signed; files in a folder."""
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for words in (
        f"req -x509 {_KEY} -keyout ca.key -out ca.pem -days 2 -subj /CN=ca",
        f"req {_KEY} -keyout own.key -out own.csr -subj /CN=peer",
        "x509 -req -in own.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out own.pem -days 2 -extfile names",
    ):
        subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)
    return TlsFiles(folder / "own.pem", folder / "own.key", folder / "ca.pem")
