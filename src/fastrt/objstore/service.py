"""Early Ray's ObjStore, and fastrt's Transfer beside it, served over one arena.

Unary calls are handled on the server's one thread, except those that wait. Deliveries run on the threads of one pool;
waits of a stream (for room in the store, for the scheduler's acknowledgement) run on another pool, so that two stores
that deliver to each other never wait for each other's threads. Chunks of a stream are copied into the arena on the
server's thread as they arrive; gRPC's flow control provides backpressure while a stream is held.

Source: the service ObjStore in protos/ray/objstore.proto; every error is a gRPC status.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from fastrt._core.repair.fsck import usage
from fastrt._core.transfer import chunk
from fastrt._core.transfer import stream as stream_module
from fastrt.config import size_text
from fastrt.errors import FastrtError, NotFoundError, ObjectStoreFullError, SerializationError
from fastrt.net.address import check_bind, is_address, reachable, split_address, with_port
from fastrt.net.grpc.auth import TlsFiles, refused_token
from fastrt.net.grpc.channel import BULK_OPTIONS
from fastrt.net.grpc.contract import Metadata, Stream
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.identity import Identity
from fastrt.net.grpc.server import open_server
from fastrt.net.grpc.standard import CHECK_PATH, StandardServices
from fastrt.objstore.inbound import Inbound, Refused
from fastrt.objstore.local import LocalDoor
from fastrt.objstore.push import DeliveryError, Pusher, chunks
from fastrt.objstore.read import Reading
from fastrt.scheduler.client import SchedulerError
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.transfer import obj
from fastrt.transfer.pull import Puller
from fastrt.transfer.source import Source
from fastrt.transfer.table import DuplicateError, Table, TransferError

_log = logging.getLogger(__name__)
_Code = grpc.StatusCode
_CODES = {code.value[0]: code for code in _Code}
_STREAM = "/ObjStore/StreamObj"
_FETCH = "/fastrt.transfer.Transfer/Fetch"
GET = "/fastrt.transfer.Transfer/GetObj"
READ = "/fastrt.transfer.Transfer/Read"
MEASURE = "/fastrt.transfer.Transfer/Measure"
_MESSAGE_BYTES_MAX = 8 << 20
_INFO_BYTES_MAX = 4 << 20  # bytes of values in one answer: gRPC clients accept 4 MiB by default
_REFUSED_FOR_GOOD = (_Code.INVALID_ARGUMENT, _Code.NOT_FOUND, _Code.FAILED_PRECONDITION)
_THREADS = 8
_KEPT_BYTES = 128 << 20
_UNREPORTED_MAX = 64
_other_numbers = itertools.count(-1, -1)  # of calls of `handle`; the server's are above 0
_TARGET_SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:")  # of gRPC's other names of servers


class ObjStoreServer:
    """Serves a store to other nodes and to clients in any language.

    Args:
        store: this process's attachment.
        token: a bearer token that every call must carry. Without it and `identity`, every process on this machine is
            served; pickles are then rejected, and there is no native stream. The token is sent to other stores over
            TLS only, or with `insecure`.
        identity: a cluster's identity: callers and other stores prove by TLS that they are part of it. Token and tls
            are not used then.
        address: host:port to serve gRPC on; port 0 for any.
        tls: certificates for gRPC. The native stream never uses them.
        insecure: serve beyond loopback although the token and values are sent in the clear; with `identity`, only the
            native stream's values are, after a proof.
        native: whether to serve the native stream, on a separate port of the same host.
        native_identity: the identity of the native stream, if gRPC has a token instead; None: `identity`, and no
            native stream without that.
        on_ready: called with the name of each object that has arrived from another node, on a thread of the pool; an
            error that it raises fails the delivery. After a permanent rejection (INVALID_ARGUMENT, NOT_FOUND,
            FAILED_PRECONDITION) the object is dropped, because it would never be deallocated; after another error
            the delivery may be repeated, and is reported again.
        resolve: finds the reference for the cluster's name of a contained object that is not here.
        timeout_s: the longest time without a byte from or to a peer.

    Raises:
        InsecureBindError: other machines can reach the address in the clear, and `insecure` was not given.
        OSError: the address cannot be bound.
    """

    def __init__(
        self,
        store: Store,
        *,
        token: str | None = None,
        identity: Identity | None = None,
        address: str = "127.0.0.1:0",
        tls: TlsFiles | None = None,
        insecure: bool = False,
        native: bool = True,
        native_identity: Identity | None = None,
        on_ready: Callable[[int], None] | None = None,
        resolve: Callable[[int], ObjectRef] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        served = identity or tls
        if identity is None:
            check_bind(address, authenticated=True, encrypted=tls is not None or insecure)
        self.table = Table(store, resolve)
        self._token = token if identity is None else None
        self._is_trusted = token is not None or identity is not None
        self._on_ready = on_ready
        self._unreported: dict[int, Exception] = {}  # why objects that came unasked were not taken
        self._measured: set[int] = set()  # names of objects that measurements send
        host = split_address(address, 0)[0]
        self._source = None
        self.puller = None
        proved = native_identity or identity
        if proved is not None and native:
            self._source = Source(self.table, proved, host, 0, insecure, timeout_s)
            self.puller = Puller(self.table, proved, None, insecure, timeout_s, on_push=self._pushed)
        self.native_address = reachable(self._source.address) if self._source is not None else None
        self._pusher = Pusher(
            self.table,
            self._token if tls is not None or insecure else None,
            served.channel_credentials() if served is not None else None,
            self.native_address,
            options=identity.channel_options() if identity is not None else (),
            source=self._source,
        )
        self._types = _unary_types()
        self._local = LocalDoor(usage(store.client)["bytes_max"])
        self._getting: dict[int, tuple[int, Future[ObjectRef]]] = {}  # calls of GetObj that wait
        self._handlers = self._unary()
        self._others: dict[int, Callable[[int, str, bytes], None]] = {}  # answers to calls of `handle`
        self._deliveries = ThreadPoolExecutor(_THREADS, "fastrt-deliver")
        self._receptions = ThreadPoolExecutor(_THREADS, "fastrt-receive")
        self._standard = StandardServices(
            ["ObjStore", "fastrt.transfer.Transfer"], [message_set("ray"), message_set("transfer")]
        )
        self._server = open_server(
            self,
            [*self._handlers, CHECK_PATH],
            self._streams(),
            _MESSAGE_BYTES_MAX,
            self._authorize,
            BULK_OPTIONS,
        )
        try:
            port = self._server.bind(address, served.server_credentials() if served is not None else None)
        except BaseException:
            if self._source is not None:
                self._source.close()
            raise
        self.address = with_port(address, port)

    def _unary(self) -> dict[str, Callable[[int, Any], None]]:
        return {
            "/ObjStore/DeliverObj": self._deliver,
            "/ObjStore/NotifyAlias": self._notify_alias,
            "/ObjStore/DeallocateObject": self._deallocate,
            "/ObjStore/ObjStoreInfo": self._info,
            _FETCH: self._fetch,
            GET: self._get,
        }

    def _streams(self) -> dict[str, Callable[[Stream], None]]:
        ours = {_STREAM: self._on_stream, MEASURE: self._on_measure, READ: self._on_read}
        return {**ours, **self._standard.streams}

    def start(self) -> None:
        """Start serving, on separate threads. From now on the process keeps freed memory for the next message."""
        stream_module.keep_freed_memory(_KEPT_BYTES)
        self._server.start()

    def stop(self) -> None:
        """Stop serving, fail the transfers under way, and drop all objects."""
        self._standard.set_serving(False)
        self._pusher.close()
        if self.puller is not None:
            self.puller.close()
        self.table.clear()
        self._server.stop()
        if self._source is not None:
            self._source.close()
        for pool in (self._deliveries, self._receptions):
            pool.shutdown(cancel_futures=True)
        self._local.close()
        self.table.clear()

    def handle(self, path: str, body: bytes, answer: Callable[[int, str, bytes], None]) -> None:
        """Handle a unary call that came on another way; `answer` gets status code, message and reply, on any thread."""
        call = next(_other_numbers)
        self._others[call] = answer
        if path not in self._handlers:
            self._finish(call, _Code.UNIMPLEMENTED.value[0], f"There is no method {path} here.")
            return
        try:
            self.on_call(call, path, body)
        except Exception as exc:  # any error is the answer to the caller
            self._fail(call, exc)

    # ---- what the server calls ----

    def on_call(self, call: int, method: str, body: bytes) -> None:
        """Handle a unary call; it is answered now or later."""
        if method == CHECK_PATH:
            code, message, answer = self._standard.check(body)
            self._server.finish(call, code, message, answer)
            return
        request = self._types[method][0]()
        try:
            request.ParseFromString(body)
            self._handlers[method](call, request)
        except (DecodeError, FastrtError, ValueError) as exc:
            self._fail(call, exc)

    def on_cancel(self, call: int) -> None:
        """Forget a call that waits for an object; any other is carried out all the same."""
        found = self._getting.pop(call, None)
        if found is not None:
            self.table.unexpect(*found)

    def on_idle(self) -> float | None:
        """Return None: no call has a deadline here."""
        return None

    def on_stop(self) -> None:
        """Do nothing: the server cancels open calls."""

    def _authorize(self, method: str, metadata: Metadata) -> str | None:
        return None if self._token is None or method == CHECK_PATH else refused_token(metadata, self._token)

    def _done(self, call: int, method: str = "/ObjStore/DeliverObj", **fields: Any) -> None:
        self._finish(call, body=self._types[method][1](**fields).SerializeToString())

    def _fail(self, call: int, exc: BaseException) -> None:
        code, message = _status_of(exc)
        self._finish(call, code.value[0], message)

    def _finish(self, call: int, code: int = 0, message: str = "", body: bytes = b"") -> None:
        if call > 0:
            self._server.finish(call, code, message, body)
        else:
            self._others.pop(call)(code, message, body)

    # ---- the calls ----

    def _deliver(self, call: int, request: Any) -> None:
        def work() -> None:
            try:
                self._pusher.deliver(request.objstore_address, request.objref)
            except Exception as exc:  # any error is the answer to the caller
                self._fail(call, exc)
            else:
                self._done(call)

        address = request.objstore_address
        if not (is_address(address) or address.startswith(_TARGET_SCHEMES)):
            raise ValueError(f"objstore_address is {address[:40]!r}; it must be host:port")

        def ended(error: BaseException | None) -> None:
            if error is None:
                self._done(call)
            else:
                self._fail(call, error)

        if self.table.find(request.objref) is None:
            raise NotFoundError(f"object {request.objref:#x} is not in this store, so it cannot be delivered")
        if not self._pusher.deliver_small(request.objstore_address, request.objref, ended):
            self._deliveries.submit(work)

    def _notify_alias(self, call: int, request: Any) -> None:
        self.table.alias(request.alias_objref, request.canonical_objref)
        self._done(call)

    def _deallocate(self, call: int, request: Any) -> None:
        self.table.drop(request.canonical_objref)
        self._done(call)

    def _info(self, call: int, request: Any) -> None:
        if not request.objref:
            self._done(call, "/ObjStore/ObjStoreInfo", objref=self.table.listed())
            return

        def work() -> None:
            try:
                values = self._values(request.objref)
            except Exception as exc:  # any error is the answer to the caller
                self._fail(call, exc)
            else:
                self._done(call, "/ObjStore/ObjStoreInfo", objref=self.table.listed(), obj=values)

        self._receptions.submit(work)

    def _values(self, objrefs: Any) -> list[Any]:
        """The requested values; they must fit into one answer."""
        values, left = [], _INFO_BYTES_MAX
        for objref in objrefs:
            sealed = self.table.read(objref)
            left -= len(sealed.pin)
            if left < 0:
                raise Refused(_Code.RESOURCE_EXHAUSTED, f"these objects have more than {_INFO_BYTES_MAX} bytes in all")
            values.append(obj.Obj.FromString(b"".join(self._pusher.parts(objref, sealed, False))))
        return values

    def _fetch(self, call: int, request: Any) -> None:
        failed = self._unreported.pop(request.objref, None)
        if failed is not None:
            self._fail(call, failed)
            return
        was_here = self.table.find(request.objref) is not None

        def ready() -> None:
            try:
                self._report(request.objref, not was_here)
            except Exception as exc:  # a rejection by the scheduler is the answer to the caller
                self._fail(call, exc)
            else:
                self._done(call, _FETCH, here=True)

        if self.puller is None or not request.address:
            if was_here and self._on_ready is not None:
                self._receptions.submit(ready)  # its arrival may not have been reported
            else:
                self._done(call, _FETCH, here=was_here)
            return

        def arrived(future: Future[ObjectRef]) -> None:
            error = future.exception()
            if error is not None:
                self._fail(call, error)
            elif self._on_ready is None:
                ready()
            else:
                self._receptions.submit(ready)

        self.puller.pull(request.objref, request.address, request.name).add_done_callback(arrived)

    def _pushed(self, objref: int, is_new: bool, answer: Callable[[bool], None]) -> None:
        """Answer for an object that came unasked: at once, or after the scheduler has taken the report."""
        if self._on_ready is None:
            answer(True)
            return

        def report() -> None:
            try:
                self._report(objref, is_new)
            except Exception as exc:  # the sender then requests that it be fetched, and gets the error
                while len(self._unreported) >= _UNREPORTED_MAX:
                    self._unreported.popitem()
                self._unreported[objref] = exc
                answer(False)
            else:
                answer(True)

        self._receptions.submit(report)

    def _report(self, objref: int, is_new: bool) -> None:
        """Report an object to the scheduler; a new object that the scheduler does not know is dropped."""
        if self._on_ready is None or objref in self._measured:
            return
        try:
            self._on_ready(objref)
        except Exception as exc:
            if is_new and _code_of(exc) in _REFUSED_FOR_GOOD:
                with contextlib.suppress(NotFoundError):  # deallocated meanwhile
                    self.table.drop(objref)
            raise

    # ---- Measure ----

    def _on_measure(self, stream: Stream) -> None:
        """Assign a name to a measurement's objects, until its caller ends the call or disconnects."""
        objref = secrets.randbits(63) | 1 << 63

        def receive(body: bytes | None) -> None:
            if body is None or objref in self._measured:
                return
            types = message_set("transfer").methods("fastrt.transfer.Transfer")["Measure"]
            try:
                nbytes = types[0].FromString(body).nbytes
            except DecodeError as exc:
                stream.finish(_Code.INVALID_ARGUMENT.value[0], str(exc))
                return
            room = usage(self.table.store.client)["bytes_max"]
            if nbytes > room:
                words = f"objects of {size_text(nbytes)} do not fit into this store of {size_text(room)}"
                stream.finish(_Code.RESOURCE_EXHAUSTED.value[0], words)
                return
            self._measured.add(objref)
            stream.send(types[1](objref=objref).SerializeToString())

        def closed() -> None:
            stream.receiver = lambda body: None
            self._measured.discard(objref)
            with contextlib.suppress(NotFoundError):
                self.table.drop(objref)

        stream.receiver, stream.on_closed = receive, closed

    # ---- Read and GetObj ----

    def _get(self, call: int, request: Any) -> None:
        objref = request.objref

        def work() -> None:
            try:
                parts = self._pusher.parts(objref, self.table.read(objref), False)
                bucket, handle, size = self._local.offer(parts)
            except Exception as exc:  # any error is the answer to the caller
                self._fail(call, exc)
            else:
                self._done(call, GET, bucket=bucket, handle=handle, size=size)

        def arrived(done: Future[ObjectRef]) -> None:
            error = done.exception()
            if self._getting.pop(call, None) is None:
                return  # its caller has gone
            if error is not None:
                self._fail(call, error)
            else:
                self._receptions.submit(work)

        future = self.table.expect(objref)
        self._getting[call] = objref, future
        future.add_done_callback(arrived)

    def _on_read(self, stream: Stream) -> None:
        """Send an object to a client that has no server, a chunk at a time."""

        def receive(body: bytes | None) -> None:
            if body is None:
                return
            stream.receiver = lambda more: None  # one request
            try:
                objref = message_set("transfer").message("fastrt.transfer.ReadRequest").FromString(body).objref
            except DecodeError as exc:
                stream.finish(_Code.INVALID_ARGUMENT.value[0], str(exc))
            else:
                self._receptions.submit(self._read, stream, reading, objref)

        reading = Reading(stream)
        stream.receiver = receive

    def _read(self, stream: Stream, reading: Reading, objref: int) -> None:
        try:
            sealed = self.table.read(objref)
            reading.begin(chunks(objref, self._pusher.parts(objref, sealed, False)))
        except Exception as exc:  # any error is the answer to the caller
            code, message = _status_of(exc)
            stream.finish(code.value[0], message)

    # ---- StreamObj ----

    def _on_stream(self, stream: Stream) -> None:
        inbound = Inbound(self.table, self._is_trusted)

        def receive(body: bytes | None) -> None:
            try:
                if body is None:
                    self._receptions.submit(self._end, stream, inbound)
                elif inbound.started:
                    inbound.chunk(chunk.decode(body))
                else:
                    stream.hold()  # the store may have to free memory first
                    self._receptions.submit(self._begin, stream, inbound, chunk.decode(body))
            except (FastrtError, ValueError) as exc:
                self._refuse(stream, inbound, exc)

        def closed() -> None:
            inbound.abandon(TransferError("the sender disconnected"))
            # The stream and its receiver reference each other: the object would live until the garbage collector runs.
            stream.receiver = lambda body: None

        stream.receiver, stream.on_closed = receive, closed

    def _begin(self, stream: Stream, inbound: Inbound, first: chunk.Chunk) -> None:
        try:
            inbound.chunk(first)
        except Exception as exc:  # any error is the answer to the sender
            self._refuse(stream, inbound, exc)
        else:
            stream.resume()

    def _end(self, stream: Stream, inbound: Inbound) -> None:
        try:
            self._report(inbound.finish(), True)
        except Exception as exc:  # any error is the answer to the sender
            self._refuse(stream, inbound, exc)
        else:
            stream.send(b"")
            stream.finish()

    def _refuse(self, stream: Stream, inbound: Inbound, exc: BaseException) -> None:
        stream.hold()
        inbound.abandon(exc)
        code, message = _status_of(exc)
        stream.finish(code.value[0], message)


