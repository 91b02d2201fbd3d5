"""Large values between two nodes: offered on the exchange, transferred over the native stream of `transfer`.

The sender of a value sends its size, kind and contents on the exchange, and a number instead of its bytes. Once the
receiver has room for the value (`inbox`), it fetches the value by that number from the sender's native stream, straight
into the memory of the result that it becomes, and answers `taken`. If it cannot reach that stream, it answers `again`,
and the bytes are sent in pieces, as between nodes without native streams.

The value of an object that the peer holds is offered for as long as the peer holds it: the peer may drop its copy and
fetch it again, and may pass the offer on to a third node, which then fetches straight from here.

Invariants: any other offer lasts until it is answered or the exchange ends; nothing is written into a result's memory
once `cancel` has returned, because it may then belong to another value; everything except the transfer of bytes runs on
the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from fastrt._core.memory import trace
from fastrt._core.objects.handles import Pin, Writer
from fastrt._core.objects.remote import Fill
from fastrt.cluster.outbox import PIECE_BYTES
from fastrt.errors import NotFoundError
from fastrt.net.address import split_address
from fastrt.net.grpc.streams import Access
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.transfer.pull import Puller
from fastrt.transfer.source import Source
from fastrt.transfer.table import Receipt, Sealed, Table, TransferError
from fastrt.transfer.wire import FRAME_BYTES

# Smaller values are sent in one piece with the tasks that need them. A value in several pieces would occupy memory on
# the receiver before its last piece has arrived, and might wait behind others that there is no room for.
BYTES_MIN = PIECE_BYTES + 1
_OBJREF_MOST = (1 << 64) - 1
_PART_BYTES_MIN = 8 << 20  # a connection that is new needs some MiB until it is at its full speed
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

    def read_many(self, objrefs: list[int], bytes_max: int, total_max: int) -> list[tuple[int, bool, Pin] | None]:
        """Return nothing: each value was announced, so its receiver has memory for it and takes no bundles."""
        return [None] * len(objrefs)


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


_Then = Callable[["_Arrival", "BaseException | None"], None]


class _Arrival(Receipt):
    """A value, or a part of one, in transit into memory that was already allocated for it.

    Two of them can have one number: the same bytes, for two values whose offers a third node answers for.
    """

    __slots__ = ("_kind", "_then")

    def __init__(self, table: Table, number: int, writer: Any, kind: int, part: tuple[int, int], then: _Then) -> None:
        super().__init__(table, number)
        self.received, self.until = part
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
            self._then(self, error)


class _Arrivals(Table):
    """The store that values from one node arrive in. It has no names: each value has memory of its own already."""

    def allocate_many(self, specs: list[tuple[int, int, bool]]) -> list[Writer]:
        raise TransferError("the peer sent small values over the native stream, but announced none")


@dataclass
class _Transit:
    """A value on its way.

    Attributes:
        arrivals: its parts that have not arrived, each from another node.
        trace_record: of the fetch.
        is_elsewhere: whether third nodes send it.
    """

    arrivals: list[_Arrival]
    trace_record: int
    is_elsewhere: bool


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
        may_claim: whether the peer may claim objects on its next stream, after the end of this one.
        on_keep: called with each object that must outlive this process: its value is offered for as long as the peer
            holds it, or does not exist yet.
        on_release: called with its number when the peer has released it.

    Args:
        native: this node's native stream.
        landed: called on the loop's thread with the number of each value that has arrived, and None or an error.
    """

    def __init__(self, native: Native, landed: Callable[[int, BaseException | None], None]) -> None:
        self._offers = native.offers
        self._loop = asyncio.get_running_loop()
        self._landed = landed
        self._open: dict[int, _Offer] = {}
        self._kept: dict[int, list[int]] = {}  # by object: the numbers under which the peer may know its value
        # By such a number: the objects. Several local objects can stand for one value of a third node.
        self._named: dict[int, dict[int, _Offer]] = {}
        self._arrivals = _Arrivals(native.offers.store)
        access = native.access
        self._puller = Puller(self._arrivals, access.identity, None, access.insecure, _SILENCE_S)
        self._transit: dict[int, _Transit] = {}  # values on their way
        self._address = ""
        self.on_keep: Callable[[ObjectRef], None] = lambda ref: None
        self.on_release: Callable[[int], None] = lambda objref: None
        self.is_known = self.is_reachable = False
        self.may_claim = True

    @property
    def address(self) -> str:
        """The address of the peer's native stream; empty: the peer has none."""
        return self._address

    def connect(self, address: str, may_claim: bool = True) -> None:
        """Set the address of the peer's native stream (empty: the peer has none), and whether it may claim objects."""
        self.may_claim = may_claim
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

    def keep(self, ref: ObjectRef, elsewhere: int = 0) -> int:
        """Offer the value of an object for as long as the peer holds the object; return its number.

        Args:
            ref: the object.
            elsewhere: the number under which a third node offers the value; 0: this node offers it.
        """
        numbers = self._kept.setdefault(ref.objref, [])
        for number in numbers:
            if number == elsewhere or (not elsewhere and self._offers.find(number) is not None):
                return number
        number = elsewhere or self._offers.offer(ref)
        numbers.append(number)
        self._named.setdefault(number, {})[ref.objref] = _Offer(ref, _nothing, {"objref": ref.objref})
        if self.may_claim:
            self.on_keep(ref)
        return number

    def kept_object(self, number: int) -> int | None:
        """Return the object whose value is offered under a number for as long as the peer holds it."""
        return next(iter(self._named.get(number, ())), None)

    def offer_copy(self, ref: ObjectRef) -> int:
        """Offer a copy of a remote value to any node, until `withdraw_copy`; return its number."""
        return self._offers.offer(ref)

    def withdraw_copy(self, number: int) -> None:
        """Withdraw the offer of a copy."""
        self._withdraw(number)

    def release(self, objref: int) -> list[int]:
        """Withdraw the offers of an object that the peer does not hold any more; return their numbers.

        An offer lasts as long as another object is offered under its number.
        """
        ended = []
        for number in self._kept.pop(objref, ()):
            named = self._named[number]
            del named[objref]
            if not named:
                del self._named[number]
                self._withdraw(number)
                ended.append(number)
        self.on_release(objref)
        return ended

    def _withdraw(self, number: int) -> None:
        with contextlib.suppress(NotFoundError):  # a third node offers it
            self._offers.drop(number)

    def answered(self, number: int) -> _Offer | None:
        """Return an offer that the peer has answered, and withdraw it unless it is kept; None: there is no such one."""
        offer = self._open.pop(number, None)
        if offer is not None:
            self._offers.drop(number)
            return offer
        return next(iter(self._named.get(number, {}).values()), None)

    # ---- incoming ----

    def take(self, number: int, writer: Writer | Fill, kind: int, holders: Sequence[tuple[str, int]]) -> None:
        """Fetch an announced value into its memory; `landed` is called when it is complete.

        Args:
            number: of its offer.
            writer: the memory.
            kind: as announced.
            holders: the address of each native stream that offers it (empty: the peer's), and the number under which it
                does. A part of a value that is large enough comes from each.
        """
        client = self._offers.store.client
        trace_record = trace.begin(client, trace.FETCH, number & _OBJREF_MOST, trace.kib(len(writer)))
        transit = self._transit[number] = _Transit([], trace_record, bool(holders[0][0]))
        parts = _parts(len(writer), len(holders))
        for (_, offered), part in zip(holders, parts, strict=False):
            arrival = _Arrival(self._arrivals, offered, writer, kind, part, partial(self._on_end, number, transit))
            transit.arrivals.append(arrival)
        for arrival, (address, _) in zip(list(transit.arrivals), holders, strict=False):
            self._puller.fetch([arrival], address or self._address)

    def is_on_its_way(self, number: int) -> bool:
        """Return whether a value is being fetched."""
        return number in self._transit

    def cancel(self, number: int) -> None:
        """Stop writing a value; `landed` is not called for it any more."""
        transit = self._transit.pop(number, None)
        if transit is not None:
            for arrival in transit.arrivals:
                arrival.ended = True
                self._puller.cancel(arrival)
            trace.end(self._offers.store.client, transit.trace_record)

    def close(self) -> None:
        """Cancel all fetches and withdraw all offers, because the exchange has ended."""
        for number in list(self._transit):
            self.cancel(number)
        for number in (*self._open, *self._named):
            self._withdraw(number)
        self._open.clear()
        self._named.clear()
        self._kept.clear()
        # A thread that is connecting ends only after a while; the loop does not wait for it.
        threading.Thread(target=self._puller.close, name="fastrt-values-end", daemon=True).start()

    def _on_end(self, number: int, transit: _Transit, arrived: _Arrival, error: BaseException | None) -> None:
        """Report the end of a fetch, or of a part of one, to the loop; runs on the stream's thread."""

        def report() -> None:
            if self._transit.get(number) is not transit:
                return  # it was cancelled, or another part has failed
            transit.arrivals = [arrival for arrival in transit.arrivals if arrival is not arrived]
            if transit.arrivals and error is None:
                return
            self.cancel(number)
            if not transit.is_elsewhere:
                self.is_reachable = self.is_reachable and error is None
            self._landed(number, error)

        with contextlib.suppress(RuntimeError):  # the process ends, and its loop is closed
            self._loop.call_soon_threadsafe(report)


def _parts(size: int, most: int) -> list[tuple[int, int]]:
    """Divide a value into parts of whole frames: the offsets of the first byte of each, and of the one after its last.

    A single part ends at 0, which stands for the value's end.
    """
    count = max(1, min(most, size // _PART_BYTES_MIN))
    step = -(-size // count // FRAME_BYTES) * FRAME_BYTES
    if count == 1:
        return [(0, 0)]
    return [(at, min(at + step, size)) for at in range(0, size, step)]


def _nothing() -> None:
    """Do nothing: nothing waits for the end of a kept offer."""


def open_native(store: Store, access: Access, listen: str) -> Native:
    """Open this node's native stream.

    Args:
        store, access: as for `Native`.
        listen: host:port of the node; the native stream has another port on this host.
    Raises:
        OSError: it cannot listen at that host.
    """
    return Native(store, access, split_address(listen, 0)[0])
