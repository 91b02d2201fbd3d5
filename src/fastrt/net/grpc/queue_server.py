"""A gRPC server driven by its completion queue, on one thread.

`grpc.aio` and the threaded server are too slow: a unary call through an empty handler costs either of them 450 to
550 us (jaxlib's client makes 1,850 and 2,250 calls a second, 32 of its clients 4,700 to 5,400), because each event
crosses from grpc's poller thread to another thread and back. Here the thread that takes an event off the queue also
handles it: 3,900 and 18,000 calls a second, with jaxlib 0.10.2's client on two cores
(`bench/compare_coordination.py`). A call that cannot be answered yet costs a table entry and no thread.

The completion queue is the layer on which grpcio builds both of its servers (`grpc._cython.cygrpc`). It is not public,
so only this file uses it; `server` falls back to `aio_server` where it is missing.

Threads: `on_call`, `on_cancel` and `on_idle` are called on the server's thread only; `finish` and the stream methods
may be called on any. `_lock` guards `_pending` and each call's `watched` flag, nothing else, and is never held while
a handler runs.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import grpc
from grpc._cython import cygrpc

from fastrt.folders import private_files
from fastrt.net.grpc.contract import SHUTTING_DOWN, UNPROVING, Metadata, ServerParts
from fastrt.net.grpc.door import COUNTED_BYTES, Connection
from fastrt.net.grpc.forks import use_grpc

_log = logging.getLogger(__name__)

# How many calls may be accepted between two polls of the queue. More costs memory only.
_ACCEPTING = 64
# A caller that hung up is noticed this much later at most. Calls answered sooner are not watched at all.
_HANGUP_S = 0.05
_DRAIN_S = 5.0
_WALL_CLOCK_S = 0.15  # below grpc's step of 0.2 s, within which it uses the monotonic clock
_AFTER_FAULT_S = 1.0
# Under a constant stream of calls the queue is never empty; `on_idle` is called after this many events all the same.
_EVENTS_PER_BATCH = 256
# A sleeping thread wakes some 50 us late, twice in a call of 200 us. While calls follow each other this closely, the
# server polls the queue instead, and yields the core to other threads first (without the yield p99 is twice as long).
# One client's sets: 0.65 of jaxlib's rate without polling, 1.1 with; its gets 0.66 and 1.1
# (`bench/compare_coordination.py`). The server does not poll for slow callers, nor on one core.
_SPIN_S = 0.0005
# After a message this large the server sleeps: gRPC's thread, which reads the next one from the socket, would have to
# share the core (1 GiB over a stream, beside plain TCP in the same run: 0.66 with polling, 0.79 without).
_BULK_BYTES = 64 << 10
# A stream takes no further message while more than this waits to be read by its caller.
_UNREAD_BYTES = 1 << 20
_CORES = len(os.sched_getaffinity(0))
_NO_METADATA: tuple[Any, ...] = ()
_EXHAUSTED = int(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
_SHUTDOWN = "shutdown"
_ACCEPTED = "accepted"
_TIMED_OUT = cygrpc.CompletionType.queue_timeout


class QueueStream:
    """A `Stream` on the completion queue."""

    def __init__(self, server: QueueServer, call: Any, caller: Connection) -> None:
        self._server = server
        self._call = call
        self._caller = caller
        self._unread = 0  # bytes of messages that are not sent yet
        self._under_way = 0  # bytes of the message that gRPC has
        self._lock = threading.Lock()
        self._outgoing: deque[bytes] = deque()
        self._sending = False
        self._started = False
        self._status: tuple[int, str] | None = None
        self._done = False
        self._reading = False  # a message was requested
        self._inside = False  # the receiver runs
        self._held = False
        self.receiver: Callable[[bytes | None], None] = lambda body: None
        self.on_sent: Callable[[], None] = lambda: None
        self.on_closed: Callable[[], None] = lambda: None

    def send(self, body: bytes) -> None:
        """Send a message after those before."""
        with self._lock:
            self._outgoing.append(body)
            self._unread += len(body)
            self._push()

    def finish(self, code: int = 0, message: str = "") -> None:
        """End the stream, after the messages before."""
        with self._lock:
            if self._status is None:
                self._status = (code, message)
                self._push()

    def hold(self) -> None:
        """Take no further message until `resume`; gRPC's flow control then holds the caller back."""
        with self._lock:
            self._held = True

    def resume(self) -> None:
        """Continue to take messages, after `hold`."""
        with self._lock:
            self._held = False
            self._take()

    def _take(self) -> None:
        """Request the next message, unless that is done already or has to wait. `_lock` is held."""
        # Not while the caller reads no answers: they would pile up without a bound.
        if not (self._reading or self._inside or self._held or self._done or self._unread > _UNREAD_BYTES):
            self._reading = True
            self._call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), self._read)

    def _push(self) -> None:
        """Start the next batch, unless one is under way. `_lock` is held."""
        if self._sending or self._done:
            return
        operations = []
        if not self._started:
            operations.append(cygrpc.SendInitialMetadataOperation(_NO_METADATA, 0))
        if self._outgoing:
            body = self._outgoing.popleft()
            self._under_way = len(body)
            self._server._door.sending(self._caller, self._under_way)
            operations.append(cygrpc.SendMessageOperation(body, 0))
        elif self._status is not None:
            code, message = self._status
            operations.append(cygrpc.SendStatusFromServerOperation(_NO_METADATA, code, message.encode(), 0))
            self._done = True
        else:
            return
        self._started = self._sending = True
        self._call.start_server_batch(tuple(operations), self._sent)

    def _sent(self, event: Any) -> None:
        with self._lock:
            self._sending = False
            self._server._door.sent(self._caller, self._under_way)
            self._unread -= self._under_way
            self._under_way = 0
            if not event.success:
                self._done = True
            self._push()
            self._take()
            done = self._done
        if not done:
            self.on_sent()

    def _read(self, event: Any) -> None:
        body = event.batch_operations[0].message() if event.success else None
        if body is not None and len(body) >= _BULK_BYTES:
            self._server._brisk = False
        with self._lock:
            self._reading, self._inside = False, True
        try:
            self.receiver(body)
        except Exception:
            _log.exception("a streaming handler failed")
            self.finish(int(grpc.StatusCode.INTERNAL.value[0]), "The handler of this stream failed; see the log.")
            return
        with self._lock:
            self._inside = body is None  # after the last message no other is requested
            self._take()

    def _closed(self, event: Any) -> None:
        self._server._open_streams.discard(self)
        self._caller.calls -= 1
        with self._lock:
            self._done = True  # else a late `finish` would use a queue that is gone, which ends the process
        self.on_closed()

    def _open(self) -> None:
        self._call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(0),), self._closed)
        with self._lock:
            self._take()


