"""Large values between two nodes: offered on the exchange, transferred over the native stream of `transfer`.

The sender of a value sends its size, kind and contents on the exchange, and a number instead of its bytes. Once the
receiver has room for the value (`inbox`), it fetches the value by that number from the sender's native stream, straight
into the memory of the result that it becomes, and answers `taken`. If it cannot reach that stream, it answers `again`,
and the bytes are sent in pieces, as between nodes without native streams.

Invariants: an offer lasts until it is answered or the exchange ends; nothing is written into a result's memory once
`cancel` has returned, because it may then belong to another value; everything except the transfer of bytes runs on the
loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from fastrt._core.memory import trace
from fastrt._core.objects.handles import Writer
from fastrt.cluster.outbox import PIECE_BYTES
from fastrt.errors import NotFoundError
from fastrt.net.address import split_address
from fastrt.net.grpc.streams import Access
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.transfer.pull import Puller
from fastrt.transfer.source import Source
from fastrt.transfer.table import Receipt, Sealed, Table, TransferError

# Smaller values are sent in one piece with the tasks that need them. A value in several pieces would occupy memory on
# the receiver before its last piece has arrived, and might wait behind others that there is no room for.
BYTES_MIN = PIECE_BYTES + 1
_OBJREF_MOST = (1 << 64) - 1
_SILENCE_S = 5.0  # an exchange whose network is cut ends after 10 s


class Offers(Table):
    """The values that other nodes may fetch from here, by number. Numbers of two processes do not collide."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._next = secrets.randbits(62)

    def offer(self, ref: ObjectRef) -> int:
        """Make a value available and return its number."""
        self._next += 1
        self.add(self._next, ref)
        return self._next

    def read(self, objref: int) -> Sealed:
        """Pin a value's bytes. The objects that it contains are named on the exchange.

        Raises:
            NotFoundError: the value is not offered any more.
            FastrtError: the value cannot be read.
        """
        ref = self.find(objref)
        if ref is None:
            raise NotFoundError(f"value {objref:#x} is not offered any more")
        kind, is_error, pin = self.store.read(ref, raw=True)
        return Sealed(kind, is_error, pin, [])


class Native:
    """This node's native stream for its exchanges.

    Args:
        store: this process's attachment.
        access: the cluster's identity.
        host: the address to listen at.

    Raises:
        OSError: it cannot listen at that address.
    """

    def __init__(self, store: Store, access: Access, host: str) -> None:
        self.offers = Offers(store)
        self.access = access
        self._source = Source(self.offers, access.identity, host, 0, access.insecure, _SILENCE_S)
        self.address = self._source.address

    def close(self) -> None:
        """Stop serving."""
        self._source.close()


class _Arrival(Receipt):
    """A value in transit into memory that was already allocated for it."""

    __slots__ = ("_kind", "_then")

    def __init__(self, table: Table, number: int, writer: Writer, kind: int, then: Callable[..., None]) -> None:
        super().__init__(table, number)
        self.writer = writer
        self._kind = kind
        self._then = then

    def allocate(self, total: int, kind: int, is_error: bool, nrefs: int = 0) -> memoryview:
        assert self.writer is not None
        if (total, kind, nrefs) != (len(self.writer), self._kind, 0):
            raise TransferError(
                f"value {self.objref:#x} has kind {kind}, {total} bytes and {nrefs} references; it was "
                f"announced with kind {self._kind} and {len(self.writer)} bytes"
            )
        self.total = total
        self.view = memoryview(self.writer)
        return self.view

    def seal(self) -> None:
        self._finish(None)

    def fail(self, error: BaseException) -> None:
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        self.view = self.writer = None
        if not self.ended:
            self.end(None, error)
            self._then(self.objref, error)


class _Arrivals(Table):
    """The values in transit from one node."""

    def begin_many(self, objrefs: Iterable[int]) -> tuple[list[ObjectRef | Receipt], list[Receipt]]:
        found: list[Receipt] = [self._coming[objref] for objref in objrefs]
        return [*found], found

    def allocate_many(self, specs: list[tuple[int, int, bool]]) -> list[Writer]:
        raise TransferError("the peer sent small values over the native stream, but announced none")


