"""Listeners on a Unix socket for this machine and on TCP for others, with a thread for each connection.

A connection begins with the proof of the cluster's secret by both ends, and a greeting. Until it is greeted it has a
deadline, and it occupies one of a few places. An exception of a handler is sent to the caller, which raises it. A peer
that sends no messages, or far more bytes than the handler accepts, only loses its connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastrt.errors import FastrtError
from fastrt.net.address import family_of, split_address, with_port
from fastrt.net.grpc.trust import Trust
from fastrt.net.grpc.visitors import BACKLOG, Reserve, Visitors, hold_silent
from fastrt.ps.remote_errors import refusal
from fastrt.ps.wire import VERSION, BrokenWireError, Meta, Wire, is_mine, receive
from fastrt.shortage import is_short

_log = logging.getLogger(__name__)
_GREETING_S = 10.0  # for the proof, and again for the greeting
_RETRY_S = 0.1
_WASTE_BYTES_MAX = 256 << 20  # the data of a refused message is read up to this size, to keep the connection usable


@dataclass(eq=False)
class Caller:
    """One connection, for handlers.

    Attributes:
        wire: the connection.
        hello: its greeting.
        kept: data that handlers store for it until it ends.
    """

    wire: Wire
    hello: Meta
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    """The answer of a handler.

    Attributes:
        meta: its JSON part.
        parts: contiguous buffers with its data.
        fds: descriptors to send; the handler still owns them.
    """

    meta: Meta
    parts: Sequence[Any] = ()
    fds: Sequence[int] = ()


class Service(Protocol):
    """Handlers for the connections of an endpoint."""

    def greet(self, caller: Caller) -> Meta:
        """Return the answer to a connection's greeting."""

    def room(self, caller: Caller, meta: Meta) -> int:
        """Largest data size in bytes that a message may have; raises if the message is to be refused."""

    def handle(self, caller: Caller, meta: Meta, data: Any, fds: list[int]) -> Answer:
        """Carry out a request. The handler owns the descriptors."""

    def gone(self, caller: Caller) -> None:
        """Note that a connection has ended."""


class Endpoint:
    """Serves connections until `close`.

    Args:
        service: handles the connections.
        trust: the cluster's, which callers prove.
        address: `host:port` for TCP; port 0 takes any free one.
        unix: the abstract name of the Unix socket; None: a random one.

    Attributes:
        address: `host:port` with the actual port.
        unix: the name of the Unix socket.

    Raises:
        OSError: an address cannot be bound.
    """

    def __init__(self, service: Service, trust: Trust, address: str, unix: str | None = None) -> None:
        self._service = service
        self._trust = trust
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._callers: set[Caller] = set()
        # For each listener: strangers at one of them do not take the places of the other.
        self._visitors = {socket.AF_UNIX: Visitors(), socket.AF_INET: Visitors()}
        self._threads: set[threading.Thread] = set()
        host, port = split_address(address, 0)
        self._tcp = socket.socket(family_of(host), socket.SOCK_STREAM)
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.unix = unix or f"fastrt-ps-{secrets.token_hex(8)}"
        try:
            self._tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._tcp.bind((host, port))
            self._local.bind("\0" + self.unix)
        except BaseException:
            self._tcp.close()
            self._local.close()
            raise
        self.address = with_port(address, self._tcp.getsockname()[1])
        hold_silent(self._tcp)
        for listener, kind in ((self._tcp, socket.AF_INET), (self._local, socket.AF_UNIX)):
            listener.listen(BACKLOG)
            listener.setblocking(False)
            self._start(self._accept, listener, self._visitors[kind])

    def close(self) -> None:
        """Stop listening, end all connections, and wait for their threads."""
        self._closed.set()
        for listener in (self._tcp, self._local):
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        while True:  # again for a connection that was accepted meanwhile
            with self._lock:
                callers, threads = list(self._callers), self._threads - {threading.current_thread()}
            for visitors in self._visitors.values():
                visitors.end_all()
            for caller in callers:
                caller.wire.close()
            if not threads:
                return
            for thread in threads:
                thread.join()

    def _start(self, target: Any, *args: Any) -> None:
        def run() -> None:
            try:
                target(*args)
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name="fastrt-ps", daemon=True)
        with self._lock:  # `close` joins what it finds here
            self._threads.add(thread)
            thread.start()

    def _accept(self, listener: socket.socket, visitors: Visitors) -> None:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        with listener, contextlib.closing(Reserve()) as reserve:
            while not self._closed.is_set():
                poll.poll()
                try:
                    sock, _ = listener.accept()
                except OSError as error:
                    if self._closed.is_set():
                        break
                    if not isinstance(error, BlockingIOError):
                        _log.warning("a connection cannot be accepted: %s", error)
                        visitors.make_room()
                        if not (is_short(error) and reserve.turn_away(listener)):
                            self._closed.wait(_RETRY_S)
                    continue
                if sock.family == socket.AF_UNIX and not is_mine(sock):
                    sock.close()
                    continue
                try:
                    place = visitors.enter(sock)
                except OSError:
                    sock.close()
                    continue
                self._start(self._serve, sock, visitors, place)

    def _serve(self, sock: socket.socket, visitors: Visitors, place: int) -> None:
        caller: Caller | None = None
        greeted = False
        try:
            caller = Caller(receive(sock, self._trust, _GREETING_S), {})
            with self._lock:
                self._callers.add(caller)
            if self._closed.is_set() or not self._greet(caller):
                return
            greeted = True
            visitors.leave(place)
            while True:
                self._serve_one(caller)
        except (BrokenWireError, TimeoutError) as error:
            _log.debug("a connection ended: %s", error)
        finally:
            visitors.leave(place)
            if caller is not None:
                if greeted:
                    self._service.gone(caller)
                with self._lock:
                    self._callers.discard(caller)
                caller.wire.close()

    def _greet(self, caller: Caller) -> bool:
        hello, nbytes = caller.wire.greeting(_GREETING_S)
        if nbytes:
            return False
        if hello.get("version") != VERSION:
            caller.wire.send(refusal(FastrtError("the two sides run different versions of fastrt")))
            return False
        caller.hello = hello
        try:
            welcome = self._service.greet(caller)
        except (FastrtError, ValueError) as error:
            caller.wire.send(refusal(error))
            return False
        try:
            caller.wire.send(welcome)
        except BrokenWireError:
            self._service.gone(caller)
            raise
        return True

    def _serve_one(self, caller: Caller) -> None:
        meta, nbytes, fds = caller.wire.receive_head()
        try:
            room = self._service.room(caller, meta)
            if nbytes > room:
                raise ValueError(f"{nbytes} bytes came; the limit for this message is {room}")
        except Exception as error:  # any fault of the message: its data is skipped, not processed
            _close(fds)
            if nbytes > _WASTE_BYTES_MAX:
                caller.wire.send(refusal(error))
                raise BrokenWireError("a message was refused before its data came") from None
            caller.wire.receive_data(bytearray(nbytes))
            caller.wire.send(refusal(error))
            return
        data = bytearray(nbytes)
        try:
            caller.wire.receive_data(data)
        except BaseException:
            _close(fds)
            raise
        try:
            answer = self._service.handle(caller, meta, data, fds)
        except BrokenWireError:
            raise
        except Exception as error:  # the caller raises it; the connection stays usable
            if not isinstance(error, (FastrtError, ValueError, TypeError, LookupError)):
                _log.exception("a request failed")
            caller.wire.send(refusal(error))
            return
        caller.wire.send(answer.meta, answer.parts, answer.fds)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
