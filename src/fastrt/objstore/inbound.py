"""The receiver of one StreamObj: every chunk is validated against the first one before its data are kept.

The first chunk announces the object's name and size. With the first data, memory for the whole object is allocated,
and each chunk's data are written straight into it; a chunk without data may come at any time. An envelope of another
fastrt store (`obj.envelope`) becomes an object of the arena unchanged; any other `Obj` is collected in the arena,
parsed when it is complete, and stored as a value.

Source: StreamObj of early Ray's object store: chunks in order, all of one objref and one totalsize, which is their sum.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import grpc

from fastrt._core.transfer.chunk import Chunk
from fastrt.errors import FastrtError, ObjectLostError, ObjectStoreFullError
from fastrt.store.serialize import PICKLE
from fastrt.transfer import obj
from fastrt.transfer.table import DuplicateError, Receipt, Table, TransferError

_Code = grpc.StatusCode


class Refused(TransferError):
    """A stream violates the protocol; `code` is the gRPC status for its sender."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Inbound:
    """Receives one object.

    Args:
        table: the table that receives it.
        trusted: whether the sender has shown the session's token, so that pickles may be opened.
    """

    def __init__(self, table: Table, trusted: bool) -> None:
        self._table = table
        self._trusted = trusted
        self._receipt: Receipt | None = None
        self._view: memoryview | None = None
        self._objref = self._total = 0  # as the first chunk announces them
        self._received = 0  # bytes of the object on the wire
        self._skip = 0  # bytes of the head, which are not kept
        self._keep = 0  # bytes that are kept
        self._tail = b""
        self._raw = False
        self._lock = threading.Lock()  # guards the three below; never held during a wait
        self._busy = False
        self._ended = False
        self._error: BaseException = TransferError("the sender has gone")

    @property
    def started(self) -> bool:
        """Whether the first chunk with data was received."""
        return self._receipt is not None

    def chunk(self, chunk: Chunk) -> None:
        """Receive one chunk. The first with data may wait for room in the store; the others never wait.

        Raises:
            Refused: the chunk violates the protocol, or there is no room.
        """
        with self._at_work():
            self._take(chunk)

    def finish(self) -> int:
        """Make the object visible, after the sender's last chunk; returns its name.

        Raises:
            Refused: the stream was empty or too short, or its bytes are not a value.
        """
        with self._at_work():
            return self._complete()

    def abandon(self, error: BaseException) -> None:
        """Release the memory; does nothing if the object has arrived. May be called from any thread at any time."""
        with self._lock:
            if self._ended:
                return
            self._ended, self._error = True, error
            if self._busy:
                return
        self._let_go()

    # ---- helpers ----

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Guard all changes; an `abandon` meanwhile leaves the release of the memory to this block."""
        with self._lock:
            if self._ended:
                raise Refused(_Code.CANCELLED, str(self._error))
            self._busy = True
        try:
            yield
        finally:
            self._rest()

    def _rest(self) -> None:
        with self._lock:
            self._busy = False
            ended = self._ended
        if ended:
            self._let_go()

    def _let_go(self) -> None:
        receipt, self._receipt, self._view = self._receipt, None, None
        if receipt is not None:
            receipt.fail(self._error)

    def _take(self, chunk: Chunk) -> None:
        if not self._total:
            self._announce(chunk)
        if chunk.objref != self._objref or chunk.totalsize != self._total:
            raise Refused(
                _Code.INVALID_ARGUMENT,
                f"a chunk of object {chunk.objref:#x} of {chunk.totalsize} bytes is in the stream of object "
                f"{self._objref:#x} of {self._total}",
            )
        size = len(chunk)
        if size > self._total - self._received:
            raise Refused(
                _Code.OUT_OF_RANGE,
                f"object {self._objref:#x} was announced with {self._total} bytes, and more than that were sent",
            )
        if size == 0:
            return
        if self._receipt is None:
            self._begin(chunk)
        self._write(memoryview(chunk))
        self._received += size

    def _complete(self) -> int:
        receipt = self._receipt
        if not self._total:
            raise Refused(_Code.INVALID_ARGUMENT, "the stream ended without a chunk, so it has no object")
        if receipt is None or self._received != self._total:
            raise Refused(
                _Code.INVALID_ARGUMENT,
                f"the stream of object {self._objref:#x} ended after {self._received} of {self._total} bytes",
            )
        try:
            if self._raw:
                if self._tail != obj.TAIL:
                    raise obj.ObjError(f"the pickle of object {receipt.objref:#x} has no proper end")
                receipt.received = receipt.total
                receipt.seal()
            else:
                self._put(receipt)
        except FastrtError as exc:
            raise self._refusal(exc) from exc
        return receipt.objref

    def _announce(self, chunk: Chunk) -> None:
        if chunk.totalsize == 0:
            raise Refused(
                _Code.INVALID_ARGUMENT, f"object {chunk.objref:#x} is announced with 0 bytes; an Obj has at least two"
            )
        self._objref, self._total = chunk.objref, chunk.totalsize

    def _begin(self, chunk: Chunk) -> None:
        """Allocate the object's memory: its first bytes show the form in which it is kept."""
        objref, total = self._objref, self._total
        head = obj.opened(memoryview(chunk), total) if self._trusted else None
        receipt, _ = self._table.begin(objref)
        if receipt is None:
            raise self._refusal(DuplicateError(f"object {objref:#x} is in this store already, or being received"))
        self._receipt = receipt  # released by `abandon` from now on
        try:
            if head is not None:
                kind, is_error, self._keep, self._skip = head
                self._raw = True
                self._view = receipt.allocate(self._keep, kind, is_error)
            else:
                self._keep = total
                self._view = receipt.allocate(total, PICKLE, False)  # any kind: it is never sealed
        except FastrtError as exc:
            raise self._refusal(exc) from exc

    def _write(self, data: memoryview) -> None:
        """Write the value's part of the next bytes."""
        start = self._received - self._skip
        writer = self._receipt.writer if self._receipt is not None else None
        if writer is None:
            raise Refused(_Code.ABORTED, f"object {self._objref:#x} was deallocated while it was being received")
        if start < 0:
            data, start = data[-start:], 0
        room = self._keep - start
        if room > 0:
            writer.copy(start, data[:room])
        if len(data) > max(room, 0):
            self._tail += bytes(data[max(room, 0) :])

    def _put(self, receipt: Receipt) -> None:
        """Store the value of the received `Obj`, or the error that it describes."""
        assert self._view is not None
        data, self._view = bytes(self._view), None  # protobuf reads from bytes only
        try:
            value = obj.from_bytes(data, self._trusted, self._table.resolve)
        except obj.ForeignError as exc:
            receipt.put(exc.with_traceback(None), True)
        else:
            receipt.put(value)

    def _refusal(self, exc: FastrtError) -> Refused:
        for kind, code in (
            (Refused, None),
            (ObjectStoreFullError, _Code.RESOURCE_EXHAUSTED),
            (DuplicateError, _Code.ALREADY_EXISTS),
            (obj.UntrustedPickleError, _Code.PERMISSION_DENIED),
            (ObjectLostError, _Code.ABORTED),
            (TransferError, _Code.FAILED_PRECONDITION),
            (obj.ObjError, _Code.INVALID_ARGUMENT),
        ):
            if isinstance(exc, kind):
                return exc if code is None and isinstance(exc, Refused) else Refused(code or _Code.INTERNAL, str(exc))
        return Refused(_Code.INTERNAL, f"the object could not be stored: {exc}")
