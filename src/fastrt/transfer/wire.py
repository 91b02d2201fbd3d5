"""The native stream between two stores: who speaks first, what a frame looks like, what is checked.

    source -> taker   hello    magic, version, nonce
    taker  -> source  login    magic, version, flags, nonce, HMAC-SHA256 of both nonces by the session's token
    source -> taker   welcome  magic, the source's own HMAC
    taker  -> source  request  {ticket, objref, offset}, any number, at any time
    source -> taker   frame    header with the request's ticket, names of contained references, data
                   or bundle   header, a list of small objects, the data of all of them

Objects that were asked for over one connection take turns, frame by frame; small ones without references that were
asked for together come together.

Either side proves that it knows the token without sending it, and what was recorded of one connection is worth
nothing on another. A frame holds at most FRAME_BYTES of data, in order within its object, with a CRC-32C of its
header always and of its data unless the taker does without (over loopback there is no wire to mistrust). A frame
counts when it is whole and its checksum right: after a broken connection the object goes on at that offset.
All numbers are little-endian.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import struct
import time
from typing import NamedTuple

from fastrt._core import stream
from fastrt.transfer.table import TransferError

VERSION = 2
FRAME_BYTES = 4 << 20
REFS_MAX = 1 << 20
TEXT_BYTES_MAX = 4096
REQUESTS_MAX = 256  # that a taker may have open; so a few KiB, which fit into a socket's buffer while nobody reads
HANDSHAKE_S = 10.0  # for all of it, however the bytes are dealt out

# A frame's status; with ABSENT and REFUSED the data are a text that says why.
OK, ABSENT, REFUSED, BUNDLE = 0, 1, 2, 3
BUNDLE_MAX = 48  # objects in a bundle
SMALL_BYTES = 256 << 10  # of an object in a bundle

CHECKSUM = 1  # a login's flag: put checksums on data
ERROR, CHECKED = 1, 2  # a frame's flags: the value is an error; `crc` is that of the data

_MAGIC = b"fastrtN1"
_HELLO = struct.Struct("<8sI4x32s")
_LOGIN = struct.Struct("<8sII32s32s")
_WELCOME = struct.Struct("<8s32s")
REQUEST = struct.Struct("<4sIQQI")
_REQUEST_MAGIC = b"frtR"
HEAD = struct.Struct("<4sHHIIIQQQQII")
_HEAD_MAGIC = b"frtD"
_HEAD_BYTES_CHECKED = HEAD.size - 4
ENTRY = struct.Struct("<IHHQII")  # of a bundle's list


class WireError(TransferError):
    """The other end of a native stream breaks the rules: it is no store of this version, or lies about an object."""


class BrokenError(TransferError):
    """What came over a native stream was damaged on the way; the object goes on over a new connection."""


class Frame(NamedTuple):
    """A frame's header, checked for itself but not against its object."""

    status: int
    kind: int
    flags: int
    nrefs: int
    ticket: int
    objref: int
    total: int
    offset: int
    length: int
    crc: int


class Entry(NamedTuple):
    """A whole object of a bundle."""

    ticket: int
    kind: int
    flags: int
    objref: int
    total: int
    crc: int


class Request(NamedTuple):
    """An object is wanted from a byte on; its frames carry the ticket."""

    ticket: int
    objref: int
    offset: int


def pack_request(request: Request) -> bytes:
    """Write a request."""
    head = REQUEST.pack(_REQUEST_MAGIC, *request, 0)[:-4]
    return head + stream.crc32c(head).to_bytes(4, "little")


def read_request(data: bytes | bytearray | memoryview, at: int) -> Request:
    """Read a request.

    Raises:
        WireError: it is none.
    """
    magic, *fields, crc = REQUEST.unpack_from(data, at)
    if magic != _REQUEST_MAGIC or crc != stream.crc32c(memoryview(data)[at : at + REQUEST.size - 4]):
        raise WireError("the other end sent something that is no request")
    return Request(*fields)


def pack_frame(frame: Frame) -> bytes:
    """Write a frame's header."""
    head = HEAD.pack(_HEAD_MAGIC, *frame, 0)[:_HEAD_BYTES_CHECKED]
    return head + stream.crc32c(head).to_bytes(4, "little")


def read_frame(head: bytearray) -> Frame:
    """Read a frame's header.

    Raises:
        WireError: it is none, or says what cannot be.
        BrokenError: its checksum is wrong.
    """
    magic, *fields, crc = HEAD.unpack(head)
    if magic != _HEAD_MAGIC:
        raise WireError("the other end sent something that is no frame")
    if crc != stream.crc32c(memoryview(head)[:_HEAD_BYTES_CHECKED]):
        raise BrokenError("a frame's header was damaged on the way")
    frame = Frame(*fields)
    if frame.status == BUNDLE:
        if not 0 < frame.nrefs <= BUNDLE_MAX or frame.length > frame.nrefs * (ENTRY.size + SMALL_BYTES):
            raise WireError(f"a bundle of {frame.nrefs} objects has {frame.length} bytes")
        return frame
    if frame.status != OK:
        if frame.length > TEXT_BYTES_MAX or frame.nrefs:
            raise WireError(f"the reason for refusing object {frame.objref:#x} has {frame.length} bytes")
        return frame
    most = min(FRAME_BYTES, frame.total - frame.offset)
    if frame.offset > frame.total or frame.length > most or (frame.length == 0 and frame.total):
        raise WireError(
            f"a frame of object {frame.objref:#x} brings {frame.length} bytes at {frame.offset} of {frame.total}"
        )
    if frame.nrefs > REFS_MAX or (frame.nrefs and frame.offset):
        raise WireError(f"a frame of object {frame.objref:#x} names {frame.nrefs} references at {frame.offset}")
    return frame