def _unary_types() -> dict[str, tuple[Any, Any]]:
    """The request and response classes of the unary methods, by path."""
    ours = message_set("transfer").methods("fastrt.transfer.Transfer")
    types = {f"/ObjStore/{name}": pair for name, pair in message_set("ray").methods("ObjStore").items()}
    return {**types, _FETCH: ours["Fetch"], GET: ours["GetObj"]}


def _code_of(exc: BaseException) -> grpc.StatusCode | None:
    """The status code of a scheduler's answer, None for any other error."""
    return _Code.__members__.get(exc.code) if isinstance(exc, SchedulerError) else None


def _status_of(exc: BaseException) -> tuple[grpc.StatusCode, str]:
    """The gRPC status code and message of an error."""
    if isinstance(exc, Refused):
        return exc.code, str(exc)
    if isinstance(exc, DeliveryError):
        return _CODES.get(exc.code, _Code.UNKNOWN), f"the other store reports: {exc}"
    if isinstance(exc, SchedulerError):
        return _code_of(exc) or _Code.UNAVAILABLE, f"the scheduler reports: {exc}"
    if isinstance(exc, grpc.RpcError) and isinstance(exc, grpc.Call):
        return exc.code(), f"the other store reports: {exc.details()}"
    for kind, code in (
        (NotFoundError, _Code.NOT_FOUND),
        (DuplicateError, _Code.ALREADY_EXISTS),
        (ObjectStoreFullError, _Code.RESOURCE_EXHAUSTED),
        (TransferError, _Code.UNAVAILABLE),
        (SerializationError, _Code.FAILED_PRECONDITION),
        (FastrtError, _Code.FAILED_PRECONDITION),
        (DecodeError, _Code.INVALID_ARGUMENT),
        (ValueError, _Code.INVALID_ARGUMENT),
    ):
        if isinstance(exc, kind):
            return code, str(exc)
    _log.error("an object store's call failed", exc_info=exc)
    return _Code.INTERNAL, f"The store failed: {exc!r}."
