"""Sending an object to another store: DeliverObj's work.

There are three ways. Another fastrt store gets the address of the native stream and fetches the object from there; that
connection then has a name, and further small objects are sent over it without a call before.
Without a native stream (with TLS, where no data may be sent in the clear) it gets StreamObj with the arena's bytes in
an envelope. Any other store gets StreamObj with a plain `Obj`. One small call, `Transfer.Fetch`, decides first; only
fastrt implements it. A receiver that has the object already counts as success; a fastrt store that is receiving it from
another source is polled until it has it.

A store that has answered `Fetch` as unknown is not asked again for a while, and gets an object of one chunk without a
thread that waits: a stream of one message is a unary call, whose answer is a callback.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from fastrt._core.transfer import chunk
from fastrt.errors import NotFoundError
from fastrt.net.grpc.caller import Caller, open_caller
from fastrt.net.grpc.channel import BULK_OPTIONS, bearer, open_channel
from fastrt.net.grpc.descriptors import message_set
from fastrt.transfer import obj
from fastrt.transfer.source import Source
from fastrt.transfer.table import Sealed, Table, TransferError

CHUNK_BYTES = 1 << 20
_FETCH = "/fastrt.transfer.Transfer/Fetch"
_STREAM = "/ObjStore/StreamObj"
_CALL_S = 30.0
_AGAIN_S = 0.02
_SMALL_BYTES = 64 << 10  # of an object that is sent by a callback
_OTHER_KIND_S = 10.0  # a store that did not know `Fetch` may be replaced by one of fastrt at the same address
_OK = 0
_ALREADY_EXISTS = grpc.StatusCode.ALREADY_EXISTS.value[0]


class DeliveryError(TransferError):
    """Another store rejected an object, or was not reached; `code` is the gRPC status's number."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


Part = tuple[int, int, memoryview]  # a chunk's objref, totalsize and data


def chunks(objref: int, parts: list[bytes | memoryview], chunk_bytes: int = CHUNK_BYTES) -> Iterator[Part]:
    """Cut an object into parts for `write_chunk`: at least one chunk, even for an empty object."""
    views = [memoryview(part) for part in parts]
    total = sum(view.nbytes for view in views)
    if total == 0:
        yield objref, 0, memoryview(b"")
    for view in views:
        for start in range(0, view.nbytes, chunk_bytes):
            yield objref, total, view[start : start + chunk_bytes]


def write_chunk(part: Part) -> bytes:
    """The serializer of StreamObj."""
    return chunk.encode(*part)


