"""The side of the native stream that wants objects: one connection and one thread a source.

However many ask for an object, and whoever they ask, there is one transfer: the table's `Receipt`. After a broken
connection a new one goes on at the last good frame; only when several in a row bring nothing at all do those who wait
get a TransferError. A source that breaks the rules is not asked again: all that is still expected of it fails.
"""

from __future__ import annotations

import contextlib
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
_PAUSES_S = (0.02, 0.1, 0.5)  # before each new attempt that follows one that brought nothing
_IDLE_S = 10.0  # after which a connection that nobody needs is closed


class _Without(Exception):
    """An object cannot be taken although it is on the wire: go on with the others over a new connection."""


class Puller:
    """Brings objects here from sources of the native stream.

    Args:
        table: where they go.
        identity: of the cluster; sources must prove its secret.
        checksum: whether data are checksummed on the way; None: in the clear between machines only.
        insecure: stay in the clear also between machines, as the sources must do then.
        timeout_s: how long a source may send no byte at all.
        tls_on_loopback: use TLS within this machine too, as through a tunnel. The sources must do the same.
    """

    def __init__(
        self,
        table: Table,
        identity: Identity,
        checksum: bool | None = None,
        insecure: bool = False,
        timeout_s: float = 30.0,
        tls_on_loopback: bool = False,
    ) -> None:
        self._table = table
        self._checksum = checksum
        self._timeout_s = timeout_s
        greeting_s = min(timeout_s, GREETING_S)
        self._dial = lambda address: links.dial(address, identity, insecure, greeting_s, tls_on_loopback)
        self._lock = threading.Lock()
        self._links: dict[str, _Link] = {}
        self._closing = False

    def pull(self, objref: int, address: str) -> Future[ObjectRef]:
        """Have an object here; as `pull_many` for one."""
        return self.pull_many([objref], address)[0]

    def pull_many(self, objrefs: Iterable[int], address: str) -> list[Future[ObjectRef]]:
        """Have objects here, each with a future of its own.

        Args:
            objrefs: their names in the cluster.
            address: host:port of a source that has them; not asked for those that are here or on their way.
        Returns:
            A future of each. Its error is a TransferError, a NotFoundError when the source does not have the object, an
            ObjectStoreFullError when there is no room, an ObjectLostError when it was deallocated meanwhile.
        """
        found = self.ask(objrefs, address)
        return [part.future if isinstance(part, Receipt) else _done(part) for part in found]

    def bring(self, objrefs: Iterable[int], address: str) -> Future[list[ObjectRef]]:
        """Have objects here, with one future for all: of 10,000 small ones, their futures cost as much as the bytes.

        Args:
            objrefs, address: as for `pull_many`.
        Returns:
            A future of their references. The first that cannot be had decides its error; others may still arrive.
        """
        return self._table.whole(self.ask(objrefs, address))

    def ask(self, objrefs: Iterable[int], address: str) -> list[ObjectRef | Receipt]:
        """Begin as `pull_many` does, and return each object's reference or its receipt instead of futures."""
        found, new = self._table.begin_many(objrefs)
        if new:
            self._ask(new, address)
        return found

    def _ask(self, receipts: list[Receipt], address: str) -> None:
        with self._lock:
            if not self._closing:
                link = self._links.get(address)
                if link is None or not link.take(receipts):
                    self._links[address] = _Link(
                        self._table, address, self._dial, self._checksum, self._timeout_s, receipts
                    )
                return
        for receipt in receipts:
            receipt.fail(TransferError("this store is closing"))

    def cancel(self, receipt: Receipt) -> None:
        """Write no more into an object's memory, and let it be; others of its source go on over a new connection."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.cancel(receipt)

    def close(self) -> None:
        """Fail all that is still expected, close the connections, and wait for their threads."""
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
    """One source: its connection, what is asked of it and what is still to be asked."""

    def __init__(
        self,
        table: Table,
        address: str,
        dial: Callable[[str], Link],
        checksum: bool | None,
        timeout_s: float,
        first: list[Receipt],
    ) -> None:
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
        self._ended = False  # under the lock: takes nothing more
        self._cut = False  # under the lock: the connection was broken by `cancel`
        self._writing: Receipt | None = None  # whose memory is being written
        self._failures = 0  # in a row that brought nothing
        self._head = bytearray(wire.HEAD.size)
        self._have = 0  # bytes of the next header that came with the data before it
        self._checked = False
        self._thread = threading.Thread(target=self._run, name="fastrt-pull", daemon=True)
        self._thread.start()

    def take(self, receipts: list[Receipt]) -> bool:
        """Ask for more objects; False when this link has ended."""
        with self._lock:
            if self._ended:
                return False
            self._waiting.extend(receipts)
            if self._wire is not None and len(self._asked) < _REFILL:
                # The thread may sleep until data come: nobody but us can ask now.
                with contextlib.suppress(OSError):
                    self._ask()
            self._news.notify_all()
            return True

    def cancel(self, receipt: Receipt) -> None:
        """Forget an object; when this returns, its memory is not written any more."""
        with self._lock:
            for ticket in [ticket for ticket, one in self._asked.items() if one is receipt]:
                del self._asked[ticket]
                self._cut = True  # what still comes of it would be taken for an answer that nobody asked for
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
                            f"brought nothing: {exc}"
                        )
                        return
        except FastrtError as exc:
            error = exc
        except BaseException as exc:  # nobody else would ever answer those who wait
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
        """Wait until there is something to bring; False at the end."""
        with self._lock:
            if not self._waiting and not self._asked and not self._ended:
                self._news.wait(_IDLE_S)
            if not self._waiting and not self._asked:
                self._ended = True
            return not self._ended

    def _was_cut(self) -> bool:
        """Whether it was `cancel` that broke the connection, and others are still wanted."""
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
            _log.info("the native stream from %s broke, going on over a new one: %s", self._address, str(exc))
            self._news.wait_for(lambda: self._ended, _PAUSES_S[self._failures - 1])
            return not self._ended

    def _converse(self) -> None:
        """One connection, until nothing is wanted any more or it breaks."""
        made = self._dial(self._address)
        try:
            with self._lock:
                if self._ended:
                    return
                self._have = 0
                self._checked = not (made.sealed or made.local) if self._checksum is None else self._checksum
                made.send([wire.pack_opening(self._checked)], self._timeout_s)
                # What was under way goes on; in the order in which it was asked for.
                self._waiting.extendleft(reversed(self._asked.values()))
                self._asked.clear()
                self._wire, self._cut = made, False
            while self._wanted():
                self._refill()
                while self._asked:
                    self._receive_frame(made)
                    if len(self._asked) <= _REFILL and self._waiting:
                        self._refill()
        finally:
            with self._lock:
                self._wire = None
            made.close()

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
            requests.append(wire.pack_request(Request(ticket, receipt.objref, receipt.received)))
        if requests and self._wire is not None:
            self._wire.send([b"".join(requests)], self._timeout_s)

    def _receive_frame(self, made: Link) -> None:
        """Take one frame, straight into the arena, and with it what has come of the next one's header."""
        head, missing = self._head, wire.HEAD.size - self._have
        if missing:
            made.receive([memoryview(head)[self._have :]], missing, self._timeout_s)
        frame = wire.read_frame(head)
        self._have = 0
        if frame.status == wire.BUNDLE:
            self._receive_bundle(made, frame)
            return
        receipt = self._asked.get(frame.ticket)
        if receipt is None and self._cut:
            raise EOFError("the object was cancelled")
        if self._checked and frame.status == wire.OK and not frame.flags & wire.CHECKED:
            raise wire.WireError(f"{self._address} sends object {frame.objref:#x} without the checksums it promised")
        if receipt is None or receipt.objref != frame.objref:
            raise wire.WireError(f"{self._address} sends object {frame.objref:#x}, which nobody asked it for")
        if frame.status != wire.OK:
            text = bytearray(frame.length)
            made.receive([text], frame.length, self._timeout_s)
            said = f"{self._address} says: {text.decode('utf-8', 'replace')}"
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
        if receipt.received == receipt.total:
            self._seal(frame.ticket, receipt)

    @contextlib.contextmanager
    def _into(self, ticket: int, receipt: Receipt) -> Iterator[None]:
        """Around all that writes into an object's memory; not for one that was cancelled."""
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
        """Take small objects, all at once."""
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
        """What somebody asked for, and nothing of it is here yet."""
        receipt = self._asked.get(entry.ticket)
        if receipt is None or receipt.objref != entry.objref or receipt.received:
            raise wire.WireError(f"{self._address} sends object {entry.objref:#x}, which nobody asked it for")
        if self._checked and not entry.flags & wire.CHECKED:
            raise wire.WireError(f"{self._address} sends object {entry.objref:#x} without the checksums it promised")
        return receipt

    def _make_room(self, entries: list[wire.Entry]) -> list[Writer]:
        """Memory for the objects of a bundle, if need be after spilling, one by one."""
        specs = [(entry.total, entry.kind, bool(entry.flags & wire.ERROR)) for entry in entries]
        writers = self._table.allocate_many(specs)
        for entry, (total, kind, is_error) in zip(entries[len(writers) :], specs[len(writers) :], strict=True):
            try:
                writers.append(self._table.store.create(total, kind, 0, is_error))
            except FastrtError as exc:
                writers.clear()  # they may be what there is no room for
                self._finish(entry.ticket, exc)
                raise _Without from None
        return writers

    def _place(self, receipt: Receipt, frame: Frame) -> memoryview:
        """Where a frame's data go: memory of the arena, allocated with the first frame."""
        if receipt.view is None and receipt.received == 0 and frame.offset == 0:
            try:
                receipt.allocate(frame.total, frame.kind, bool(frame.flags & wire.ERROR), frame.nrefs)
            except FastrtError as exc:
                self._finish(frame.ticket, exc)
                raise _Without from None
        view = receipt.view
        if view is None or frame.total != receipt.total or frame.offset != receipt.received:
            raise wire.WireError(
                f"{self._address} sends {frame.length} bytes at {frame.offset} of {frame.total} of object "
                f"{frame.objref:#x}, of which {receipt.received} of {receipt.total} bytes are here"
            )
        return view[frame.offset : frame.offset + frame.length]

    def _seal(self, ticket: int, receipt: Receipt) -> None:
        try:
            receipt.seal()
        except FastrtError as exc:
            self._finish(ticket, exc)
        else:
            with self._lock:
                self._asked.pop(ticket, None)  # unless it was cancelled just now

    def _finish(self, ticket: int, error: BaseException) -> None:
        with self._lock:
            receipt = self._asked.pop(ticket, None)
        if receipt is not None:
            receipt.fail(error)