def pack_bundle(entries: list[Entry]) -> bytes:
    """Write a bundle's header and list; the data follow, in the order of the list."""
    table = b"".join([ENTRY.pack(*entry) for entry in entries])
    length = len(table) + sum([entry[4] for entry in entries])
    return pack_frame(Frame(BUNDLE, 0, 0, len(entries), 0, 0, length, 0, length, stream.crc32c(table))) + table


def read_entries(frame: Frame, table: bytearray) -> list[Entry]:
    """Read a bundle's list.

    Raises:
        WireError: it says what cannot be.
        BrokenError: its checksum is wrong.
    """
    if frame.crc != stream.crc32c(table):
        raise BrokenError("a bundle's list was damaged on the way")
    entries = [Entry._make(fields) for fields in ENTRY.iter_unpack(table)]
    sizes = [entry.total for entry in entries]
    if max(sizes) > SMALL_BYTES or sum(sizes) + len(table) != frame.length:
        raise WireError(f"the objects of a bundle of {frame.length} bytes have {sum(sizes)}, one of them {max(sizes)}")
    return entries


# ---- handshake ----


def accept(sock: socket.socket, token: str, timeout_s: float = HANDSHAKE_S) -> bool:
    """The source's half of the handshake.

    Args:
        sock: a connected socket.
        token: the session's.
        timeout_s: until the other end must have said all of its login.
    Returns:
        Whether the taker wants checksums.
    Raises:
        WireError: it does not know the token, or is no store of this version.
        OSError, EOFError: the connection is broken, or the other end silent.
    """
    fd, deadline = sock.fileno(), time.monotonic() + timeout_s
    hello = _HELLO.pack(_MAGIC, VERSION, secrets.token_bytes(32))
    stream.send_parts(fd, [hello], timeout_s)
    login = _receive(fd, _LOGIN.size, deadline)
    magic, version, flags, _, proof = _LOGIN.unpack(login)
    if magic != _MAGIC or version != VERSION:
        raise WireError(f"whoever connected is no store of version {VERSION}")
    said = hello + bytes(login[:-32])
    if not hmac.compare_digest(proof, _proof(token, b"taker", said)):
        raise WireError("whoever connected does not know the session's token")
    stream.send_parts(fd, [_WELCOME.pack(_MAGIC, _proof(token, b"source", said))], timeout_s)
    return bool(flags & CHECKSUM)


def connect(
    address: str, token: str, checksum: bool | None, timeout_s: float = HANDSHAKE_S
) -> tuple[socket.socket, bool]:
    """Connect to a source; the taker's half of the handshake.

    Args:
        address: host:port.
        token: the session's.
        checksum: whether data are to be checksummed; None: unless both ends are on this machine.
        timeout_s: for the connection, and again for the handshake.
    Returns:
        A socket on which requests can be sent, and whether data come with checksums.
    Raises:
        WireError: it is no store of this version, or does not know the token.
        ConnectionError: it hung up, as it does when our token is wrong.
        OSError, EOFError: nobody listens there, or the connection is broken.
    """
    host, port = split_address(address)
    sock = socket.create_connection((host, port), timeout_s)
    try:
        prepare(sock)
        fd, deadline = sock.fileno(), time.monotonic() + timeout_s
        hello = _receive(fd, _HELLO.size, deadline)
        magic, version, _ = _HELLO.unpack(hello)
        if magic != _MAGIC or version != VERSION:
            raise WireError(f"{address} is no store of version {VERSION}")
        if checksum is None:
            checksum = not ipaddress.ip_address(sock.getpeername()[0]).is_loopback
        login = _LOGIN.pack(_MAGIC, VERSION, CHECKSUM * checksum, secrets.token_bytes(32), b"")[:-32]
        said = bytes(hello) + login
        stream.send_parts(fd, [login, _proof(token, b"taker", said)], timeout_s)
        try:
            welcome = _receive(fd, _WELCOME.size, deadline)
        except (EOFError, ConnectionResetError) as exc:
            raise ConnectionError(f"{address} hung up: it has another session's token, or too many takers") from exc
        magic, proof = _WELCOME.unpack(welcome)
        if magic != _MAGIC or not hmac.compare_digest(proof, _proof(token, b"source", said)):
            raise WireError(f"{address} does not know the session's token")
    except BaseException:
        sock.close()
        raise
    return sock, checksum


def _receive(fd: int, nbytes: int, deadline: float) -> bytearray:
    """So many bytes of a handshake. Unlike data, they must be there by then: each byte more is no reason to wait on."""
    data, have = bytearray(nbytes), 0
    begun = time.monotonic()
    while have < nbytes:
        left = deadline - time.monotonic()
        try:
            have += stream.receive_parts(fd, [memoryview(data)[have:]], 1, max(left, 0.0))
        except TimeoutError:
            waited = time.monotonic() - begun
            raise TimeoutError(f"{have} of {nbytes} bytes of the handshake came in {waited:.1f} s") from None
    return data


def prepare(sock: socket.socket) -> None:
    """Small frames go at once; a peer that vanished without a word is noticed within a minute."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port".

    Raises:
        WireError: it is neither.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise WireError(f"{address!r} is no address of a store; it must be host:port")
    return host.strip("[]"), int(port)


def _proof(token: str, who: bytes, said: bytes) -> bytes:
    return hmac.digest(token.encode(), b"fastrt native stream " + who + said, "sha256")
