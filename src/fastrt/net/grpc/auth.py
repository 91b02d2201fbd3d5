"""Who may connect: TLS files, session tokens, and addresses that are not this machine's alone."""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from fastrt.errors import ConfigError, FastrtError
from fastrt.folders import UnsafeFolderError, read_secret

_BEARER = "Bearer "
_DOCUMENTATION = "192.0.2.1:9"  # RFC 5737: the default route leads there, and nothing is there


class InsecureBindError(FastrtError):
    """A service would be open to the network without anything that tells friends from strangers."""


class TokenFileError(FastrtError):
    """A token file is missing, empty, or could be read or replaced by others."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files for TLS.

    Attributes:
        certificate: this server's certificate chain.
        key: its private key.
        client_ca: certificates that sign those of clients; with it, clients must show one (mutual TLS).
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def check(self) -> None:
        """See that the files are what they should be: gRPC only says that it cannot serve, or that nobody answers.

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
        except OSError as error:  # what ssl raises is one too
            reason = getattr(error, "reason", None) or error
            raise ConfigError(f"the {what} cannot be used: {reason}. Give PEM files that belong together.") from None

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials for a server.

        Raises:
            FastrtError: a file cannot be read.
        """
        try:
            pair = (self.key.read_bytes(), self.certificate.read_bytes())
            roots = self.client_ca.read_bytes() if self.client_ca is not None else None
        except OSError as error:
            raise FastrtError(f"Cannot read the TLS files: {error}. Check their names and modes.") from error
        return grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials for a client that shows `certificate`, and trusts servers signed by `client_ca`.

        Raises:
            FastrtError: a file cannot be read.
        """
        try:
            roots = self.client_ca.read_bytes() if self.client_ca is not None else None
            key, chain = self.key.read_bytes(), self.certificate.read_bytes()
        except OSError as error:
            raise FastrtError(f"Cannot read the TLS files: {error}.") from error
        return grpc.ssl_channel_credentials(roots, key, chain)


def reachable(address: str, toward: str | None = None) -> str:
    """Say how others reach a server that listens on all addresses of this machine.

    Args:
        address: `host:port` where it listens.
        toward: `host:port` that others are near to; None: wherever the default route leads.
    Returns:
        `address` with this machine's own address there in place of 0.0.0.0; any other address as it is.
    """
    host, _, port = address.rpartition(":")
    if host not in ("0.0.0.0", "[::]"):
        return address
    target, _, target_port = (toward or _DOCUMENTATION).rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((target.strip("[]"), int(target_port)))  # sends nothing: it only asks for the route
            own = sock.getsockname()[0]
        except (OSError, ValueError):
            own = _first_own_address()
    return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"


def _first_own_address() -> str:
    """An address of this machine where no route leads outside."""
    import psutil

    found = [one.address for card in psutil.net_if_addrs().values() for one in card if one.family == socket.AF_INET]
    return next((own for own in found if not ipaddress.ip_address(own).is_loopback), "127.0.0.1")


def is_loopback(address: str) -> bool:
    """Whether `host:port` (or `unix:path`) can be reached from this machine only."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_open_bind(address: str, tls: TlsFiles | None, allow_anonymous: bool) -> None:
    """For a service whose clients cannot carry a token: let it be reached from outside only on purpose.

    Raises:
        InsecureBindError: the address is not loopback, clients need no certificate, and nobody said that this is meant.
    """
    if is_loopback(address) or allow_anonymous or (tls is not None and tls.client_ca is not None):
        return
    raise InsecureBindError(
        f"Serving on {address} would let every machine that can reach it join and change this cluster. Serve on "
        "127.0.0.1, or ask clients for certificates (--tls-cert, --tls-key, --tls-ca), or say --allow-anonymous if "
        "the network itself keeps strangers out."
    )


def refuse_clear_bind(address: str, tls: TlsFiles | None, insecure: bool) -> None:
    """For a service whose clients carry a token: let neither it nor what it guards cross a network in the clear.

    Raises:
        InsecureBindError: the address is not loopback, there is no TLS, and nobody said that this is meant.
    """
    if not is_loopback(address) and tls is None and not insecure:
        raise InsecureBindError(
            f"Serving on {address} would send everything, the session's token too, in the clear over the network. Use "
            "TLS (--tls-cert, --tls-key), or say --insecure if the network itself keeps strangers out."
        )


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
    """Why a call's metadata does not carry the token (`authorization: Bearer <token>`), None when it does."""
    for key, value in metadata:
        if key == "authorization":
            given = value.decode("latin-1") if isinstance(value, bytes) else value
            expected = _BEARER + token
            if hmac.compare_digest(given.encode("latin-1", "replace"), expected.encode("latin-1")):
                return None
            return "The session token of this call is not the one of this session. Use the token file of the session."
    return "This call carries no session token. Set FASTRT_TOKEN_FILE to the session's token file."