class _Unary:
    """A unary call; `watched` once the queue reports when its caller hangs up."""

    __slots__ = ("call", "caller", "method", "number", "server", "since", "unread", "watched")

    def __init__(self, server: QueueServer, call: Any, caller: Connection, method: str) -> None:
        self.server = server
        self.call = call
        self.caller = caller
        self.method = method
        self.number = 0
        self.since = 0.0
        self.unread = 0  # bytes of its answer, once the door counts it
        self.watched = False

    def read(self, event: Any) -> None:
        """Take the request."""
        body = event.batch_operations[0].message() if event.success else None
        self.server._begin(self, body)

    def closed(self, event: Any) -> None:
        """Note that the call ended, by the server or by its caller."""
        self.server._hung_up(self)

    def finished(self, event: Any) -> None:
        """Note that the answer was sent, or its caller is gone."""
        self.caller.calls -= 1
        if self.unread:
            self.server._door.sent(self.caller, self.unread)


class QueueServer(ServerParts):
    """A `Server` on the completion queue."""

    def __init__(self, *described: Any, **options: Any) -> None:
        super().__init__(*described, **options)
        use_grpc()
        self._queue = cygrpc.CompletionQueue()
        arguments = tuple((name.encode(), value) for name, value in self._options)
        self._server = cygrpc.Server(arguments, False)
        self._server.register_completion_queue(self._queue)
        self._lock = threading.Lock()
        self._young: deque[_Unary] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._give_up_at: float | None = None
        self._brisk = False  # the last event came so soon that polling for the next one pays

    def bind(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """Listen on `host:port` (port 0: any), from `start` on; returns the port.

        Raises:
            OSError: the address is taken or not this machine's.
        """
        try:
            with private_files() if address.startswith("unix:") else nullcontext():
                port = self._add_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"Cannot listen on {address}: {error}. Is another server running there?") from None
        if port == 0:
            raise OSError(f"Cannot listen on {address}. Is another server running there, or the host not this one?")
        if port > 1:  # a Unix socket has 1
            self._ports[port] = credentials is not None
        return port

    def _add_port(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        if credentials is None:
            return int(self._server.add_http2_port(address.encode()))
        return int(self._server.add_http2_port(address.encode(), credentials._credentials))

    def start(self) -> None:
        """Serve, on a thread that the server starts."""
        self._server.start(backup_queue=False)
        for _ in range(_ACCEPTING):
            self._accept()
        self._thread = threading.Thread(target=self._run, name="fastrt-rpc", daemon=True)
        self._thread.start()
        for port, tls in self._ports.items():
            self._door.open(port, tls)

    def stop(self) -> None:
        """Take no new calls, let the handler answer those still open (`on_stop`), and end the thread."""
        if self._thread is None or self._stopping:
            return
        self._stopping = True
        self._door.close()
        self._server.shutdown(self._queue, _SHUTDOWN)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _DRAIN_S)

    def finish(
        self, call: int, code: int = 0, message: str = "", body: bytes = b"", trailing: Metadata = _NO_METADATA
    ) -> bool:
        """Answer a call; False when its caller has gone, or it was answered before."""
        with self._lock:
            unary = self._pending.pop(call, None)
            if unary is None:
                return False
            watched = unary.watched
            unary.watched = True
        self._reply(unary, watched, code, message, body, trailing)
        return True

    def peer(self, call: int) -> object:
        """The name of the connection of a call that is not answered yet."""
        return self._pending[call].caller.peer

    def is_open(self, peer: object) -> bool:
        """Whether a connection is open, by its name."""
        return self._door.is_open(peer)

    def _reply(self, unary: _Unary, watched: bool, code: int, message: str, body: bytes, trailing: Metadata) -> None:
        operations = [cygrpc.SendInitialMetadataOperation(_NO_METADATA, 0)]
        if len(body) >= COUNTED_BYTES:
            refused = self._door.refused_answer(unary.caller, len(body))
            if refused:
                code, message, body, trailing = _EXHAUSTED, refused, b"", _NO_METADATA
            else:
                unary.unread = len(body)
                self._door.sending(unary.caller, unary.unread)
        if code == 0:
            operations.append(cygrpc.SendMessageOperation(body, 0))
        operations.append(cygrpc.SendStatusFromServerOperation(trailing, code, message.encode(), 0))
        if not watched:
            operations.append(cygrpc.ReceiveCloseOnServerOperation(0))
        unary.call.start_server_batch(tuple(operations), unary.finished)

    def _run(self) -> None:
        poll = self._queue.poll
        batch = 0
        wake_at: float | None = None
        while True:
            event = poll(0) if batch else self._wait(wake_at)
            timed_out = event.completion_type == _TIMED_OUT
            if timed_out or batch >= _EVENTS_PER_BATCH:
                batch = 0
                wake_at = self._idle()
            if timed_out:
                continue
            batch += 1
            tag = event.tag
            if tag is _ACCEPTED:
                self._accepted(event)
            elif tag is _SHUTDOWN:
                break
            else:
                tag(event)
        self._drain()

    def _wait(self, wake_at: float | None) -> Any:
        """Return the next event; a timeout if there is none until `wake_at`."""
        poll = self._queue.poll
        began = time.monotonic()
        if self._brisk:
            spin_until = began + _SPIN_S if wake_at is None else min(began + _SPIN_S, wake_at)
            while time.monotonic() < spin_until:
                os.sched_yield()
                event = poll(0)
                if event.completion_type != _TIMED_OUT:
                    return event
        while True:
            # grpc measures a wait by the wall clock. A short wait ends in time even if that clock jumps.
            left_s = 0.0 if wake_at is None else min(_WALL_CLOCK_S, max(0.0, wake_at - time.monotonic()))
            event = poll(None if wake_at is None else time.time() + left_s)
            if event.completion_type != _TIMED_OUT or wake_at is None or time.monotonic() >= wake_at:
                break
        self._brisk = _CORES > 1 and time.monotonic() - began < _SPIN_S
        return event

    def _accepted(self, event: Any) -> None:
        if event.success and not self._stopping:
            self._accept()
            self._dispatch(event)
            return
        if event.success:
            method = event.call_details.method.decode("utf-8", "replace")
            caller = self._door.caller(event.call.peer())
            self._reject(event.call, caller, method, grpc.StatusCode.UNAVAILABLE, SHUTTING_DOWN)
        if not self._has_stopped:
            # `stop` was called: the queue returns the requests that would have accepted calls.
            self._end_calls()

    def _accept(self) -> None:
        self._server.request_call(self._queue, self._queue, _ACCEPTED)

    def _dispatch(self, event: Any) -> None:
        call, door = event.call, self._door
        caller = door.caller(call.peer())
        if caller.doomed:
            return  # the call ends with its last reference
        method = event.call_details.method.decode("utf-8", "replace")
        if self._authorize is not None:
            refused = self._authorize(method, event.invocation_metadata)
            if refused is not None:
                if door.rejected(caller):
                    self._reject(call, caller, method, grpc.StatusCode.UNAUTHENTICATED, refused)
                return
        if method in self._methods:
            refused = door.make_place(len(self._pending))
            if refused:
                self._reject(call, caller, method, grpc.StatusCode.RESOURCE_EXHAUSTED, refused)
                return
            caller.calls += 1
            door.begin_reading(caller)
            unary = _Unary(self, call, caller, method)
            call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), unary.read)
        elif method in self._streams:
            caller.calls += 1
            door.accepted(caller)
            stream = QueueStream(self, call, caller)
            self._open_streams.add(stream)
            self._streams[method](stream)
            stream._open()
        else:
            if door.rejected(caller):
                words = f"There is no method {method} here."
                self._reject(call, caller, method, grpc.StatusCode.UNIMPLEMENTED, words)

    def _reject(self, call: Any, caller: Connection, method: str, code: grpc.StatusCode, message: str) -> None:
        caller.calls += 1
        self._reply(_Unary(self, call, caller, method), False, code.value[0], message, b"", _NO_METADATA)

    def _begin(self, unary: _Unary, body: bytes | None) -> None:
        caller = unary.caller
        self._door.end_reading(caller, len(body) if body is not None else 0)
        if body is None:
            if not self._door.rejected(caller):
                caller.calls -= 1
                return
            # The message is too long (the core answers that itself), or the caller sent none or has gone.
            message = f"{unary.method} takes exactly one request message, and none arrived."
            self._reply(unary, False, grpc.StatusCode.INVALID_ARGUMENT.value[0], message, b"", _NO_METADATA)
            return
        if unary.method not in UNPROVING:
            self._door.accepted(caller)
        if self._has_stopped:
            # Accepted before `stop`, and complete only after the handler's `on_stop`.
            self._reply(unary, False, grpc.StatusCode.UNAVAILABLE.value[0], SHUTTING_DOWN, b"", _NO_METADATA)
            return
        self._next_number += 1
        number = unary.number = self._next_number
        self._pending[number] = unary
        try:
            self._handler.on_call(number, unary.method, body)
        except Exception:
            _log.exception("the handler of %s failed", unary.method)
            message = f"The service failed on {unary.method}; its log says why. The call may have had effect."
            self.finish(number, grpc.StatusCode.INTERNAL.value[0], message)
        if number in self._pending:
            unary.since = time.monotonic()
            self._young.append(unary)

    def _hung_up(self, unary: _Unary) -> None:
        with self._lock:
            gone = self._pending.pop(unary.number, None)
        if gone is not None:
            unary.caller.calls -= 1
            try:
                self._handler.on_cancel(unary.number)
            except Exception:
                _log.exception("the handler failed on a caller that hung up")

    def _idle(self) -> float | None:
        """Call the handler's `on_idle`, and watch the callers of calls that have waited for a moment."""
        wake_at = None
        try:
            wake_at = self._handler.on_idle() if not self._has_stopped else None
        except Exception:
            _log.exception("on_idle of the handler failed")
            wake_at = time.monotonic() + _AFTER_FAULT_S
        if self._give_up_at is not None and time.monotonic() >= self._give_up_at:
            self._server.cancel_all_calls()
            self._give_up_at = None
        if self._give_up_at is not None:
            return self._give_up_at
        if not self._young:
            return wake_at
        now = time.monotonic()
        while self._young and now - self._young[0].since >= _HANGUP_S:
            unary = self._young.popleft()
            with self._lock:
                watch = unary.number in self._pending and not unary.watched
                unary.watched = unary.watched or watch
            if watch:
                unary.call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(0),), unary.closed)
        if not self._young:
            return wake_at
        look_at = self._young[0].since + _HANGUP_S
        return look_at if wake_at is None else min(wake_at, look_at)

    def _end_calls(self) -> None:
        super()._end_calls()
        self._give_up_at = time.monotonic() + _DRAIN_S

    def _drain(self) -> None:
        """Take the last events off the queue, after the shutdown."""
        for stream in list(self._open_streams):
            stream._closed(None)
        self._queue.shutdown()
        while self._queue.poll(None).completion_type != cygrpc.CompletionType.queue_shutdown:
            pass
