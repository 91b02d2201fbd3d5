"""The cluster's identity: keys and certificates that every process derives from the cluster's secret.

The secret never goes to another machine. Each process derives the private key of the cluster's certificate authority
from it, and signs a certificate for itself; the processes of a node are given theirs by the process that starts them.
Every TCP link between fastrt's own processes is TLS with certificates on both sides, so the handshake proves to both
ends that the peer has the secret, before either end parses a byte.

`cryptography` is imported by the first `Identity` that is made from a token, not by this module, because the import
takes 50 ms: a session on one machine needs none, and a process that was given its credentials needs none.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import hmac
import os
import re
import secrets
import select
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastrt.errors import ConfigError, FastrtError
from fastrt.net.address import join_address, split_address

if TYPE_CHECKING:
    import grpc
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

HANDSHAKE_S = 10.0
_TOKEN = re.compile(r"fastrt1-([0-9a-f]{32})-([0-9a-f]{64})")
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
# A process's certificate is valid for as long as the authority's: its key is only in the memory of that process and
# ends with it, and clocks of machines differ. 9999 is how RFC 5280 writes "no end".
_FROM = datetime.datetime(2020, 1, 1)
_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59)
# A handshake costs a server 1 to 2 ms of its processor, also for a stranger. So many are computed at once.
_SERVER_STEPS = threading.BoundedSemaphore(2)
_ALPN = "h2"  # gRPC closes a connection without it

# By OpenSSL's names: codes of X509_verify_cert, and reasons of its errors.
_CERTIFICATE_FAULTS = {
    9: "its certificate is not valid yet; compare the clocks of both machines",
    10: "its certificate has expired; compare the clocks of both machines, or issue a new certificate",
    18: "another authority has signed its certificate: it has another cluster's token, or none",
    19: "another authority has signed its certificate: it has another cluster's token, or none",
    20: "another authority has signed its certificate: it has another cluster's token, or none",
    21: "another authority has signed its certificate: it has another cluster's token, or none",
    62: "its certificate is for another name: it has another cluster's token",
}
_OTHER_TOKEN = "it does not accept the certificate of this process: it has another cluster's token"
# The peer closed the connection. OpenSSL's version decides which error reports that during a handshake.
_CLOSED = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
_TLS_FAULTS = {
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "HTTP_REQUEST": "it does not speak TLS",
    "PACKET_LENGTH_TOO_LONG": "it does not speak TLS",
    "RECORD_LAYER_FAILURE": "it does not speak TLS",
    "BAD_RECORD_TYPE": "it does not speak TLS",
    "UNEXPECTED_MESSAGE": "it does not speak TLS",
    "UNSUPPORTED_PROTOCOL": "it does not speak TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it does not speak TLS 1.3",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate: it has no token",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it asks for a certificate and this process shows none",
    "TLSV1_ALERT_UNKNOWN_CA": _OTHER_TOKEN,
    "TLSV1_ALERT_DECRYPT_ERROR": _OTHER_TOKEN,
    "SSLV3_ALERT_BAD_CERTIFICATE": _OTHER_TOKEN,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": _OTHER_TOKEN,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it finds the certificate of this process expired; compare the clocks",
    "UNEXPECTED_EOF_WHILE_READING": "it closed the connection before it had proved anything",
}


class IdentityError(FastrtError):
    """The process at the other end of a connection has not proved that it is part of this cluster.

    Nothing was sent to it. The message says why. Give all nodes of a cluster the same token; if the token is right,
    another program listens at the address.
    """


class HandshakeBrokenError(IdentityError, ConnectionError):
    """The connection ended, or the time was over, before the end of the handshake. Another attempt may succeed."""


class Identity:
    """Credentials of one process in a cluster: the authority's certificate, and a key and certificate of this process.

    Make one with `from_token`: the same token gives the same cluster in every process.

    Attributes:
        name: the name in the certificates of all processes of the cluster, such as "3f…c1.fastrt".
    """

    def __init__(self, secret: bytes, name: str, authority_pem: bytes, key_pem: bytes, certificate_pem: bytes) -> None:
        self.name = name
        self._secret = secret
        self._authority_pem = authority_pem
        self._key_pem = key_pem
        self._certificate_pem = certificate_pem

    @classmethod
    def from_token(cls, token: str) -> Identity:
        """Read a token and derive the cluster's identity from it.

        Args:
            token: `fastrt1-<hash>-<secret>`, as `new_token` makes it; space around it is ignored.
        Returns:
            The identity, with a new key for this process.
        Raises:
            ConfigError: this is no token, or characters of it were lost or changed.
        """
        match = _TOKEN.fullmatch(token.strip())
        if match is None:
            raise ConfigError(
                f"this is not a cluster's token: it has {len(token.strip())} characters, and a token has 105, "
                "fastrt1-<32 of 0-9a-f>-<64 of 0-9a-f>. Copy the whole token, or its file, from the head's machine"
            )
        secret = bytes.fromhex(match[2])
        fingerprint = _fingerprint(_authority(secret))
        if fingerprint != match[1]:
            raise ConfigError(
                "this token is damaged: its hash is not that of its secret. Copy it again from the head's machine"
            )
        return cls._issued(secret, fingerprint)

    @classmethod
    def _issued(cls, secret: bytes, fingerprint: str) -> Identity:
        """Make the authority's certificate, and a new key and certificate that it signs."""
        identity = cls(secret, f"{fingerprint[:16]}.fastrt", b"", b"", b"")
        identity._authority_pem = _pem(
            identity._sign(identity.name, identity._authority, _FROM, _UNTIL, is_authority=True)
        )
        identity._renew()
        return identity

    def _renew(self) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        self._key_pem = _key_pem(key)
        self._certificate_pem = _pem(self._sign(self.name, key, _FROM, _UNTIL))

    def for_child(self) -> dict[str, str]:
        """Issue a key and a certificate for a process that this one starts, which then need not import `cryptography`.

        Returns:
            The child's identity, for `from_parent`; it holds the secret, and goes through a pipe only.
        """
        child = Identity(self._secret, self.name, self._authority_pem, b"", b"")
        child._renew()
        pems = {"authority": child._authority_pem, "key": child._key_pem, "certificate": child._certificate_pem}
        return {"secret": self._secret.hex(), "name": self.name} | {name: pem.decode() for name, pem in pems.items()}

    @classmethod
    def from_parent(cls, given: Mapping[str, str]) -> Identity:
        """Take the identity that the parent has issued by `for_child`."""
        pems = (given[name].encode() for name in ("authority", "key", "certificate"))
        return cls(bytes.fromhex(given["secret"]), given["name"], *pems)

    def __repr__(self) -> str:
        return f"Identity({self.name})"

    def key(self, purpose: str) -> bytes:
        """Derive a key from the secret, for one purpose.

        Args:
            purpose: of the key; other purposes get other keys, and no key reveals another one.
        Returns:
            32 bytes, the same in all processes of the cluster.
        """
        return _derive(self._secret, f"fastrt 1 key {purpose}", 32)

    def for_programs(self) -> Identity:
        """Derive the identity of services that programs in other languages use: scheduler, workers and object stores.

        Its authority is another one: a certificate that `write_pem` issues there opens no link between nodes.
        """
        secret = self.key("programs")
        return Identity._issued(secret, _fingerprint(_authority(secret)))

    def write_pem(self, folder: Path, days: int) -> None:
        """Issue a certificate for a program that cannot derive one, and write the files it needs.

        Args:
            folder: created with mode 0700, with ca.pem, cert.pem and key.pem in it, of mode 0600.
            days: how long the certificate is valid.
        Raises:
            ConfigError: the folder exists, or cannot be made.
        """
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
        day = datetime.timedelta(days=1)  # clocks of machines differ
        certificate = _pem(self._sign(self.name, key, now - day, now + days * day))
        files = {"ca.pem": self._authority_pem, "cert.pem": certificate, "key.pem": _key_pem(key)}
        try:
            folder.mkdir(mode=0o700)
            for name, text in files.items():
                fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
                with os.fdopen(fd, "wb") as file:
                    file.write(text)
        except OSError as error:
            raise ConfigError(
                f"the certificate cannot be written: {error}. Name a folder that does not exist yet"
            ) from None

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials for a gRPC server that takes connections from processes of this cluster only."""
        import grpc

        return grpc.ssl_server_credentials(
            [(self._key_pem, self._certificate_pem)], self._authority_pem, require_client_auth=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials for gRPC channels to processes of this cluster; open them with `channel_options` too."""
        import grpc

        return grpc.ssl_channel_credentials(self._authority_pem, self._key_pem, self._certificate_pem)

    def channel_options(self) -> tuple[tuple[str, Any], ...]:
        """Options of a gRPC channel: the server must be this cluster's, at any address."""
        return (("grpc.ssl_target_name_override", self.name),)

    def server_context(self) -> ssl.SSLContext:
        """A TLS 1.3 context for a server that takes connections from processes of this cluster only."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # each connection proves the secret again, so there is nothing to resume
        return context

    @functools.cached_property
    def _authority(self) -> EllipticCurvePrivateKey:
        return _authority(self._secret)

    @functools.cached_property
    def _listening(self) -> ssl.SSLContext:
        """One context for all connections of `open_server`: making one costs as much as a handshake."""
        return self.server_context()

    def client_context(self) -> ssl.SSLContext:
        """A TLS 1.3 context for connections to this cluster; give `server_hostname=identity.name` with it."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def open_server(self, sock: socket.socket, timeout_s: float = HANDSHAKE_S) -> ssl.SSLSocket:
        """Do the TLS handshake with a process that has connected. It has then proved the secret.

        Args:
            sock: a connected blocking socket; closed on failure, else owned by the result.
            timeout_s: the handshake's deadline in seconds.
        Returns:
            The encrypted connection, with the timeout that `sock` had.
        Raises:
            IdentityError: the other end has not proved that it is part of this cluster, or not in time.
        """
        return _shake(sock, self._listening, None, timeout_s)

    def open_client(self, sock: socket.socket, timeout_s: float = HANDSHAKE_S) -> ssl.SSLSocket:
        """Do the TLS handshake with a server that uses `open_server`. Both have then proved the secret.

        Args:
            sock: a connected blocking socket; closed on failure, else owned by the result.
            timeout_s: the handshake's deadline in seconds.
        Returns:
            The encrypted connection, with the timeout that `sock` had.
        Raises:
            IdentityError: the other end has not proved that it is part of this cluster, or not in time.
        """
        return _shake(sock, self.client_context(), self.name, timeout_s)

    def why_refused(self, address: str, timeout_s: float = HANDSHAKE_S) -> str | None:
        """Say why the process at an address is not part of this cluster; gRPC says only UNAVAILABLE.

        It connects once more, does the handshake, and sends nothing else.

        Args:
            address: `host:port` of a gRPC server.
            timeout_s: the deadline in seconds, for connecting and for the handshake each.
        Returns:
            The reason in words; None when it is part of the cluster, or cannot be reached at all.
        """
        try:
            sock = socket.create_connection(split_address(address), timeout_s)
        except (OSError, ValueError):
            return None
        context = self.client_context()
        context.set_alpn_protocols([_ALPN])
        try:
            _shake(sock, context, self.name, timeout_s).close()
        except IdentityError as error:
            return str(error)
        return None

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self._authority_pem.decode())
        # `ssl` reads keys from files only. This file has no name, and no longer exists when it is closed.
        fd = os.memfd_create("fastrt-certificate", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(self._key_pem + self._certificate_pem)
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context

    def _sign(
        self,
        name: str,
        key: EllipticCurvePrivateKey,
        valid_from: datetime.datetime,
        valid_until: datetime.datetime,
        is_authority: bool = False,
    ) -> x509.Certificate:
        """Sign a certificate for a key. Verifiers know the authority by its name and key, and compare nothing else."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        issuer = self._authority.public_key()
        common = x509.NameAttribute(NameOID.COMMON_NAME, f"authority of {self.name}")
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([common if is_authority else x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([common]))
            .public_key(key.public_key())
            .serial_number(1 if is_authority else x509.random_serial_number())
            .not_valid_before(valid_from)
            .not_valid_after(valid_until)
            .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), critical=True)
            .add_extension(_usage(is_authority), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
        )
        if not is_authority:
            both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        return builder.sign(self._authority, hashes.SHA256())


def new_token() -> str:
    """Make a token with a new secret, for a new cluster.

    Returns:
        `fastrt1-<32 hex digits: hash of the authority's public key>-<64 hex digits: the secret>`.
    """
    return _token(secrets.token_bytes(32))


def job_token(key: bytes, job: str) -> str:
    """Derive the token of one job from a key of its user.

    Args:
        key: 32 random bytes.
        job: the job's name; other jobs get other tokens, and no token reveals the key or another token.
    Returns:
        As `new_token`, the same in all processes that have the key.
    """
    return _token(_derive(key, f"fastrt 1 job {job}", 32))


def _token(secret: bytes) -> str:
    return f"fastrt1-{_fingerprint(_authority(secret))}-{secret.hex()}"


def _authority(secret: bytes) -> EllipticCurvePrivateKey:
    """Derive the authority's private key: 384 bits modulo the group's order, so that no key is likelier than others."""
    from cryptography.hazmat.primitives.asymmetric import ec

    number = int.from_bytes(_derive(secret, "fastrt 1 authority", 48), "big")
    return ec.derive_private_key(number % (_P256_ORDER - 1) + 1, ec.SECP256R1())


def _derive(secret: bytes, purpose: str, length: int) -> bytes:
    """HKDF with SHA-256 and no salt (RFC 5869). To import `cryptography` for it would take each process 30 ms."""
    key = hmac.digest(bytes(32), secret, "sha256")
    derived = block = b""
    for number in range(1, 1 + (length + 31) // 32):
        block = hmac.digest(key, block + purpose.encode() + bytes([number]), "sha256")
        derived += block
    return derived[:length]


def _fingerprint(authority: EllipticCurvePrivateKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    public = authority.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(public).hexdigest()[:32]


def _usage(is_authority: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _shake(sock: socket.socket, context: ssl.SSLContext, name: str | None, timeout_s: float) -> ssl.SSLSocket:
    """Do the handshake of one end; `name` is the server's, None at the server.

    In TLS 1.3 the client has finished before the server has checked its certificate. The server's first byte
    confirms that it accepted: the byte that `open_server` sends, or the first one of a gRPC server's settings.
    """
    timeout = sock.gettimeout()
    where = _where(sock)
    try:
        sock.settimeout(timeout_s)
        sock.getpeername()  # on a connection that is gone already `wrap_socket` leaks an open socket
        wrapped = context.wrap_socket(
            sock, server_side=name is None, server_hostname=name, do_handshake_on_connect=False
        )
    except (OSError, ValueError) as error:
        sock.close()
        raise _refusal(where, f"the connection is gone ({error})", HandshakeBrokenError) from None
    try:
        _handshake(wrapped, time.monotonic() + timeout_s, name is None)
        if name is None:
            wrapped.sendall(b"\x01")
        elif not wrapped.recv(1):
            raise ConnectionResetError
        wrapped.settimeout(timeout)
    except (OSError, ValueError) as error:
        wrapped.close()
        broken = isinstance(error, (*_CLOSED, TimeoutError))
        raise _refusal(where, _in_words(error, timeout_s), HandshakeBrokenError if broken else IdentityError) from None
    return wrapped


def _handshake(wrapped: ssl.SSLSocket, until: float, is_server: bool) -> None:
    """Do the handshake step by step; a server waits for its peer without holding one of the few places.

    Afterwards the socket's timeout is the time that is left.
    """
    wrapped.setblocking(False)
    poll = select.poll()
    while True:
        try:
            with _SERVER_STEPS if is_server else contextlib.nullcontext():
                wrapped.do_handshake()
            break
        except ssl.SSLWantReadError:
            events = select.POLLIN
        except ssl.SSLWantWriteError:
            events = select.POLLOUT
        poll.register(wrapped, events)
        if not poll.poll(max(until - time.monotonic(), 0) * 1000):
            raise TimeoutError
    wrapped.settimeout(max(until - time.monotonic(), 0.001))


def _where(sock: socket.socket) -> str:
    try:
        peer = sock.getpeername()
    except OSError:
        return "an unknown address"
    if not isinstance(peer, tuple):
        return str(peer or "a local socket")
    return join_address(peer[0], peer[1])


def _refusal(where: str, why: str, kind: type[IdentityError] = IdentityError) -> IdentityError:
    return kind(f"the process at {where} is not part of this cluster: {why}")


def _in_words(error: Exception, timeout_s: float) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _CERTIFICATE_FAULTS.get(error.verify_code, f"its certificate is refused ({error.verify_message})")
    if isinstance(error, TimeoutError):
        return f"it did not finish the TLS handshake within {timeout_s:g} s"
    if isinstance(error, _CLOSED):
        return "it closed the connection before it had proved anything"
    if isinstance(error, ssl.SSLError):
        return _TLS_FAULTS.get(error.reason or "", f"the TLS handshake failed ({error.reason or error})")
    return f"the TLS handshake failed ({error})"
