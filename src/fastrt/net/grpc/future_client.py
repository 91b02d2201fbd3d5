"""The calls of `queue_client` on grpcio's public futures: twice as expensive, but independent of grpcio's version."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from fastrt.net.grpc.contract import Metadata
from fastrt.net.grpc.forks import use_grpc

_log = logging.getLogger(__name__)

Done = Callable[[int, str, bytes], None]
_CANCELLED = grpc.StatusCode.CANCELLED


class FutureCaller:
    """A `Caller` on grpcio's futures; `open_caller` describes the arguments."""

    def __init__(
        self,
        address: str,
        credentials: grpc.ChannelCredentials | None,
        options: Sequence[tuple[str, Any]],
        metadata: Metadata = (),
    ) -> None:
        use_grpc()
        self._metadata = tuple(metadata)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=options)
        self._state: grpc.ChannelConnectivity | None = None
        self._closed = False
        self._streams: list[threading.Thread] = []

    def call(self, path: str, body: bytes, timeout_s: float, done: Done, wait_for_ready: bool = False) -> None:
        """Make a unary call; `done` runs on a thread of grpc's, or at once if this object is closed."""

        def ended(future: Any) -> None:
            code = future.code()
            try:
                done(code.value[0], future.details() or "", future.result() if code is grpc.StatusCode.OK else b"")
            except Exception:  # it would reach the caller if the answer is there before `add_done_callback`
                _log.exception("the handler of an answer failed")

        try:
            method = self._channel.unary_unary(path)
            future = method.future(body, timeout=timeout_s, metadata=self._metadata, wait_for_ready=wait_for_ready)
        except ValueError:  # closed
            done(_CANCELLED.value[0], "The connection was closed.", b"")
            return
        future.add_done_callback(ended)

    def stream(
        self, path: str, body: bytes, receive: Callable[[bytes], None], done: Callable[[int, str], None]
    ) -> None:
        """Send one message, and pass on those that the server answers; `done` once it has ended the call."""
        try:
            call = self._channel.unary_stream(path)(body, metadata=self._metadata)
        except ValueError:  # closed
            done(_CANCELLED.value[0], "The connection was closed.")
            return

        def read() -> None:
            try:
                for answer in call:
                    receive(answer)
            except grpc.RpcError:
                pass  # its status follows
            done(call.code().value[0], call.details() or "")

        thread = threading.Thread(target=read, name="fastrt-calls", daemon=True)
        self._streams.append(thread)
        thread.start()

    def is_ready(self) -> bool:
        """Whether the connection is open; if not, gRPC is asked to open it."""
        if self._state is None and not self._closed:
            self._state = grpc.ChannelConnectivity.IDLE
            self._channel.subscribe(self._changed, try_to_connect=True)
        return self._state is grpc.ChannelConnectivity.READY

    def close(self) -> None:
        """Cancel all calls, and wait until each stream's `done` has been called."""
        self._closed = True
        if self._state is not None:
            self._channel.unsubscribe(self._changed)
        self._channel.close()
        for thread in self._streams:
            thread.join()

    def _changed(self, state: grpc.ChannelConnectivity) -> None:
        self._state = state
