"""The meeting of a job: the others ask rank 0 where the head is, and stay connected until the program has ended.

Every connection is TLS with certificates of the job's token on both sides, so each side has proved the token before the
other one reads a byte. The first message of a process is its `Hello`. Rank 0 answers with `where` once its node is up,
or with the reason why it refuses. After that rank 0 says only that the job ends soon, by a line, and that it is over,
by the end of the connection. So a job ends on all machines however rank 0 ends. A process that names a door in its
`Hello` is connected to that service of rank 0 instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastrt.errors import FastrtError
from fastrt.foreign_text import read_object
from fastrt.launch.jax import forward
from fastrt.net.address import join_address, split_address
from fastrt.net.grpc.identity import HandshakeBrokenError, Identity, IdentityError
from fastrt.versions import are_versions, disagreement, numpy_warning, own_versions

_PORTS, _PORT_MIN, _PORT_RANGE = 8, 10_000, 20_000  # below the ports that the kernel gives to outgoing connections
_GREETING_S = 5.0
_GREETINGS_MAX = 32  # connections that have proved nothing yet; the oldest makes room
_LINE_MAX = 16_384
_CONNECT_S = 2.0
_AGAIN_S = 0.1
_END_S = 10.0
_REFUSAL_S = 2.0  # for the processes of the job to come and learn that it cannot start
_NAME_MAX = 256
# A machine that lost its power or its network is noticed within 25 s.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class RefusedError(FastrtError):
    """Rank 0 does not take this process into the job; the message says why."""


def ports_of(identity: Identity) -> list[int]:
    """Return the ports at which rank 0 of a job may listen, in their order: other jobs have other ones."""
    digest = hashlib.blake2b(identity.key("meeting ports"), digest_size=2 * _PORTS).digest()
    numbers = [int.from_bytes(digest[k : k + 2], "big") for k in range(0, len(digest), 2)]
    return [_PORT_MIN + number % _PORT_RANGE for number in numbers]


@dataclass
class Arrival:
    """A process of the job that has connected.

    Attributes:
        rank: its rank.
        name: the name of its node.
        refused: why it was refused; empty: it was not.
    """

    rank: int
    name: str
    refused: str = ""


@dataclass(eq=False)
class _Caller:
    sock: socket.socket
    since: float = field(default_factory=time.monotonic)


class Meeting:
    """Rank 0's side: takes connections until `close`.

    Args:
        identity: of the job.
        size: processes of the job.
        port: where to listen; 0: the first free one of `ports_of`.
        say: prints a line for people.

    Attributes:
        port: where it listens.

    Raises:
        FastrtError: no port is free.
    """

    def __init__(self, identity: Identity, size: int, port: int, say: Callable[[str], None]) -> None:
        self._identity = identity
        self._size = size
        self._say = say
        self._lock = threading.Condition()
        self._arrivals: dict[int, Arrival] = {}
        self._greetings: dict[_Caller, None] = {}
        self._callers: set[_Caller] = set()
        self._attending: set[_Caller] = set()  # those that have the answer
        self._is_ending = False
        self._where: dict[str, Any] | None = None
        self._refusal = ""
        self._doors: dict[str, Callable[[], socket.socket]] = {}
        self._closing = False
        self._warned = False
        self._listener = _listen([port] if port else ports_of(identity))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="fastrt-meeting", daemon=True)
        self._thread.start()

    def open(self, where: Mapping[str, Any], doors: Mapping[str, Callable[[], socket.socket]] | None = None) -> None:
        """Answer the processes that wait, and those that come later.

        Args:
            where: the answer; "port" in it is that of the head, at the address at which the process reached this one.
            doors: services of rank 0 by name: functions that connect to one.
        """
        with self._lock:
            self._where = dict(where)
            self._doors = dict(doors or {})
            self._lock.notify_all()

    def refuse(self, why: str) -> None:
        """Say to the processes that wait, and to those that come in the next two seconds, that the job cannot start."""
        with self._lock:
            self._refusal = why
            self._lock.notify_all()
            self._lock.wait_for(lambda: len(self._arrivals) == self._size - 1 and not self._callers, _REFUSAL_S)

    def end_soon(self) -> None:
        """Say to all processes, once, that the program was asked to end."""
        with self._lock:
            callers, self._is_ending = [] if self._is_ending else list(self._attending), True
        for caller in callers:
            with contextlib.suppress(OSError):
                caller.sock.sendall(b"\n")

    def arrivals(self) -> dict[int, Arrival]:
        """Return the processes that have come, by rank."""
        with self._lock:
            return dict(self._arrivals)

    def close(self) -> None:
        """Say that the job is over, and wait until all processes have gone, at most 10 s."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
            callers = list(self._callers)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for caller in callers:
            with contextlib.suppress(OSError):
                caller.sock.shutdown(socket.SHUT_WR)
        with self._lock:
            self._lock.wait_for(lambda: not self._callers, _END_S)
            for caller in self._callers:
                with contextlib.suppress(OSError):
                    caller.sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if not self._closing:
                    time.sleep(_AGAIN_S)  # no descriptor is free
                continue
            caller = _Caller(sock)
            with self._lock:
                if len(self._greetings) >= _GREETINGS_MAX:
                    oldest = next(iter(self._greetings))
                    del self._greetings[oldest]
                    with contextlib.suppress(OSError):
                        oldest.sock.shutdown(socket.SHUT_RDWR)
                self._greetings[caller] = None
            threading.Thread(target=self._serve, args=[caller], name="fastrt-attend", daemon=True).start()

    def _serve(self, caller: _Caller) -> None:
        sock = caller.sock
        try:
            sock = self._identity.open_server(sock, _GREETING_S)
            hello = _receive(sock, _GREETING_S, {"rank": int, "name": str, "versions": dict})
            with self._lock:
                self._greetings.pop(caller, None)
                caller.sock = sock
                self._callers.add(caller)
            if "door" in hello:
                self._lead(sock, hello["door"])
                return
            arrival = self._arrival(hello)
            if arrival.refused:
                _send(sock, {"refused": arrival.refused})
                return
            with self._lock:
                self._lock.wait_for(lambda: self._where is not None or self._refusal or self._closing)
                where = {} if self._where is None else dict(self._where)
            if self._refusal:
                _send(sock, {"refused": self._refusal})
            elif where:
                _send(sock, {**where, "head": join_address(sock.getsockname()[0], where["port"])})
                sock.settimeout(None)
                with self._lock:
                    self._attending.add(caller)
                while sock.recv(_LINE_MAX):
                    continue
        except (OSError, FastrtError):  # the process has gone, or is none of this job
            return
        finally:
            with self._lock:
                self._greetings.pop(caller, None)
                self._callers.discard(caller)
                self._attending.discard(caller)
                self._lock.notify_all()
            sock.close()

    def _lead(self, sock: socket.socket, door: Any) -> None:
        """Connect a process to a service of this one until one of them ends the connection."""
        with self._lock:
            self._lock.wait_for(lambda: self._where is not None or self._closing, _GREETING_S)
            connect = self._doors.get(door) if isinstance(door, str) else None
        if connect is None:
            _send(sock, {"refused": f"rank 0 has no {str(door)[:_NAME_MAX]!r} for this job"})
            return
        with connect() as other:
            _send(sock, {})
            forward(sock, other)

    def _arrival(self, hello: dict[str, Any]) -> Arrival:
        """Take in a process, or find why not."""
        rank, name, versions = hello["rank"], hello["name"], hello["versions"]
        if not 0 < rank < self._size or len(name) > _NAME_MAX or not name.isprintable():
            return Arrival(rank, "", f"rank {rank} is none of the {self._size} of this job")
        if not all(isinstance(text, str) for text in versions.values()) or not are_versions(versions):
            return Arrival(rank, name, "it reports no versions")
        arrival = Arrival(rank, name, disagreement(versions, name, here=socket.gethostname()))
        with self._lock:
            self._arrivals[rank] = arrival
            warning = "" if self._warned else numpy_warning(versions, name)
            self._warned = self._warned or bool(warning)
        if arrival.refused:
            self._say(f"{name} is refused: {arrival.refused}")
        elif warning:
            self._say(warning)
        return arrival


