"""Who may connect, from where, and with which token."""

from pathlib import Path

import pytest

from fastrt.errors import FastrtError
from fastrt.net.grpc.auth import (
    InsecureBindError,
    TlsFiles,
    TokenFileError,
    is_loopback,
    read_token,
    refuse_open_bind,
    refused_token,
)


@pytest.mark.parametrize(
    ("address", "inside"),
    [
        ("127.0.0.1:1", True), ("127.9.9.9:1", True), ("[::1]:1", True), ("localhost:1", True), ("unix:/tmp/x", True),
        ("0.0.0.0:1", False), ("[::]:1", False), ("10.0.0.1:1", False), ("host.example:1", False), (":1", False),
    ],
)  # fmt: skip
def test_loopback_is_recognised(address: str, inside: bool) -> None:
    assert is_loopback(address) is inside


def test_open_bind_needs_certificates_of_clients_or_a_loud_word() -> None:
    tls = TlsFiles(Path("c"), Path("k"))
    with pytest.raises(InsecureBindError):
        refuse_open_bind("0.0.0.0:1", None, allow_anonymous=False)
    with pytest.raises(InsecureBindError):
        refuse_open_bind("0.0.0.0:1", tls, allow_anonymous=False)
    refuse_open_bind("0.0.0.0:1", TlsFiles(Path("c"), Path("k"), Path("ca")), allow_anonymous=False)
    refuse_open_bind("0.0.0.0:1", None, allow_anonymous=True)
    refuse_open_bind("127.0.0.1:1", None, allow_anonymous=False)


def test_token_file_must_be_private_and_not_empty(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(TokenFileError, match="Cannot read"):
        read_token(path)
    path.write_text("abc\n")
    path.chmod(0o644)
    with pytest.raises(TokenFileError, match="chmod 600"):
        read_token(path)
    path.chmod(0o600)
    assert read_token(path) == "abc"
    path.write_text(" \n")
    with pytest.raises(TokenFileError, match="empty"):
        read_token(path)


def test_token_is_compared_whole() -> None:
    assert refused_token([("authorization", "Bearer abc")], "abc") is None
    assert refused_token([("authorization", b"Bearer abc")], "abc") is None
    for wrong in ("Bearer abcd", "Bearer ab", "abc", "bearer abc", ""):
        assert refused_token([("authorization", wrong)], "abc") is not None
    assert "no session token" in str(refused_token([], "abc"))


def test_missing_tls_files_are_named(tmp_path: Path) -> None:
    tls = TlsFiles(tmp_path / "none.pem", tmp_path / "none.key")
    with pytest.raises(FastrtError, match=r"none\.key"):
        tls.server_credentials()
    with pytest.raises(FastrtError, match=r"none\.key"):
        tls.channel_credentials()
