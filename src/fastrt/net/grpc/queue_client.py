"""Calls to one gRPC server whose events are handled on the thread that takes them off the completion queue.

`grpc.aio` carries each event through a socket to its loop's thread, and a blocking call makes a completion queue and
wakes its caller's thread. A unary call to an empty handler costs its caller 85 to 140 us of processor time here, 200 to
340 us as a future of grpc's, 280 us as a blocking call, and 125 to 370 us by `grpc.aio` (32 calls in flight, and one).

The channel's thread runs while calls are under way and for `_LINGER_S` after the last one, so that a caller that makes
one call after the other does not pay for a thread each time. gRPC has no timeout for the queue of a channel: a call
that is never sent, whose deadline passes after `_LINGER_S`, wakes the thread instead.

This uses parts of grpcio that are not public; `caller` falls back to `future_client` where they are missing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc

from fastrt.net.grpc.contract import Metadata
from fastrt.net.grpc.forks import use_grpc

_log = logging.getLogger(__name__)

_LINGER_S = 1.0
_CLOSED = (grpc.StatusCode.CANCELLED.value[0], "The connection was closed.")
_NO_METADATA: Metadata = ()
_READY = cygrpc.ConnectivityState.ready
_WAIT_FOR_READY = cygrpc.InitialMetadataFlags.wait_for_ready | cygrpc.InitialMetadataFlags.wait_for_ready_explicitly_set

# Called with the status code, the message and, if the call succeeded, the answer.
Done = Callable[[int, str, bytes], None]


class QueueCaller:
    """A `Caller` on the completion queue of a channel; `open_caller` describes the arguments."""

    def __init__(
        self,
        address: str,
        credentials: grpc.ChannelCredentials | None,
        options: Sequence[tuple[str, Any]],
        metadata: Metadata = _NO_METADATA,
    ) -> None:
        use_grpc()
        self._metadata = tuple(metadata)
        arguments = tuple((name.encode(), value) for name, value in options)
        self._channel = cygrpc.Channel(
            address.encode(), arguments, credentials._credentials if credentials is not None else None
        )
        self._lock = threading.Lock()
        self._under_way = 0  # events that the thread has to wait for
        self._closed = False
        self._used = False  # since the last call that only keeps the thread
        self._thread: threading.Thread | None = None

    def call(self, path: str, body: bytes, timeout_s: float, done: Done, wait_for_ready: bool = False) -> None:
        """Make a unary call; `done` runs on this object's thread, or at once if this object is closed."""
        status = cygrpc.ReceiveStatusOnClientOperation(0)
        message = cygrpc.ReceiveMessageOperation(0)

        def ended(event: Any) -> None:
            code = status.code()
            done(code, "" if code == 0 else _text(status.details()), (message.message() or b"") if code == 0 else b"")

        operations = (
            cygrpc.SendInitialMetadataOperation(self._metadata, _WAIT_FOR_READY if wait_for_ready else 0),
            cygrpc.SendMessageOperation(body, 0),
            cygrpc.SendCloseFromClientOperation(0),
            cygrpc.ReceiveInitialMetadataOperation(0),
            message,
            status,
        )
        if self._start(path, time.time() + timeout_s, ((operations, ended),)) is None:
            done(*_CLOSED, b"")

    def stream(
        self, path: str, body: bytes, receive: Callable[[bytes], None], done: Callable[[int, str], None]
    ) -> None:
        """Send one message, and pass on those that the server answers; `done` once it has ended the call."""
        status = cygrpc.ReceiveStatusOnClientOperation(0)
        opened: list[Any] = []

        def read(event: Any) -> None:
            answer = event.batch_operations[-1].message() if event.success else None
            if answer is not None:
                receive(answer)
                next_message()

        def next_message() -> None:
            with self._lock:
                if self._closed:
                    return
                if opened[0].operate((cygrpc.ReceiveMessageOperation(0),), read):
                    self._under_way += 1

        operations = (
            cygrpc.SendInitialMetadataOperation(self._metadata, 0),
            cygrpc.SendMessageOperation(body, 0),
            cygrpc.SendCloseFromClientOperation(0),
            status,
        )
        first = (cygrpc.ReceiveInitialMetadataOperation(0), cygrpc.ReceiveMessageOperation(0))
        batches = ((operations, lambda event: done(status.code(), _text(status.details()))), (first, read))
        call = self._start(path, None, batches, opened)
        if call is None:
            done(*_CLOSED)

    def is_ready(self) -> bool:
        """Whether the connection is open; if not, gRPC is asked to open it."""
        try:
            return bool(self._channel.check_connectivity_state(True) == _READY)
        except ValueError:  # closed
            return False

    def close(self) -> None:
        """Cancel all calls, and wait until each one's `done` has been called. Not to be called by one of those."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._channel.close(cygrpc.StatusCode.cancelled, _CLOSED[1])
        if self._thread is not None:
            self._thread.join()

    def _start(self, path: str, deadline: float | None, batches: Any, opened: list[Any] | None = None) -> Any:
        """Start a call, and the thread if it does not run; None if this object is closed."""
        with self._lock:
            if self._closed:
                return None
            call = self._channel.integrated_call(
                0, path.encode(), None, deadline, self._metadata, None, batches, None, None
            )
            if opened is not None:
                opened.append(call)
            is_first = self._under_way == 0
            self._under_way += len(batches)
            self._used = True
            if is_first:
                self._thread = threading.Thread(target=self._run, name="fastrt-calls", daemon=True)
                self._thread.start()
        return call

    def _run(self) -> None:
        while True:
            event = self._channel.next_call_event()
            try:
                event.tag(event)
            except Exception:
                _log.exception("the handler of an answer failed")
            with self._lock:
                self._under_way -= 1
                if self._under_way == 0 and not self._linger():
                    return

    def _linger(self) -> bool:
        """Keep the thread for a while, unless nothing was called in the last while. `_lock` is held."""
        if self._closed or not self._used:
            return False
        self._used = False
        never_sent = (((cygrpc.ReceiveStatusOnClientOperation(0),), _ignore),)
        self._channel.integrated_call(0, b"/", None, time.time() + _LINGER_S, (), None, never_sent, None, None)
        self._under_way = 1
        return True


def _ignore(event: Any) -> None:
    pass


def _text(details: Any) -> str:
    return details.decode("utf-8", "replace") if isinstance(details, bytes) else str(details or "")