class Attendance:
    """The connection of another rank to rank 0, until the job is over.

    Args:
        sock: the connection, after `where`.

    Attributes:
        where: rank 0's answer: head (its address), and what `Meeting.open` was given.
        address: of rank 0's meeting.
        host: the address of this machine on the way to rank 0.
        ends_soon: rank 0 has said that the program was asked to end.
    """

    def __init__(self, sock: socket.socket, where: dict[str, Any]) -> None:
        self._sock = sock
        self.ends_soon = False
        self.where = where
        self.address = join_address(*sock.getpeername()[:2])
        self.host: str = sock.getsockname()[0]

    def wait(self) -> None:
        """Return when the job is over, or rank 0 is lost."""
        self._sock.settimeout(None)
        with contextlib.suppress(OSError):
            while self._sock.recv(_LINE_MAX):
                self.ends_soon = True

    def close(self) -> None:
        """End the connection; `wait` returns."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def attend(
    identity: Identity,
    addresses: Callable[[], Sequence[str]],
    rank: int,
    name: str,
    patience_s: float,
    timeout_s: float,
    say: Callable[[str], None],
) -> Attendance:
    """Connect to rank 0, and wait until its node is up.

    Args:
        identity: of the job.
        addresses: returns the addresses to try, and may raise OSError if a name cannot be resolved.
        rank, name: of this process and its node.
        patience_s: after so long, and again after each such time, the reason is printed.
        timeout_s: how long to try.
        say: prints a line for people.
    Raises:
        RefusedError: rank 0 refuses this process.
        FastrtError: rank 0 is not reached in time; the message says why.
    """
    start = time.monotonic()
    reports = 1
    hello = {"rank": rank, "name": name, "versions": dict(own_versions())}
    while True:
        why = ""
        try:
            tried = addresses()
        except OSError as exc:
            tried, why = [], str(exc)
        for address in tried:
            try:
                return _attend(identity, address, hello, start + timeout_s)
            except RefusedError:
                raise
            except (IdentityError, OSError, EOFError) as exc:
                # Where a port belongs to another program, the reason of the other ports is not worth more.
                if not why or (isinstance(exc, IdentityError) and not isinstance(exc, HandshakeBrokenError)):
                    why = _in_words(address, exc)
        waited = time.monotonic() - start
        if waited > timeout_s:
            raise FastrtError(f"{name} cannot reach rank 0 of the job in {timeout_s:g} s: {why}")
        if waited > reports * patience_s:
            reports += 1
            say(f"{name} waits for rank 0 of the job since {waited:.0f} s: {why}")
        time.sleep(_AGAIN_S)


def enter(identity: Identity, address: str, door: str, rank: int, name: str) -> socket.socket:
    """Connect to a service of rank 0 by its meeting.

    Args:
        identity: of the job.
        address: of the meeting.
        door: name of the service.
        rank, name: of this process and its node.
    Raises:
        RefusedError: rank 0 has no such service.
        FastrtError, OSError, EOFError: rank 0 is not reached.
    """
    hello = {"rank": rank, "name": name, "versions": {}, "door": door}
    return _greeted(identity, address, hello, 2 * _GREETING_S)[0]


def _attend(identity: Identity, address: str, hello: dict[str, Any], until: float) -> Attendance:
    return Attendance(*_greeted(identity, address, hello, max(until - time.monotonic(), 1.0)))


def _greeted(
    identity: Identity, address: str, hello: dict[str, Any], timeout_s: float
) -> tuple[socket.socket, dict[str, Any]]:
    """Connect to rank 0 and say hello; the connection and the answer."""
    sock = socket.create_connection(split_address(address), _CONNECT_S)
    sock = identity.open_client(sock, _GREETING_S)
    try:
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        _send(sock, hello)
        answer = _receive(sock, timeout_s, {})
        if "refused" in answer:
            raise RefusedError(f"rank 0 of the job at {address} refuses {hello['name']}: {answer['refused']}")
        return sock, answer
    except BaseException:
        sock.close()
        raise


def _in_words(address: str, exc: Exception) -> str:
    if isinstance(exc, FastrtError):
        return str(exc)
    if isinstance(exc, TimeoutError):
        return f"no answer from {address}: is it the right network? Give --host on rank 0, or --head here"
    return f"{address}: {exc.strerror if isinstance(exc, OSError) and exc.strerror else exc}"


def _listen(ports: Sequence[int]) -> socket.socket:
    """Listen at the first free port, on all addresses of this machine.

    Raises:
        FastrtError: none is free.
    """
    for port in ports:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("0.0.0.0", port))
            sock.listen(128)
            return sock
        except OSError:
            sock.close()
    raise FastrtError(f"the ports {', '.join(map(str, ports))} of this job are all in use here; give --head HOST:PORT")


def _send(sock: socket.socket, message: Mapping[str, Any]) -> None:
    sock.sendall(json.dumps(message).encode() + b"\n")


def _receive(sock: socket.socket, timeout_s: float, fields: Mapping[str, type]) -> dict[str, Any]:
    """Read one line of JSON.

    Raises:
        EOFError: the connection ended before its end.
        OSError: it broke, or the time was over.
        ForeignTextError: the line is malformed.
    """
    sock.settimeout(timeout_s)
    data = b""
    while not data.endswith(b"\n"):
        piece = sock.recv(_LINE_MAX)
        if not piece or len(data) > _LINE_MAX:
            raise EOFError("the process at the other end has gone")
        data += piece
    return read_object(data, "a message of the meeting", fields, bytes_max=2 * _LINE_MAX)
