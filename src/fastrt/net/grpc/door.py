"""Bounds on the connections of a gRPC server: how many there are, how long one may be silent, and what each may cost.

gRPC's core owns the listening socket and all accepted ones. Its options bound streams, headers and requests not yet
taken (`Limits.options`). They do not bound connections that never make a call, nor answers that are never read. A
`Door` bounds those beside the core: the server reports each call with its peer's address, and a thread scans the
descriptors of this process for connections of the server's port (`_core.transfer.connections`). The door ends a
connection by `shutdown` on a duplicate of its descriptor; the core then reads the end of the stream and cleans up as
usual. Only the door's thread scans descriptors: under load a scan takes longer than hundreds of calls.

The alternative was a proxy in front of the port. A proxy copies each byte twice more, and a call of the coordination
service has 100 us. A scan of 2,000 descriptors costs 10 ms without the interpreter's lock, and none is made while
nothing changes.

A connection is *proven* once one of its calls was accepted: the call carried the token, or the port needs none and the
call was one of its methods. Under mutual TLS no call arrives without the handshake, so a proven peer has a certificate.
Connections that are not proven have a bounded number of places; the one that was silent for longest makes room for the
next.

Threads: the server's thread calls `caller`, `accepted`, `rejected` and the counters, and the door's thread decides by
them. `_lock` guards `_connections` and the counts of unread bytes, which change on any thread that answers.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastrt._core.transfer import connections
from fastrt.config import DESCRIPTORS_MAX, raise_descriptors
from fastrt.net.grpc.visitors import hold_silent

_log = logging.getLogger(__name__)

_CALM_S, _BUSY_S, _HURRY_S = 0.5, 0.1, 0.03
# Without a change in their number, descriptors are scanned this often: a new one may have taken the place of another.
_RESCAN_S = 5.0
# A connection that is not proven and has no place may be silent for so long.
_CROWDED_S = 5.0
# The same at a TLS port: enough for a handshake while many are under way. Half a handshake holds 55 KiB in the core,
# most of it buffers of a fixed size.
_CROWDED_TLS_S = 0.2
# At an open port so many silent connections are ended at each scan. An ended peer connects again: to close and accept
# 1,500 at once delayed calls of others by 36 ms, and eight at a time delay them by 8 ms.
_ENDED_AT_ONCE = 8
# Memory is returned to the system once no connection was ended for so long: that blocks every thread that allocates.
_CALM_ENOUGH_S = 2.0
# While connections are ended without a pause it is returned at most this often, and may take this part of the time:
# among 200 MiB in many pieces it takes 0.4 s, in which calls wait and the core's queue may fill.
_TRIM_S, _TRIM_PART = 1.0, 0.02
_LOG_S = 10.0
# A peer that has answers to read, or sends a request, is ended if it moves fewer bytes a second than this in `stall_s`.
_STALLED_RATE = 4096
_UNREAD_MIN = 64 << 10
# Answers below this size are not counted: the bound on streams is enough for them.
COUNTED_BYTES = 4096
# A connection is ended after so many in a row. Its peer connects again with as many calls as it has ready: with 16,
# calls of others took twice as long beside 2,000 floods of streams, and memory grew by half as much again.
_REJECTED_MAX = 1024
# The core resets calls beyond this many: answering a flood costs as much as taking its calls.
_ANSWERED_MAX = 16
_CALLS_MANY = 256
# While many connections are not proven, each of them may have begun so many requests.
_BEGUN_MAX = 32
_STRANGERS_MANY = 64


@dataclass(frozen=True)
class Limits:
    """Bounds of one server. Bytes are bytes, times are seconds.

    Attributes:
        connections: open connections in all; three quarters of the process's descriptors if that is less.
        unproven: connections without an accepted call. One beyond this number may be silent for 5 s, and for 0.2 s at
            a TLS port.
        greeting_s: how long such a connection may be silent.
        streams: calls under way on one connection. A client of gRPC delays those beyond; the core refuses some of a
            client that stays close to this number. It is a sixteenth of `queued`: few connections cannot fill that.
        pending: calls that wait for an answer, in all.
        queued: calls that the core keeps while the server is busy. It cancels those beyond, of any connection.
        reading: incomplete requests, in all.
        header_bytes: of one call; more than gRPC itself promises to take (8 KiB) only costs memory in a flood of them.
        request_bytes: of incomplete requests of one connection.
        request_bytes_all: the same, of all connections.
        answer_bytes: of answers that one connection has not read.
        answer_bytes_all: the same, of all connections.
        stall_s: after so long without progress, a connection with unread answers or half a request is ended.
        keepalive_s: a silent peer is sent a ping after so long.
        keepalive_timeout_s: how long it has to answer the ping.
    """

    connections: int = 16_384
    unproven: int = 512
    greeting_s: float = 10.0
    streams: int = 512
    pending: int = 65_536
    queued: int = 8192
    reading: int = 2048
    header_bytes: int = 8 << 10
    request_bytes: int = 256 << 20
    request_bytes_all: int = 1 << 30
    answer_bytes: int = 256 << 20
    answer_bytes_all: int = 1 << 30
    stall_s: float = 15.0
    keepalive_s: float = 60.0
    keepalive_timeout_s: float = 30.0

    def options(self) -> tuple[tuple[str, Any], ...]:
        """The options of gRPC that enforce a part of these bounds."""
        return (
            ("grpc.max_allowed_incoming_connections", self.places()),
            ("grpc.server_handshake_timeout_ms", int(self.greeting_s * 1000)),
            ("grpc.max_concurrent_streams", self.streams),
            # The core drops calls at random between these two, so they are one.
            ("grpc.server.max_pending_requests", self.queued),
            ("grpc.server.max_pending_requests_hard_limit", self.queued),
            ("grpc.max_metadata_size", self.header_bytes),
            ("grpc.absolute_max_metadata_size", self.header_bytes),
            ("grpc.keepalive_time_ms", int(self.keepalive_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.keepalive_timeout_s * 1000)),
        )

    def places(self) -> int:
        """Connections in all that the limit on descriptors allows: a quarter stays for the rest of the program."""
        return max(16, min(self.connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4))


class _Wake:
    """An event that `connections.watch` can wait for, too. The thread that waits opens and closes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = -1
        self._poll = select.poll()

    def open(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._descriptor, select.POLLIN)

    def close(self) -> None:
        with self._lock:
            self._poll.unregister(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def fileno(self) -> int:
        return self._descriptor

    def set(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def wait(self, timeout_s: float) -> None:
        self._poll.poll(timeout_s * 1000)

    def clear(self) -> bool:
        """Whether it was set."""
        try:
            return os.eventfd_read(self._descriptor) > 0
        except BlockingIOError:
            return False


class Connection:
    """One connection of a server, by its peer's address.

    Attributes:
        proven: one of its calls was accepted.
        calls: under way.
        reading: incomplete requests.
        unread: bytes of answers that the peer has not read.
        taken: bytes of complete requests.
        doomed: why it is to be ended; "" if it is not.
    """

    __slots__ = (
        "acked",
        "calls",
        "descriptor",
        "doomed",
        "has_called",
        "heard_at",
        "held",
        "inode",
        "is_written_off",
        "mark",
        "mark_at",
        "peer",
        "proven",
        "reading",
        "received",
        "rejected",
        "taken",
        "unread",
        "whole",
    )

    def __init__(self, peer: object, now: float) -> None:
        self.peer = peer
        self.proven = False
        self.has_called = False
        self.heard_at = now
        self.calls = self.reading = self.unread = self.taken = self.rejected = 0
        self.doomed = ""
        self.descriptor = self.inode = -1
        self.is_written_off = False  # its incomplete requests are not in the sum any more
        self.acked = self.received = 0  # bytes, at the last scan
        self.mark_at = 0.0  # since when its progress is measured; 0: it is not measured
        self.mark = (0, 0)  # bytes acknowledged and received then
        self.whole = 0  # bytes received, less those taken, when the measurement began
        self.held = 0  # bytes received of incomplete requests


class Door:
    """Enforces the bounds of one server.

    Args:
        limits: see `Limits`.
    """

    def __init__(self, limits: Limits) -> None:
        raise_descriptors()
        self.limits = limits
        self.reading = 0
        self.unread = 0
        self._places = limits.places()
        self._unproven_max = min(limits.unproven, self._places // 4)
        self._connections: dict[object, Connection] = {}
        self._lock = threading.Lock()
        self._ports: set[int] = set()
        self._has_tls = False
        self._wake = _Wake()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._scanned_at = self._trim_at = self._logged_at = self._ended_at = 0.0
        self._descriptors = -1
        self._ended: dict[str, int] = {}
        self._trim_due = False
        self._is_crowded = False  # many connections are not proven

    def open(self, port: int, tls: bool = False) -> None:
        """Begin to watch the connections of a TCP port. A Unix socket needs no watch: its folder is private.

        Args:
            port: of TCP.
            tls: whether its connections begin with a TLS handshake.
        """
        self._ports.add(port)
        self._has_tls = self._has_tls or tls
        for listener in _listeners(port):
            hold_silent(listener)
        if self._thread is None:
            self._wake.open()
            self._thread = threading.Thread(target=self._run, name="fastrt-door", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def count(self) -> int:
        """Number of known connections."""
        return len(self._connections)

    def is_open(self, peer: object) -> bool:
        """Whether a connection is open, by its peer's name; one of a Unix socket counts as open: no scan shows it."""
        if not isinstance(peer, bytes) or peer.startswith(b"unix"):
            return True
        for port in self._ports:
            found = connections.find(port, DESCRIPTORS_MAX)
            if found is None or any(_name_of(host, number) == peer for _, _, host, number, _, _ in found):
                return True
        return False

    def caller(self, peer: object) -> Connection:
        """Return the connection of a new call, by gRPC's name of its peer."""
        now = time.monotonic()
        found = self._connections.get(peer)
        if found is None:
            with self._lock:
                found = self._connections.setdefault(peer, Connection(peer, now))
        found.heard_at = now
        found.has_called = True
        return found

    def accepted(self, connection: Connection) -> None:
        """Note a call that carried the token, or needed none."""
        connection.proven = True
        connection.rejected = 0

    def rejected(self, connection: Connection) -> bool:
        """Note a call that was refused, or whose caller left before the request was complete; whether to answer it.

        Too many in a row end the connection.
        """
        connection.rejected += 1
        if connection.rejected >= _REJECTED_MAX:
            self.doom(connection, "made only calls that were refused")
        return connection.rejected <= _ANSWERED_MAX

    def begin_reading(self, connection: Connection) -> None:
        """Note the begin of a request; of too many in all, those of the connection with the most are dropped."""
        connection.reading += 1
        if not connection.is_written_off:
            self.reading += 1
        if self._is_crowded and not connection.proven and connection.reading > _BEGUN_MAX:
            self.doom(connection, "began many requests while many connections were not proven")
        if self.reading > self.limits.reading:
            largest = self._largest("reading")
            if largest is not None:
                self.reading -= largest.reading
                largest.is_written_off = True
                self.doom(largest, "began requests and did not end them")

    def end_reading(self, connection: Connection, size: int) -> None:
        """Note the end of a request: `size` bytes were received, or its caller has left."""
        connection.reading -= 1
        connection.taken += size
        if not connection.is_written_off:
            self.reading -= 1

    def make_place(self, pending: int) -> str:
        """Reason why one more call cannot wait; "" if it can.

        Args:
            pending: how many calls wait.
        """
        if pending < self.limits.pending:
            return ""
        largest = self._largest("calls")
        if largest is not None and largest.calls >= _CALLS_MANY:
            self.doom(largest, "had the most calls when there were too many")
        return f"{pending} calls wait for an answer here, and no more are taken; try again later."

    def refused_answer(self, connection: Connection, size: int) -> str:
        """Reason why an answer cannot be sent now; "" if it can."""
        limits = self.limits
        if connection.unread and connection.unread + size > limits.answer_bytes:
            return (
                f"{connection.unread} bytes of answers wait to be read by this client; with {size} more they would be "
                f"more than {limits.answer_bytes}. Read those first, or ask for less at once."
            )
        if self.unread and self.unread + size > limits.answer_bytes_all:
            return (
                f"{self.unread} bytes of answers wait to be read by all clients; with {size} more they would be more "
                f"than {limits.answer_bytes_all}. Try again later."
            )
        return ""

    def sending(self, connection: Connection, size: int) -> None:
        """Note an answer that was passed to gRPC."""
        with self._lock:  # answers are sent on any thread
            connection.unread += size
            self.unread += size

    def sent(self, connection: Connection, size: int) -> None:
        """Note that an answer was sent, or its caller is gone."""
        with self._lock:
            connection.unread -= size
            self.unread -= size

    def doom(self, connection: Connection, why: str) -> None:
        """End a connection: now if its descriptor is known, else by the door's thread."""
        if connection.doomed:
            return
        connection.doomed = why
        self._ended[why] = self._ended.get(why, 0) + 1
        if connection.descriptor < 0 or not connections.end(connection.descriptor, connection.inode):
            self._wake.set()

    def _largest(self, field: str) -> Connection | None:
        with self._lock:
            every = [each for each in self._connections.values() if not each.doomed]
        return max(every, key=lambda each: int(getattr(each, field)), default=None)

    def _run(self) -> None:
        try:
            self._look_until_closed()
        finally:
            self._wake.close()

    def _look_until_closed(self) -> None:
        busy = False
        while True:
            if busy or self._trim_due or self._ended or not self._descriptors:
                self._wake.wait(_BUSY_S if busy else _CALM_S)
            else:
                connections.watch(self._wake.fileno(), self._descriptors, int(_CALM_S * 1000), int(_RESCAN_S / _CALM_S))
            if self._wake.clear() and not self._closing:
                time.sleep(_HURRY_S)  # a flood wakes this thread at each of its calls
            if self._closing:
                return
            try:
                busy = self._check()
            except Exception:
                _log.exception("the connections of ports %s cannot be watched", sorted(self._ports))
                busy = False

    def _check(self) -> bool:
        """Check the connections and end those beyond a bound; whether to check again soon."""
        now = time.monotonic()
        count = connections.count()
        with self._lock:
            every = list(self._connections.values())
        busy = _is_busy(every)
        if count == 0 or count != self._descriptors or busy or now - self._scanned_at >= _RESCAN_S:
            self._descriptors = count
            every = self._scan(now)
            busy = busy or _is_busy(every)
            self._judge_silent(every, now)
            for each in every:
                self._judge_progress(each, now)
            self._judge_requests([each for each in every if each.held])
            for each in every:
                if each.doomed:
                    connections.end(each.descriptor, each.inode)
        self._after(now)
        return busy

    def _scan(self, now: float) -> list[Connection]:
        """Find the connections among the descriptors of this process, and forget those that have ended."""
        self._scanned_at = now
        live = []
        for port in self._ports:
            found = connections.find(port, DESCRIPTORS_MAX)
            if found is None:
                return []  # the program has used up its descriptors; the core takes no connection either
            live += [self._seen(now, *each) for each in found]
        names = {each.peer for each in live}
        with self._lock:
            for peer, each in list(self._connections.items()):
                # A connection that made a call a moment ago may be too new for the list.
                if peer not in names and (each.descriptor >= 0 or now - each.heard_at > _RESCAN_S):
                    del self._connections[peer]
                    self._trim_due, self._ended_at = True, now
        return live

    def _seen(
        self, now: float, descriptor: int, inode: int, host: bytes, port: int, acked: int, received: int
    ) -> Connection:
        """Update or make the record of a connection that was found."""
        peer = _name_of(host, port)
        found = self._connections.get(peer)
        if found is None or (found.inode >= 0 and found.inode != inode):
            with self._lock:
                found = self._connections[peer] = Connection(peer, now)
        found.descriptor, found.inode = descriptor, inode
        found.acked, found.received = acked, received
        return found

    def _judge_silent(self, every: list[Connection], now: float) -> None:
        """Doom silent connections that are not proven, and of all others those silent for longest."""
        limits = self.limits
        unproven = [each for each in every if not each.proven and not each.doomed]
        self._is_crowded = len(unproven) > _STRANGERS_MANY
        excess = len(unproven) - self._unproven_max
        patience_s = _CROWDED_TLS_S if self._has_tls else _CROWDED_S
        left = len(unproven) if self._has_tls else _ENDED_AT_ONCE
        for place, each in enumerate(sorted(unproven, key=_worth)):
            silent_s = now - each.heard_at
            if left > 0 and silent_s > limits.greeting_s:
                self.doom(each, f"made no call in {limits.greeting_s:g} s")
                left -= 1
            elif left > 0 and place < excess and silent_s > patience_s:
                self.doom(each, f"made no call while more than {self._unproven_max} did not")
                left -= 1
        excess = len(every) - self._places * 9 // 10
        for each in sorted((each for each in every if not each.calls), key=_worth)[: max(0, excess)]:
            self.doom(each, "was idle for longest when there were too many")

    def _judge_progress(self, each: Connection, now: float) -> None:
        """Doom a connection that reads no answers, stops inside a request, or sends too much of incomplete requests."""
        acked, received = each.acked, each.received
        if each.reading <= 0 and each.unread < _UNREAD_MIN:
            each.mark_at, each.held = 0.0, 0
            return
        if not each.mark_at:
            each.mark_at, each.mark = now, (acked, received)
            each.whole = received - each.taken
            return
        each.held = received - each.taken - each.whole if each.reading > 0 else 0
        if each.held > self.limits.request_bytes:
            self.doom(each, "sent too many bytes of incomplete requests")
        if now - each.mark_at < self.limits.stall_s:
            return
        enough = _STALLED_RATE * self.limits.stall_s
        if each.unread >= _UNREAD_MIN and acked - each.mark[0] < enough:
            self.doom(each, "did not read its answers")
        elif each.reading > 0 and received - each.mark[1] < enough:
            self.doom(each, "did not send the rest of its requests")
        each.mark_at, each.mark = now, (acked, received)

    def _judge_requests(self, held: list[Connection]) -> None:
        """Doom the largest senders of incomplete requests that are too large together."""
        excess = sum(each.held for each in held) - self.limits.request_bytes_all
        for each in sorted(held, key=lambda each: each.held, reverse=True):
            if excess <= 0:
                return
            self.doom(each, "sent the most bytes of incomplete requests when there were too many")
            excess -= each.held

    def _after(self, now: float) -> None:
        """Return memory to the system, and log the connections that were ended."""
        if self._trim_due and (now - self._ended_at >= _CALM_ENOUGH_S or now >= self._trim_at):
            self._trim_due = False
            _trim()
            self._trim_at = now + max(_TRIM_S, (time.monotonic() - now) / _TRIM_PART)
        if self._ended and now - self._logged_at >= _LOG_S:
            self._logged_at = now
            ended, self._ended = self._ended, {}
            for why, count in ended.items():
                _log.warning("ended %d connections to port %s: each %s", count, sorted(self._ports), why)


def _name_of(host: bytes, port: int) -> bytes:
    """gRPC's name of a peer."""
    if host.startswith(b"::ffff:") and b"." in host:
        host = host[7:]
    return b"ipv6:%%5B%b%%5D:%d" % (host, port) if b":" in host else b"ipv4:%b:%d" % (host, port)


def _is_busy(every: list[Connection]) -> bool:
    """Whether a connection among these may come near a bound soon."""
    return any(each.doomed or not each.proven or each.reading or each.unread >= _UNREAD_MIN for each in every)


def _worth(each: Connection) -> tuple[bool, bool, float]:
    """Sort key: connections that make room for others come first."""
    return each.proven, each.has_called, each.heard_at


def _listeners(port: int) -> Iterator[socket.socket]:
    """Yield a duplicate of each listening socket of this process at a TCP port; gRPC's core owns the originals."""
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:
            continue  # closed meanwhile
        try:
            sock = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)  # no socket
            continue
        with sock:
            is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
            if is_tcp and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.getsockname()[1] == port:
                yield sock


def _trim() -> None:
    """Return unused memory of malloc to the system: after a flood of connections that is most of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
