"""TLS files and session tokens."""

from pathlib import Path

import pytest

from fastrt.errors import FastrtError
from fastrt.net.grpc.auth import (
    TlsFiles,
    TokenFileError,
    read_token,
    refused_token,
)


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
