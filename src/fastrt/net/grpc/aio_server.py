"""The server of `queue_server` on grpcio's public asyncio interface: slower, but independent of grpcio's version.

Threads: all the handler's methods are called on the thread of the event loop; `finish` and the stream methods may be
called on any. `_pending` is only touched with the GIL's own atomic operations.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from fastrt.folders import private_files
from fastrt.net.grpc.contract import SHUTTING_DOWN, UNPROVING, Metadata, ServerParts
from fastrt.net.grpc.door import COUNTED_BYTES, Connection
from fastrt.net.grpc.forks import use_grpc
from fastrt.net.grpc.streams import stop_server
from fastrt.net.loop_thread import LoopThread

_log = logging.getLogger(__name__)

T = TypeVar("T")
_DRAIN_S = 5.0
_AFTER_FAULT_S = 1.0
_CODES = {code.value[0]: code for code in grpc.StatusCode}
# A stream takes no further message while more than this waits to be read by its caller.
_UNREAD_BYTES = 1 << 20
_Answer = tuple[int, str, bytes, Metadata]


class AioStream:
    """A `Stream` on `grpc.aio`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._unread = 0
        self._outgoing: asyncio.Queue[bytes | tuple[int, str]] = asyncio.Queue()
        self._held = False
        self._resumed = asyncio.Event()
        self.receiver: Callable[[bytes | None], None] = lambda body: None
        self.on_sent: Callable[[], None] = lambda: None
        self.on_closed: Callable[[], None] = lambda: None

    def send(self, body: bytes) -> None:
        """Send a message after those before."""
        self._soon(self._put, body)

    def finish(self, code: int = 0, message: str = "") -> None:
        """End the stream, after the messages before."""
        self._soon(self._outgoing.put_nowait, (code, message))

    def hold(self) -> None:
        """Take no further message until `resume`."""
        self._held = True

    def resume(self) -> None:
        """Continue to take messages, after `hold`."""
        self._held = False
        self._soon(self._resumed.set)

    def _put(self, body: bytes) -> None:
        self._unread += len(body)
        self._outgoing.put_nowait(body)

    def _soon(self, call: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the server has stopped, and its loop is closed
            self._loop.call_soon_threadsafe(call, *arguments)

    async def serve(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Pass messages both ways until the stream is finished."""
        reading = asyncio.ensure_future(self._read(requests))
        try:
            while True:
                item = await self._outgoing.get()
                if isinstance(item, bytes):
                    await context.write(item)
                    self._unread -= len(item)
                    self._resumed.set()
                    self.on_sent()
                elif item[0] == 0:
                    return
                else:
                    await context.abort(_CODES[item[0]], item[1])
        finally:
            reading.cancel()
            self.on_closed()

    async def _wait_until_taken(self) -> None:
        """Wait until nothing holds the stream, and its caller has read most of the messages sent to it."""
        while self._held or self._unread > _UNREAD_BYTES:
            self._resumed.clear()
            if self._held or self._unread > _UNREAD_BYTES:
                await self._resumed.wait()

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for body in requests:
                self.receiver(body)
                await self._wait_until_taken()
            self.receiver(None)
        except Exception:
            _log.exception("a streaming handler failed")
            self.finish(grpc.StatusCode.INTERNAL.value[0], "The handler of this stream failed; see the log.")


@dataclass(eq=False)
class _Waiting:
    """A call that waits for its answer; `unread` is the size of an answer that the door counts."""

    answered: asyncio.Future[_Answer]
    caller: Connection
    unread: int = 0


class AioServer(ServerParts, grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio has no types
    """A `Server` on `grpc.aio`."""

    def __init__(self, *described: Any, **options: Any) -> None:
        super().__init__(*described, **options)
        self._thread: LoopThread | None = None
        self._server: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._idle_soon = False

    def bind(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """Listen on `host:port` (port 0: any), from `start` on; returns the port.

        Raises:
            OSError: the address is taken or not this machine's.
        """
        is_new = self._thread is None
        thread = self._thread = self._thread or LoopThread("fastrt-rpc")
        try:
            port = thread.run(self._bind(address, credentials))
        except RuntimeError as error:
            if is_new:
                thread.run(self._drop(0.0))
                self._end_thread(thread)
            words = f"Cannot listen on {address}: {error}. Is another server running there, or the host not this one?"
            raise OSError(words) from None
        if port > 1:  # a Unix socket has 1
            self._ports[port] = credentials is not None
        return port

    def start(self) -> None:
        """Serve, on the thread of the event loop."""
        assert self._thread is not None, "the server is not bound"
        self._thread.run(self._server.start())
        for port, tls in self._ports.items():
            self._door.open(port, tls)
        self._thread.loop.call_soon_threadsafe(self._ask_idle)

    def stop(self) -> None:
        """Take no new calls, let the handler answer those still open (`on_stop`), and end the thread."""
        thread = self._thread
        if thread is None or self._has_stopped:
            return
        self._door.close()
        if thread.is_current:
            self._end_calls()
            thread.loop.create_task(stop_server(self._server, _DRAIN_S))
            return
        thread.run(self._stop())
        self._end_thread(thread)

    def finish(self, call: int, code: int = 0, message: str = "", body: bytes = b"", trailing: Metadata = ()) -> bool:
        """Answer a call; False when its caller has gone, or it was answered before."""
        answered = self._pending.pop(call, None)
        if answered is None:
            return False
        thread = self._thread
        assert thread is not None
        if thread.is_current:
            self._resolve(answered, (code, message, body, trailing))
        else:
            thread.loop.call_soon_threadsafe(self._resolve, answered, (code, message, body, trailing))
        return True

    def peer(self, call: int) -> object:
        """The name of the connection of a call that is not answered yet."""
        return self._pending[call].caller.peer

    def is_open(self, peer: object) -> bool:
        """Whether a connection is open, by its name."""
        return self._door.is_open(peer)

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a call, or its refusal; grpcio calls this (`grpc.GenericRpcHandler`)."""
        method = handler_call_details.method
        refused = None
        if self._authorize is not None:
            refused = self._authorize(method, handler_call_details.invocation_metadata)
        if refused is not None:
            return self._refusal(grpc.StatusCode.UNAUTHENTICATED, refused)
        if method in self._methods:
            return grpc.unary_unary_rpc_method_handler(partial(self._answer, method))
        if method in self._streams:
            return grpc.stream_stream_rpc_method_handler(partial(self._stream, method))
        return self._refusal(grpc.StatusCode.UNIMPLEMENTED, f"There is no method {method} here.")

    async def _bind(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        if self._server is None:
            use_grpc()
            self._server = grpc.aio.server(options=self._options)
            self._server.add_generic_rpc_handlers((self,))
        with private_files() if address.startswith("unix:") else contextlib.nullcontext():
            if credentials is None:
                return int(self._server.add_insecure_port(address))
            return int(self._server.add_secure_port(address, credentials))

    async def _answer(self, method: str, body: bytes, context: Any) -> bytes:
        if self._has_stopped:
            await context.abort(grpc.StatusCode.UNAVAILABLE, SHUTTING_DOWN)
        caller = self._caller(context)
        if method not in UNPROVING:
            self._door.accepted(caller)
        refused = self._door.make_place(len(self._pending))
        if refused:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, refused)
        self._next_number += 1
        number = self._next_number
        waiting = self._pending[number] = _Waiting(asyncio.get_running_loop().create_future(), caller)
        try:
            self._handler.on_call(number, method, body)
        except Exception:
            _log.exception("the handler of %s failed", method)
            message = f"The service failed on {method}; its log says why. The call may have had effect."
            self.finish(number, grpc.StatusCode.INTERNAL.value[0], message)
        self._ask_idle_soon()
        try:
            code, message, result, trailing = await waiting.answered
        except asyncio.CancelledError:
            if waiting.unread:
                self._door.sent(caller, waiting.unread)
            if self._pending.pop(number, None) is not None:
                self._handler.on_cancel(number)
                self._ask_idle_soon()
            raise
        if code:
            await context.abort(_CODES[code], message, tuple(trailing))
        if waiting.unread:
            context.add_done_callback(lambda _: self._door.sent(caller, waiting.unread))
        return result

    def _resolve(self, waiting: _Waiting, answer: _Answer) -> None:
        """Pass an answer to the call that waits for it, or an error if too many answers are unread."""
        if waiting.answered.done():  # its caller has gone
            return
        size = len(answer[2])
        if size >= COUNTED_BYTES:
            refused = self._door.refused_answer(waiting.caller, size)
            if refused:
                answer = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], refused, b"", ()
            else:
                waiting.unread = size
                self._door.sending(waiting.caller, size)
        waiting.answered.set_result(answer)

    def _caller(self, context: Any) -> Connection:
        """Return the connection of a call, and count the call as under way until it is done."""
        caller = self._door.caller(context.peer().encode())
        caller.calls += 1

        def done(_context: object) -> None:
            caller.calls -= 1

        context.add_done_callback(done)
        return caller

    def _refusal(self, code: grpc.StatusCode, words: str) -> Any:
        async def refuse(body: bytes, context: Any) -> None:
            self._door.rejected(self._caller(context))
            await context.abort(code, words)

        return grpc.unary_unary_rpc_method_handler(refuse)

    async def _stream(self, method: str, bodies: AsyncIterator[bytes], context: Any) -> None:
        self._door.accepted(self._caller(context))
        stream = AioStream(asyncio.get_running_loop())
        self._open_streams.add(stream)
        try:
            self._streams[method](stream)
            await stream.serve(bodies, context)
        finally:
            self._open_streams.discard(stream)

    def _ask_idle_soon(self) -> None:
        """Call the handler's `on_idle` once the calls at hand have been taken."""
        if not self._idle_soon:
            self._idle_soon = True
            asyncio.get_running_loop().call_soon(self._ask_idle)

    def _ask_idle(self) -> None:
        self._idle_soon = False
        if self._has_stopped:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            wake_at = self._handler.on_idle()
        except Exception:
            _log.exception("on_idle of the handler failed")
            wake_at = time.monotonic() + _AFTER_FAULT_S
        if wake_at is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wake_at - time.monotonic()), self._ask_idle)

    def _end_calls(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super()._end_calls()

    async def _stop(self) -> None:
        self._end_calls()
        await self._drop(_DRAIN_S)

    async def _drop(self, grace_s: float) -> None:
        """End grpcio's server; it schedules work when it is freed, which runs while the loop still exists."""
        await stop_server(self._server, grace_s)
        self._server = None
        await asyncio.sleep(0)

    def _end_thread(self, thread: LoopThread) -> None:
        thread.stop(2 * _DRAIN_S)
        self._thread = self._server = None
