"""The taking side of the native stream: one connection and one thread per source.

There is one transfer of an object, the table's `Receipt`, however many callers request it and from any sources.
After a broken connection a new one continues at the last good frame; the waiting callers get a TransferError only after
several connections in a row that brought no data. A source that violates the protocol is not asked again: all objects
still expected from it fail.

A connection that has a name also receives small objects that were not requested, and answers whether it has taken them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from fastrt._core.objects.handles import Writer
from fastrt._core.transfer import stream
from fastrt.errors import FastrtError, NotFoundError
from fastrt.net.grpc.proof import GREETING_S
from fastrt.net.grpc.sealed import Link
from fastrt.store.ref import ObjectRef
from fastrt.transfer import link as links
from fastrt.transfer import wire
from fastrt.transfer.table import Receipt, Table, TransferError
from fastrt.transfer.wire import Frame, Request

if TYPE_CHECKING:
    from fastrt.net.grpc.identity import Identity

_log = logging.getLogger(__name__)

WINDOW = 4 * wire.BUNDLE_MAX  # requests open at once: 12 MiB of objects of 64 KiB, more than a connection can hold
_REFILL = WINDOW - wire.BUNDLE_MAX
_PAUSES_S = (0.02, 0.1, 0.5)  # pauses before attempts that follow one without data
_IDLE_S = 10.0  # idle time after which a connection without a name is closed; one with a name after the timeout

# Called with an object that came unasked, whether it was new here, and a function that takes the answer, once.
OnPush = Callable[[int, bool, Callable[[bool], None]], None]


class _Without(Exception):
    """Raised when an object on the wire cannot be stored: the others continue over a new connection."""


class Puller:
    """Fetches objects from sources of the native stream.

    Args:
        table: the table that receives them.
        identity: the cluster's identity; sources must prove its secret.
        checksum: whether data have checksums; None: in the clear between machines only.
        insecure: stay in the clear between machines too, as the sources must do then.
        timeout_s: the longest time without a byte from a source.
        tls_on_loopback: use TLS within this machine too, as through a tunnel. The sources must do the same.
        on_push: called with each object that came unasked, on the thread of its connection; it must not block. Without
            it no connection gets a name.
    """

    def __init__(
        self,
        table: Table,
        identity: Identity,
        checksum: bool | None = None,
        insecure: bool = False,
        timeout_s: float = 30.0,
        tls_on_loopback: bool = False,
        on_push: OnPush | None = None,
    ) -> None:
        self._table = table
        self._on_push = on_push
        self._checksum = checksum
        self._timeout_s = timeout_s
        greeting_s = min(timeout_s, GREETING_S)
        self._dial = lambda address: links.dial(address, identity, insecure, greeting_s, tls_on_loopback)
        self._lock = threading.Lock()
        self._links: dict[str, _Link] = {}
        self._closing = False

    def pull(self, objref: int, address: str, name: int = 0) -> Future[ObjectRef]:
        """Fetch one object; see `pull_many`. A name other than 0 is given to the connection."""
        (part,) = self.ask([objref], address, name)
        return part.future if isinstance(part, Receipt) else _done(part)

    def pull_many(self, objrefs: Iterable[int], address: str) -> list[Future[ObjectRef]]:
        """Fetch objects, with one future for each.

        Args:
            objrefs: their names in the cluster.
            address: host:port of a source that has them; not asked for objects that are here or being received.
        Returns:
            A future for each. Its error is a TransferError, a NotFoundError when the source lacks the object, an
            ObjectStoreFullError when there is no room, an ObjectLostError when it was deallocated meanwhile.
        """
        found = self.ask(objrefs, address)
        return [part.future if isinstance(part, Receipt) else _done(part) for part in found]

    def bring(self, objrefs: Iterable[int], address: str) -> Future[list[ObjectRef]]:
        """Fetch objects, with one future for all: for 10,000 small ones, single futures cost as much as the bytes.

        Args:
            objrefs, address: as for `pull_many`.
        Returns:
            A future of their references. The first failure is its error; others may still arrive.
        """
        return self._table.whole(self.ask(objrefs, address))

    def ask(self, objrefs: Iterable[int], address: str, name: int = 0) -> list[ObjectRef | Receipt]:
        """Start fetching objects; returns each object's reference or its receipt instead of futures."""
        found, new = self._table.begin_many(objrefs)
        if new:
            self.fetch(new, address, name if self._on_push is not None else 0)
        return found

    def fetch(self, receipts: list[Receipt], address: str, name: int = 0) -> None:
        """Start fetching objects into these receipts; several may have the number of one object."""
        with self._lock:
            if not self._closing:
                link = self._links.get(address)
                if link is None or not link.take(receipts, name):
                    self._links[address] = _Link(
                        self._table, address, self._dial, self._checksum, self._timeout_s, receipts, name, self._on_push
                    )
                return
        for receipt in receipts:
            receipt.fail(TransferError("this store is closing"))

    def cancel(self, receipt: Receipt) -> None:
        """Stop receiving an object; others of its source continue over a new connection."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.cancel(receipt)

    def close(self) -> None:
        """Fail all outstanding objects, close the connections, and wait for their threads."""
        with self._lock:
            self._closing = True
            links = list(self._links.values())
        for link in links:
            link.close()


def _done(ref: ObjectRef) -> Future[ObjectRef]:
    future: Future[ObjectRef] = Future()
    future.set_result(ref)
    return future


class _Link:
    """One source: its connection, the open requests, and the receipts still to be requested."""

    def __init__(
        self,
        table: Table,
        address: str,
        dial: Callable[[str], Link],
        checksum: bool | None,
        timeout_s: float,
        first: list[Receipt],
        name: int,
        on_push: OnPush | None,
    ) -> None:
        self._name = name  # changed once, under the lock
        self._on_push = on_push
        self._table = table
        self._address = address
        self._dial = dial
        self._checksum = checksum
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._waiting: deque[Receipt] = deque(first)
        self._asked: dict[int, Receipt] = {}  # by ticket: an object may be dropped and asked for again
        self._tickets = itertools.count()
        self._wire: Link | None = None
        self._ended = False  # under the lock: accepts no more receipts
        self._cut = False  # under the lock: the connection was broken by `cancel`
        self._writing: Receipt | None = None  # whose memory is being written
        self._failures = 0  # attempts in a row that brought no data
        self._head = bytearray(wire.HEAD.size)
        self._have = 0  # bytes of the next header that came with the data before it
        self._checked = False
        self._thread = threading.Thread(target=self._run, name="fastrt-pull", daemon=True)
        self._thread.start()

    def take(self, receipts: list[Receipt], name: int) -> bool:
        """Request more objects; False when this link has ended."""
        with self._lock:
            if self._ended:
                return False
            self._waiting.extend(receipts)
            if name and not self._name:
                self._name = name
                if self._wire is not None:
                    with contextlib.suppress(OSError):
                        self._wire.send([self._named()], self._timeout_s)
            if self._wire is not None and len(self._asked) < _REFILL:
                # The thread may sleep until data arrive, so the request is sent from here.
                with contextlib.suppress(OSError):
                    self._ask()
            self._news.notify_all()
            return True

    def cancel(self, receipt: Receipt) -> None:
        """Cancel an object; when this returns, its memory is not written any more."""
        with self._lock:
            for ticket in [ticket for ticket, one in self._asked.items() if one is receipt]:
                del self._asked[ticket]
                self._cut = True  # its remaining data would look like an answer without a request
                if self._wire is not None:
                    self._wire.shutdown()
            with contextlib.suppress(ValueError):
                self._waiting.remove(receipt)
            self._news.wait_for(lambda: self._writing is not receipt)

    def close(self) -> None:
        with self._lock:
            self._ended = True
            self._news.notify_all()
            if self._wire is not None:
                self._wire.shutdown()
        self._thread.join()

    # ---- the thread ----

    def _run(self) -> None:
        error: BaseException = TransferError("this store is closing")
        try:
            while self._wanted():
                try:
                    self._converse()
                except _Without:
                    continue
                except (OSError, EOFError, wire.BrokenError) as exc:
                    if not self._was_cut() and not self._try_again(exc):
                        if self._failures <= len(_PAUSES_S):
                            return
                        error = TransferError(
                            f"objects from {self._address} did not arrive, after {self._failures} attempts that "
                            f"brought no data: {exc}"
                        )
                        return
        except FastrtError as exc:
            error = exc
        except BaseException as exc:  # without this, the waiting callers would never get an answer
            _log.exception("pulling from %s failed", self._address)
            error = TransferError(f"pulling from {self._address} failed: {exc!r}")
        finally:
            with self._lock:
                self._ended = True
                left = [*self._asked.values(), *self._waiting]
                self._asked.clear()
                self._waiting.clear()
            for receipt in left:
                receipt.fail(error)

    def _wanted(self) -> bool:
        """Wait until an object is requested; False at the end."""
        with self._lock:
            if not self._waiting and not self._asked and not self._ended:
                self._news.wait(_IDLE_S)
            if not self._waiting and not self._asked:
                self._ended = True
            return not self._ended

    def _was_cut(self) -> bool:
        """Whether `cancel` broke the connection, and this link goes on."""
        with self._lock:
            cut, self._cut = self._cut, False
            return cut and not self._ended

    def _try_again(self, exc: BaseException) -> bool:
        with self._lock:
            if self._ended:
                return False
            self._failures += 1
            if self._failures > len(_PAUSES_S):
                return False
            _log.info("the native stream from %s broke, continuing over a new one: %s", self._address, str(exc))
            self._news.wait_for(lambda: self._ended, _PAUSES_S[self._failures - 1])
            return not self._ended

    def _converse(self) -> None:
        """Use one connection until nothing is requested any more or it breaks."""
        made = self._dial(self._address)
        try:
            with self._lock:
                if self._ended:
                    return
                self._have = 0
                self._checked = not (made.sealed or made.local) if self._checksum is None else self._checksum
                opening = [wire.pack_opening(self._checked), *([self._named()] if self._name else [])]
                made.send(opening, self._timeout_s)
                # Objects under way continue, in the order in which they were requested.
                self._waiting.extendleft(reversed(self._asked.values()))
                self._asked.clear()
                self._wire, self._cut = made, False
            while self._wanted():
                self._refill()
                while self._asked or self._name:
                    try:
                        self._receive_frame(made)
                    except TimeoutError:
                        if self._asked:
                            raise
                        return  # idle for long; a request that is sent now is sent again over the next connection
                    if len(self._asked) <= _REFILL and self._waiting:
                        self._refill()
        finally:
            with self._lock:
                self._wire = None
            made.close()

    def _named(self) -> bytes:
        return wire.pack_request(Request(0, self._name, 0), wire.NAME_MAGIC)

    def _refill(self) -> None:
        with self._lock:
            self._ask()

    def _ask(self) -> None:
        """Send requests up to the window, under the lock. They always fit into the socket's buffer."""
        requests = []
        while self._waiting and len(self._asked) < WINDOW:
            receipt = self._waiting.popleft()
            if receipt.ended:  # it was dropped meanwhile
                continue
            ticket = next(self._tickets) & 0xFFFFFFFF
            self._asked[ticket] = receipt
            requests.append(wire.pack_request(Request(ticket, receipt.objref, receipt.received, receipt.until)))
        if requests and self._wire is not None:
            self._wire.send([b"".join(requests)], self._timeout_s)

    def _receive_frame(self, made: Link) -> None:
        """Receive one frame straight into the arena, with the bytes of the next header that are already there."""
        head, missing = self._head, wire.HEAD.size - self._have
        if missing:
            made.receive([memoryview(head)[self._have :]], missing, self._timeout_s)
        frame = wire.read_frame(head)
        self._have = 0
        if frame.status == wire.BUNDLE:
            self._receive_bundle(made, frame)
            return
        if frame.status == wire.PUSH:
            self._receive_pushed(made, frame)
            return
        receipt = self._asked.get(frame.ticket)
        if receipt is None and self._cut:
            raise EOFError("the object was cancelled")
        if self._checked and frame.status == wire.OK and not frame.flags & wire.CHECKED:
            raise wire.WireError(f"{self._address} sends object {frame.objref:#x} without the checksums it promised")
        if receipt is None or receipt.objref != frame.objref:
            raise wire.WireError(f"{self._address} sends object {frame.objref:#x}, which was not requested")
        if frame.status != wire.OK:
            text = bytearray(frame.length)
            made.receive([text], frame.length, self._timeout_s)
            said = f"{self._address} reports: {text.decode('utf-8', 'replace')}"
            self._finish(frame.ticket, NotFoundError(said) if frame.status == wire.ABSENT else TransferError(said))
            return
        names = bytearray(8 * frame.nrefs)
        data = self._place(receipt, frame)
        with self._into(frame.ticket, receipt):
            got = made.receive([names, data, head], len(names) + frame.length, self._timeout_s)
        self._have = got - len(names) - frame.length
        if self._checked and frame.crc != stream.crc32c(data, stream.crc32c(names)):
            raise wire.BrokenError(f"{frame.length} bytes of object {frame.objref:#x} were damaged on the way")
        self._failures = 0
        if frame.nrefs:
            receipt.refs = list(struct.unpack(f"<{frame.nrefs}Q", names))
        receipt.received += frame.length
        if receipt.received == (receipt.until or receipt.total):
            self._seal(frame.ticket, receipt)

    def _receive_pushed(self, made: Link, frame: Frame) -> None:
        """Receive an object that was not requested; it is discarded if it is here or there is no room."""
        on_push = self._on_push
        if on_push is None or not self._name:
            raise wire.WireError(f"{self._address} sends object {frame.objref:#x}, which was not requested")
        if self._checked and not frame.flags & wire.CHECKED:
            raise wire.WireError(f"{self._address} sends object {frame.objref:#x} without the checksums it promised")
        _, new = self._table.begin_many((frame.objref,))  # not `begin`: nothing waits for a future
        receipt = new[0] if new else None
        data: memoryview | bytearray = bytearray(0)
        try:
            data = self._room_for(receipt, frame)
            self._have = made.receive([data, self._head], frame.length, self._timeout_s) - frame.length
            if self._checked and frame.crc != stream.crc32c(data):
                raise wire.BrokenError(f"{frame.length} bytes of object {frame.objref:#x} were damaged on the way")
        except BaseException as exc:
            if receipt is not None:
                receipt.fail(exc)
            raise
        is_new = receipt is not None and self._seal_pushed(receipt, frame)
        answer = functools.partial(self._answer, made, frame)
        if is_new or self._table.find(frame.objref) is not None:
            on_push(frame.objref, is_new, answer)
        else:
            answer(False)

    def _room_for(self, receipt: Receipt | None, frame: Frame) -> memoryview | bytearray:
        """The memory for an object that was not requested; memory that is thrown away if it cannot be kept."""
        if receipt is not None:
            try:
                return receipt.allocate(frame.total, frame.kind, bool(frame.flags & wire.ERROR))
            except FastrtError as exc:
                receipt.fail(exc)
        return bytearray(frame.length)

    def _seal_pushed(self, receipt: Receipt, frame: Frame) -> bool:
        """Make an object visible that was not requested; False if it found no room or was dropped meanwhile."""
        receipt.received = frame.length
        try:
            receipt.seal()
        except FastrtError as exc:
            receipt.fail(exc)
            return False
        return True

    def _answer(self, made: Link, frame: Frame, is_taken: bool) -> None:
        """Answer the source whether an object is here that it sent unasked."""
        answer = Request(frame.ticket, frame.objref, wire.TAKEN if is_taken else wire.NOT_TAKEN)
        with self._lock:
            if self._wire is made:
                with contextlib.suppress(OSError):
                    made.send([wire.pack_request(answer, wire.ANSWER_MAGIC)], self._timeout_s)

    @contextlib.contextmanager
    def _into(self, ticket: int, receipt: Receipt) -> Iterator[None]:
        """Guard writes into an object's memory; raises if it was cancelled."""
        with self._lock:
            if self._asked.get(ticket) is not receipt:
                raise EOFError("the object was cancelled")
            self._writing = receipt
        try:
            yield
        finally:
            with self._lock:
                self._writing = None
                self._news.notify_all()

    def _receive_bundle(self, made: Link, frame: Frame) -> None:
        """Receive a bundle of small objects."""
        table = bytearray(frame.nrefs * wire.ENTRY.size)
        made.receive([table], len(table), self._timeout_s)
        entries = wire.read_entries(frame, table)
        receipts = [self._expected(entry) for entry in entries]
        if len(set(map(id, receipts))) < len(receipts):
            raise wire.WireError(f"{self._address} sends an object twice in one bundle")
        writers = self._make_room(entries)
        nbytes = frame.length - len(table)
        self._have = made.receive([*writers, self._head], nbytes, self._timeout_s) - nbytes
        if self._checked:
            for entry, writer in zip(entries, writers, strict=True):
                if entry.crc != stream.crc32c(writer):
                    raise wire.BrokenError(f"object {entry.objref:#x} was damaged on the way")
        self._failures = 0
        self._table.seal_many(receipts, writers)
        with self._lock:
            for entry in entries:
                del self._asked[entry.ticket]

    def _expected(self, entry: wire.Entry) -> Receipt:
        """The receipt of an entry: it was requested, and none of its data have arrived."""
        receipt = self._asked.get(entry.ticket)
        if receipt is None or receipt.objref != entry.objref or receipt.received or receipt.until:
            raise wire.WireError(f"{self._address} sends object {entry.objref:#x}, which was not requested")
        if self._checked and not entry.flags & wire.CHECKED:
            raise wire.WireError(f"{self._address} sends object {entry.objref:#x} without the checksums it promised")
        return receipt

    def _make_room(self, entries: list[wire.Entry]) -> list[Writer]:
        """Allocate memory for the objects of a bundle, one by one after spilling if there is no room."""
        specs = [(entry.total, entry.kind, bool(entry.flags & wire.ERROR)) for entry in entries]
        writers = self._table.allocate_many(specs)
        for entry, (total, kind, is_error) in zip(entries[len(writers) :], specs[len(writers) :], strict=True):
            try:
                writers.append(self._table.store.create(total, kind, 0, is_error, in_file=True))
            except FastrtError as exc:
                writers.clear()  # their memory may be what another object needs
                self._finish(entry.ticket, exc)
                raise _Without from None
        return writers

    def _place(self, receipt: Receipt, frame: Frame) -> memoryview:
        """The memory for a frame's data, in the arena, allocated with the first frame."""
        if receipt.view is None and frame.offset == receipt.received:
            try:
                receipt.allocate(frame.total, frame.kind, bool(frame.flags & wire.ERROR), frame.nrefs)
            except FastrtError as exc:
                self._finish(frame.ticket, exc)
                raise _Without from None
        view = receipt.view
        is_next = frame.offset == receipt.received and frame.offset + frame.length <= (receipt.until or receipt.total)
        if view is None or frame.total != receipt.total or not is_next:
            raise wire.WireError(
                f"{self._address} sends {frame.length} bytes at {frame.offset} of {frame.total} of object "
                f"{frame.objref:#x}; {receipt.received} of {receipt.total} bytes have arrived"
            )
        return view[frame.offset : frame.offset + frame.length]

    def _seal(self, ticket: int, receipt: Receipt) -> None:
        try:
            receipt.seal()
        except FastrtError as exc:
            self._finish(ticket, exc)
        else:
            with self._lock:
                self._asked.pop(ticket, None)  # it may have been cancelled just now

    def _finish(self, ticket: int, error: BaseException) -> None:
        with self._lock:
            receipt = self._asked.pop(ticket, None)
        if receipt is not None:
            receipt.fail(error)
