"""Listeners: a Unix socket for this machine and TCP for others, a thread for each connection.

A connection begins with the proof of the cluster's secret by both ends, then a greeting. Until it is greeted it has a
deadline, and a place among few. The caller raises again what a handler raised; a peer that sends no messages, or far
more bytes than the handler wants, loses its connection and no more.
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
from fastrt.net.grpc.visitors import BACKLOG, Reserve, Visitors, hold_silent, is_exhausted
from fastrt.ps.remote_errors import refusal
from fastrt.ps.wire import VERSION, BrokenWireError, Meta, Wire, is_mine, receive

_log = logging.getLogger(__name__)
_GREETING_S = 10.0  # for the proof, and again for the greeting
_RETRY_S = 0.1
_WASTE_BYTES_MAX = 256 << 20  # a refused message is still read up to this size, so that the connection lives on


@dataclass(eq=False)
class Caller:
    """One connection, as handlers see it.

    Attributes:
        wire: the connection.
        hello: its greeting.
        kept: what handlers keep for it until it ends.
    """

    wire: Wire
    hello: Meta
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    """What a handler answers.

    Attributes:
        meta: as JSON takes it.
        parts: contiguous buffers.
        fds: descriptors, which stay the handler's.
    """

    meta: Meta
    parts: Sequence[Any] = ()
    fds: Sequence[int] = ()


class Service(Protocol):
    """Who answers."""

    def greet(self, caller: Caller) -> Meta:
        """What the greeting is answered with."""

    def room(self, caller: Caller, meta: Meta) -> int:
        """How many bytes of data a message may have; raises what it should be refused with."""

    def handle(self, caller: Caller, meta: Meta, data: Any, fds: list[int]) -> Answer:
        """Do what a message asks for. The descriptors are the handler's."""

    def gone(self, caller: Caller) -> None:
        """A connection has ended."""


class Endpoint:
    """Listens until `close`.

    Args:
        service: who answers.
        trust: the cluster's, which callers prove.
        address: `host:port` for TCP; port 0 takes any free one.
        unix: the abstract name of the Unix socket; None makes one up.

    Attributes:
        address: with the port it got.
        unix: the name.

    Raises:
        OSError: an address cannot be bound.
    """

    def __init__(self, service: Service, trust: Trust, address: str, unix: str | None = None) -> None:
        self._service = service
        self._trust = trust
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._callers: set[Caller] = set()
        # Of each listener: strangers that reach the one leave the places of the other.
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
        """Listen no more, end all connections, and wait for their threads."""
        self._closed.set()
        for listener in (self._tcp, self._local):
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes whoever accepts
        with self._lock:
            callers, threads = list(self._callers), list(self._threads)
        for visitors in self._visitors.values():
            visitors.end_all()
        for caller in callers:
            caller.wire.close()
        for thread in threads:
            if thread is not threading.current_thread():
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
                        if not (is_exhausted(error) and reserve.turn_away(listener)):
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
                raise ValueError(f"{nbytes} bytes came, and at most {room} make sense")
        except Exception as error:  # whatever is wrong with the message: its bytes are not waited for
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
        except Exception as error:  # the caller raises it again; the service goes on
            if not isinstance(error, (FastrtError, ValueError, TypeError, LookupError)):
                _log.exception("a request failed")
            caller.wire.send(refusal(error))
            return
        caller.wire.send(answer.meta, answer.parts, answer.fds)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