class Pusher:
    """Sends objects of a table to other stores.

    Args:
        table: the objects.
        token: a bearer token, sent with every call; None sends none.
        credentials: for TLS; None for the clear.
        native_address: host:port of this store's native stream for other nodes; None when there is none.
        chunk_bytes: the size of a message of StreamObj.
        timeout_s: for a whole delivery.
        options: gRPC channel options.
        source: the native stream at `native_address`; None: every object is offered by a call.
    """

    def __init__(
        self,
        table: Table,
        token: str | None,
        credentials: grpc.ChannelCredentials | None = None,
        native_address: str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        timeout_s: float = 600.0,
        options: Sequence[tuple[str, Any]] = (),
        source: Source | None = None,
    ) -> None:
        self._table = table
        self._source = source
        self._names: dict[str, int] = {}  # of the connections of stores, by address
        self._options = (*BULK_OPTIONS, *options)
        self._metadata = bearer(token) if token is not None else ()
        self._credentials = credentials
        self._native_address = native_address
        self._chunk_bytes = chunk_bytes
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._callers: dict[str, Caller] = {}
        self._other_kind_until: dict[str, float] = {}  # addresses of stores that are not fastrt's
        self._closed = False
        self._fetch_types = message_set("transfer").methods("fastrt.transfer.Transfer")["Fetch"]

    def deliver(self, address: str, objref: int) -> None:
        """Deliver an object to the store at `address`, and wait until it has arrived.

        Raises:
            NotFoundError: the object is not here.
            SerializationError: it cannot be sent to a store that is not fastrt's.
            TransferError: another sender was delivering it, and did not finish in time.
            grpc.RpcError: the other store rejects it, or cannot be reached.
        """
        sealed = self._table.read(objref)  # pinned until the end, so that it is not spilled meanwhile
        if self._source is not None and len(sealed.pin) <= _SMALL_BYTES and not sealed.refs:
            name = self._names.get(address)
            if name is not None and self._source.push(name, objref, sealed, _CALL_S):
                return
        channel = self._channel(address)
        fetched = None if self._is_other_kind(address) else self._fetch(channel, objref, address)
        if fetched is None:
            self._other_kind_until[address] = time.monotonic() + _OTHER_KIND_S
        until = time.monotonic() + self._timeout_s
        while not fetched:
            if self._stream(channel, objref, self.parts(objref, sealed, fetched is not None)):
                return
            # Another sender's stream delivers it. That sender may be dead already: then this store delivers it.
            if fetched is None:
                return
            if time.monotonic() > until:
                raise TransferError(
                    f"object {objref:#x} has not arrived at {address}, where another sender was delivering it"
                )
            time.sleep(_AGAIN_S)
            fetched = self._fetch(channel, objref, address)

    def deliver_small(self, address: str, objref: int, done: Callable[[BaseException | None], None]) -> bool:
        """Deliver a small object to a store that is not fastrt's, without waiting.

        Args:
            address: of the store.
            objref: the object, which is here.
            done: called with None once the object has arrived, or with the error, as of `deliver`; it must not block.
        Returns:
            Whether this was begun; if not, only `deliver` can do it.
        """
        if not (self._is_other_kind(address) and self._table.is_at_hand(objref)):
            return False
        sealed = self._table.read(objref)
        if len(sealed.pin) > _SMALL_BYTES:
            return False
        data = b"".join(self.parts(objref, sealed, False))
        caller = self._caller(address)
        if caller is None:
            return False

        def ended(code: int, message: str, answer: bytes) -> None:
            done(None if code in (_OK, _ALREADY_EXISTS) else DeliveryError(code, message))

        body = chunk.encode(objref, len(data), memoryview(data))
        caller.call(_STREAM, body, self._timeout_s, ended)
        return True

    def _is_other_kind(self, address: str) -> bool:
        return time.monotonic() < self._other_kind_until.get(address, 0.0)

    def parts(self, objref: int, sealed: Sealed, to_fastrt: bool) -> list[bytes | memoryview]:
        """Make the serialised `Obj` of an object for StreamObj, in pieces.

        Args:
            objref: the object's name.
            sealed: its bytes.
            to_fastrt: whether the receiver understands fastrt's envelopes.
        Returns:
            The pieces; the large one is a view of the arena.
        Raises:
            NotFoundError: it has been deallocated meanwhile.
            SerializationError: a part of it that must be pickled contains references.
        """
        if to_fastrt and not sealed.refs and obj.is_raw(sealed.kind):
            head = obj.envelope(sealed.kind, sealed.is_error, len(sealed.pin))
            return [head, memoryview(sealed.pin), obj.TAIL]
        ref = self._table.find(objref)
        if ref is None:
            raise NotFoundError(f"object {objref:#x} is no longer in this store")
        try:
            return obj.to_parts(self._table.store.load(ref), self._table.name_of)
        except BaseException as exc:
            if not sealed.is_error:
                raise
            return [obj.error_to_bytes(exc)]

    def close(self) -> None:
        """Close the channels; deliveries under way fail."""
        with self._lock:
            self._closed = True
            channels, self._channels = list(self._channels.values()), {}
            callers, self._callers = list(self._callers.values()), {}
        for each in (*channels, *callers):
            each.close()

    def _channel(self, address: str) -> grpc.Channel:
        with self._lock:
            channel = self._channels.get(address)
            if channel is None:
                channel = self._channels[address] = open_channel(address, self._credentials, self._options)
            return channel

    def _caller(self, address: str) -> Caller | None:
        with self._lock:
            caller = self._callers.get(address)
            if caller is None and not self._closed:
                caller = open_caller(address, self._credentials, self._options, self._metadata)
                self._callers[address] = caller
            return caller

    def _fetch(self, channel: grpc.Channel, objref: int, address: str) -> bool | None:
        """Request that a fastrt store fetch the object: whether it has it now; None for another kind of store."""
        request, reply = self._fetch_types
        call = channel.unary_unary(_FETCH, request.SerializeToString, reply.FromString)
        name = 0
        if self._source is not None:
            name = self._names.setdefault(address, secrets.randbits(64) | 1)
        wanted = request(objref=objref, address=self._native_address or "", name=name)
        timeout_s = self._timeout_s if self._native_address else _CALL_S
        try:
            return bool(call(wanted, timeout=timeout_s, metadata=self._metadata).here)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return None
            raise

    def _stream(self, channel: grpc.Channel, objref: int, parts: list[bytes | memoryview]) -> bool:
        """Send the object; False when the receiver has it already or is receiving it from another sender."""
        call = channel.stream_unary(_STREAM, write_chunk, bytes)
        try:
            call(chunks(objref, parts, self._chunk_bytes), timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise
            return False
        return True