class _Offer(NamedTuple):
    """An offered value: `then` is called once it was taken; it may be sent in pieces instead."""

    ref: ObjectRef
    then: Callable[[], None]
    where: dict[str, int]


class Values:
    """The large values of one exchange, in both directions.

    Attributes:
        is_known: whether the peer also has a native stream, and so understands offers.
        is_reachable: whether the peer's native stream can be reached; otherwise this node requests pieces.

    Args:
        native: this node's native stream.
        landed: called on the loop's thread with the number of each value that has arrived, and None or an error.
    """

    def __init__(self, native: Native, landed: Callable[[int, BaseException | None], None]) -> None:
        self._offers = native.offers
        self._loop = asyncio.get_running_loop()
        self._landed = landed
        self._open: dict[int, _Offer] = {}
        self._arrivals = _Arrivals(native.offers.store)
        access = native.access
        self._puller = Puller(self._arrivals, access.identity, None, access.insecure, _SILENCE_S)
        self._traced: dict[int, int] = {}  # trace records of the values on their way
        self._address = ""
        self.is_known = self.is_reachable = False

    def connect(self, address: str) -> None:
        """Set the address of the peer's native stream; empty: the peer has none."""
        self._address = address
        self.is_known = self.is_reachable = bool(address)

    # ---- outgoing ----

    def offer(self, ref: ObjectRef, then: Callable[[], None], where: dict[str, int]) -> int:
        """Offer a value and return its number.

        Args:
            ref: the value.
            then: called when it has been taken.
            where: the message fields that say which value it is, for another attempt in pieces.
        """
        number = self._offers.offer(ref)
        self._open[number] = _Offer(ref, then, where)
        return number

    def answered(self, number: int) -> _Offer | None:
        """Remove and return an offer that the peer has answered; None when there is no such offer."""
        offer = self._open.pop(number, None)
        if offer is not None:
            self._offers.drop(number)
        return offer

    # ---- incoming ----

    def take(self, number: int, writer: Writer, kind: int) -> None:
        """Fetch an announced value into its memory; `landed` is called when it is complete."""
        self._arrivals._coming[number] = _Arrival(self._arrivals, number, writer, kind, self._on_end)
        client = self._offers.store.client
        self._traced[number] = trace.begin(client, trace.FETCH, number & _OBJREF_MOST, trace.kib(len(writer)))
        self._puller.ask([number], self._address)

    def cancel(self, number: int) -> None:
        """Stop writing a value; `landed` is not called for it any more."""
        arrival = self._arrivals._coming.pop(number, None)
        if arrival is not None:
            arrival.ended = True
            self._puller.cancel(arrival)
            trace.end(self._offers.store.client, self._traced.pop(number, 0))

    def close(self) -> None:
        """Cancel all fetches and withdraw all offers, because the exchange has ended."""
        for number in list(self._arrivals._coming):
            self.cancel(number)
        for number in self._open:
            self._offers.drop(number)
        self._open.clear()
        # A thread that is connecting ends only after a while; the loop does not wait for it.
        threading.Thread(target=self._puller.close, name="fastrt-values-end", daemon=True).start()

    def _on_end(self, number: int, error: BaseException | None) -> None:
        """Report the end of a fetch to the loop; runs on the stream's thread."""

        def report() -> None:
            trace.end(self._offers.store.client, self._traced.pop(number, 0))
            self.is_reachable = self.is_reachable and error is None
            if self._arrivals._coming.pop(number, None) is not None:
                self._landed(number, error)

        with contextlib.suppress(RuntimeError):  # the process ends, and its loop is closed
            self._loop.call_soon_threadsafe(report)


def open_native(store: Store, access: Access, listen: str) -> Native:
    """Open this node's native stream.

    Args:
        store, access: as for `Native`.
        listen: host:port of the node; the native stream has another port on this host.
    Raises:
        OSError: it cannot listen at that host.
    """
    return Native(store, access, split_address(listen, 0)[0])
