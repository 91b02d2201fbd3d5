"""TLS files and session tokens: what clients and servers show each other."""

from __future__ import annotations

import hmac
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastrt.errors import ConfigError, FastrtError
from fastrt.folders import UnsafeFolderError, read_secret

if TYPE_CHECKING:  # its import takes 0.2 s, which `fastrt run` saves
    import grpc

_BEARER = "Bearer "
METRICS_KEY = "metrics"  # the purpose of the key that scrapes of a node's metrics carry


class TokenFileError(FastrtError):
    """A token file is missing, empty, or could be read or replaced by others."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files for TLS.

    Attributes:
        certificate: this server's certificate chain.
        key: its private key.
        client_ca: certificates that sign those of clients; with it, clients must present one (mutual TLS).
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def check(self) -> None:
        """Check the files: gRPC reports only that it cannot serve, or that no server answers.

        Raises:
            ConfigError: one is no PEM file of its kind, the key is not the certificate's, or a file cannot be read.
        """
        context = ssl.create_default_context()
        what = f"certificate {self.certificate} and key {self.key}"
        try:
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
            what = f"certificates of authorities {self.client_ca}"
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
        except OSError as error:  # ssl's errors are OSErrors too
            reason = getattr(error, "reason", None) or error
            raise ConfigError(f"the {what} cannot be used: {reason}. Give PEM files that belong together.") from None

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials for a server.

        Raises:
            FastrtError: a file cannot be read.
        """
        import grpc

        try:
            pair = (self.key.read_bytes(), self.certificate.read_bytes())
            roots = self.client_ca.read_bytes() if self.client_ca is not None else None
        except OSError as error:
            raise FastrtError(f"Cannot read the TLS files: {error}. Check their names and modes.") from error
        return grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)

    def server_context(self) -> ssl.SSLContext:
        """A context for a server that is not gRPC's; with `client_ca`, clients must present a certificate.

        Raises:
            FastrtError: a file cannot be read.
        """
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            raise FastrtError(f"Cannot read the TLS files: {error}. Check their names and modes.") from error
        return context

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials for a client that presents `certificate`, and trusts servers signed by `client_ca`.

        Raises:
            FastrtError: a file cannot be read.
        """
        import grpc

        try:
            roots = self.client_ca.read_bytes() if self.client_ca is not None else None
            key, chain = self.key.read_bytes(), self.certificate.read_bytes()
        except OSError as error:
            raise FastrtError(f"Cannot read the TLS files: {error}.") from error
        return grpc.ssl_channel_credentials(roots, key, chain)


def read_token(path: str | os.PathLike[str]) -> str:
    """The session token in a file that only its owner may read.

    Raises:
        TokenFileError: it cannot be read, is empty, or others could read or replace it.
    """
    try:
        token = read_secret(path)
    except (OSError, UnsafeFolderError) as error:
        raise TokenFileError(f"Cannot read the token file {os.fspath(path)}: {error}.") from error
    if not token:
        raise TokenFileError(f"The token file {os.fspath(path)} is empty. Start the session again, or copy the file.")
    return token


def refused_token(metadata: Sequence[tuple[str, str | bytes]], token: str) -> str | None:
    """Reason to refuse a call whose metadata lacks the token (`authorization: Bearer <token>`); None if it has it."""
    for key, value in metadata:
        if key == "authorization":
            given = value.decode("latin-1") if isinstance(value, bytes) else value
            expected = _BEARER + token
            if hmac.compare_digest(given.encode("latin-1", "replace"), expected.encode("latin-1")):
                return None
            return "The session token of this call is not the one of this session. Use the token file of the session."
    return "This call carries no session token. Set FASTRT_TOKEN_FILE to the session's token file."
