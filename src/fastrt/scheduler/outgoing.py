"""The scheduler's outgoing calls to workers and stores.

A peer is called at its port, and each answer is handled on the thread of the peer's connection. A process of fastrt
that serves many ports attaches a link (protos/scheduler): calls to those ports then go in batches over one stream.
Calls that a link has not answered when it ends are made at the ports.

Aliases and deallocations are sent to a store in the order given: one after the other to a port, and all at once over
a link, whose other end carries them out in order. A deallocation waits up to `_LATE_S` for another call of its link: a
message of its own would be the dearest part of it. Deliveries run concurrently, with a limit per store. Failures are
reported as facts. A peer that cannot be reached for `lost_after_s` is lost, and at once if its connection ends and its
port is closed: its process has ended. A loss is reported at most once; the connection is watched from the peer's
registration on, also while it is idle.

Threads: the public methods may be called on any thread. `_lock` guards all peers and links, and is never held while
a call at a port is started or a fact is reported. A thread looks at all connections several times a second; it also
repeats calls and closes connections.

Source: `WorkerService` and `ObjStore` of protos/ray.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from fastrt.net.address import is_address
from fastrt.net.grpc.caller import Caller, open_caller
from fastrt.net.grpc.channel import bearer
from fastrt.net.grpc.contract import Stream
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.local_calls import LocalCall
from fastrt.scheduler import events as ev
from fastrt.scheduler.events import Event
from fastrt.scheduler.liveness import is_closed
from fastrt.scheduler.wire import LINK, invoke_request

_log = logging.getLogger(__name__)

_STORE = message_set("ray").methods("ObjStore")
_Orders = LINK["Attach"][1]
_OK = 0
_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]
_DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
_BROKEN = (_UNAVAILABLE, _DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED.value[0])
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
_AGAIN_S = 0.1
_LOOK_S = 0.2  # between two looks at all connections
_PROBE_S = 0.5  # between two looks at the port of a peer whose connection is broken
_LATE_S = 0.02  # how long deallocations wait for another call of their link
_DEALLOCATE = "/ObjStore/DeallocateObject"
_MESSAGE_BYTES = 1 << 20  # orders of a link are split into messages of about this size

# Called with the status code and the message of an answer; returns the fact to report.
Done = Callable[[int, str], "Event | None"]


@dataclass(frozen=True)
class OutgoingOptions:
    """The options of calls to peers.

    Attributes:
        token: sent with every call; None sends none. It is for peers whose certificates `credentials` check.
        credentials: for peers that use TLS.
        options: gRPC channel options.
        lost_after_s: a peer that cannot be reached for this long is lost.
        call_timeout_s: time for a peer to accept a call, an alias or a deallocation.
        delivery_timeout_s: time for a store to deliver an object.
        deliveries_max: the most deliveries of one store at a time.
    """

    token: str | None = field(default=None, repr=False)
    credentials: grpc.ChannelCredentials | None = None
    options: Sequence[tuple[str, Any]] = ()
    lost_after_s: float = 10.0
    call_timeout_s: float = 30.0
    delivery_timeout_s: float = 600.0
    deliveries_max: int = 16


@dataclass(eq=False)
class _Order:
    """An alias or a deallocation for a store; `number` is for `answered`."""

    number: int
    path: str
    body: bytes


@dataclass(eq=False)
class _Peer:
    """A worker or a store, its connection, and the calls that wait."""

    address: str
    lost: Event
    caller: Caller
    unreachable_since: float | None
    was_reached: bool = False
    probe_at: float = 0.0  # when to look whether its port is closed
    gone: bool = False
    orders: deque[_Order] = field(default_factory=deque)
    is_ordering: bool = False  # an order is under way at the port
    deliveries: deque[ev.DeliverObj] = field(default_factory=deque)
    delivering: int = 0


@dataclass(eq=False)
class _Sent:
    """A call that a link has not answered."""

    peer: _Peer
    path: str
    body: bytes
    until: float
    done: Done
    order: _Order | None


class Link:
    """A stream to a process of fastrt that serves some addresses. `Outgoing` guards it."""

    def __init__(self, stream: Stream | LocalCall, addresses: Iterable[str]) -> None:
        self.name = secrets.randbits(63)
        self.stream = stream
        self.addresses = frozenset(addresses)
        self.sent: dict[int, _Sent] = {}
        self._numbers = itertools.count(1)
        self._unsent: list[tuple[int, _Sent]] = []

    def add(self, sent: _Sent) -> None:
        """Take a call; `flush` sends it."""
        number = next(self._numbers)
        self.sent[number] = sent
        self._unsent.append((number, sent))

    def flush(self) -> None:
        """Send the calls taken so far."""
        unsent, self._unsent = self._unsent, []
        orders, size = _Orders(link=self.name), 0
        for number, each in unsent:
            orders.order.add(number=number, address=each.peer.address, path=each.path, body=each.body)
            size += len(each.body)
            if size >= _MESSAGE_BYTES:
                self.stream.send(orders.SerializeToString())
                orders, size = _Orders(link=self.name), 0
        if orders.order:
            self.stream.send(orders.SerializeToString())


class Outgoing:
    """Carries out effects. Its methods may be called from any thread, and never block.

    Args:
        options: timeouts and credentials.
        report: receives facts, on threads of this object.
        answered: receives the number of each order of `notify` and `deallocate` once its store has answered, on a
            thread of this object or in `take_answers`.
    """

    def __init__(
        self, options: OutgoingOptions, report: Callable[[Event], None], answered: Callable[[int], None]
    ) -> None:
        self._options = options
        self._report = report
        self._answered = answered
        self._metadata = bearer(options.token) if options.token is not None else ()
        self._lock = threading.Lock()
        self._workers: dict[int, _Peer] = {}
        self._stores: dict[int, _Peer] = {}
        self._links: dict[int, Link] = {}
        self._attached: dict[str, Link] = {}
        self._unsent: dict[Link, None] = {}  # links with calls to flush
        self._is_late_due = False  # a flush of deallocations that wait is due
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._closing: list[Caller] = []
        self._numbers = itertools.count()
        self._stopped = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._look, name="fastrt-scheduler-out", daemon=True)
        self._thread.start()

    def add_worker(self, worker: int, address: str) -> None:
        """Connect to a worker that has registered."""
        self._add(self._workers, worker, address, ev.WorkerLost(worker))

    def add_store(self, store: int, address: str) -> None:
        """Connect to a store that has registered."""
        self._add(self._stores, store, address, ev.ObjStoreLost(store))

    def remove_worker(self, worker: int) -> None:
        """Disconnect from a lost worker."""
        self._remove(self._workers, worker)

    def remove_store(self, store: int) -> None:
        """Disconnect from a lost store."""
        self._remove(self._stores, store)

    def invoke(self, order: ev.InvokeCall) -> None:
        """Send a call to a worker."""
        with self._lock:
            peer = self._workers.get(order.worker)
        if peer is not None:
            body = invoke_request(order.body, order.results)
            done = partial(self._invoked, peer, order)
            self._call(peer, "/WorkerService/InvokeCall", body, self._until(self._options.call_timeout_s), done)

    def deliver(self, order: ev.DeliverObj) -> None:
        """Order a store to deliver an object."""
        with self._lock:
            peer = self._stores.get(order.source)
            if peer is None:
                return
            peer.deliveries.append(order)
        self._deliver(peer)

    def notify(self, number: int, order: ev.NotifyAlias) -> None:
        """Notify a store of an alias."""
        request = _STORE["NotifyAlias"][0](alias_objref=order.alias, canonical_objref=order.canonical)
        self._order(order.store, _Order(number, "/ObjStore/NotifyAlias", request.SerializeToString()))

    def deallocate(self, number: int, order: ev.DeallocateObject) -> None:
        """Order a store to drop an object."""
        request = _STORE["DeallocateObject"][0](canonical_objref=order.canonical)
        self._order(order.store, _Order(number, _DEALLOCATE, request.SerializeToString()))

    def flush(self) -> None:
        """Send the calls that links have taken; to be called when no more of them are at hand."""
        if self._unsent:
            with self._lock:
                for link in self._unsent:
                    link.flush()
                self._unsent.clear()

    def attach(self, stream: Stream | LocalCall, addresses: Iterable[str]) -> Link:
        """Make calls to these addresses over a stream from now on."""
        link = Link(stream, addresses)
        with self._lock:
            self._links[link.name] = link
            self._attached.update(dict.fromkeys(link.addresses, link))
        return link

    def extend(self, name: int, addresses: Iterable[str]) -> None:
        """Make calls to more addresses over a link from now on; has no effect if it has ended."""
        with self._lock:
            link = self._links.get(name)
            if link is not None:
                link.addresses |= frozenset(addresses)
                self._attached.update(dict.fromkeys(link.addresses, link))

    def detach(self, link: Link) -> None:
        """Make calls to a link's addresses at their ports from now on, beginning with those it has not answered."""
        with self._lock:
            del self._links[link.name]
            self._unsent.pop(link, None)
            for address in link.addresses:
                if self._attached.get(address) is link:
                    del self._attached[address]
            every, link.sent = list(link.sent.values()), {}
            for sent in reversed(every):
                if sent.order is not None:
                    sent.peer.orders.appendleft(sent.order)
            if self._stopped:
                return
        for sent in every:
            if sent.order is not None:
                self._send_orders(sent.peer)
            else:
                self._call(sent.peer, sent.path, sent.body, sent.until, sent.done)

    def take_answers(self, name: int, answers: Iterable[Any]) -> list[Event]:
        """Take the answers that arrived over a link; returns the facts that follow from them."""
        with self._lock:
            link = self._links.get(name)
            if link is None:
                return []  # it has ended, and its calls are made again
            found = [(link.sent.pop(answer.number, None), answer) for answer in answers]
        events = []
        for sent, answer in found:
            if sent is None:
                continue
            if sent.order is None and self._may_repeat(sent.peer, answer.code, sent.until):
                again = partial(self._call, sent.peer, sent.path, sent.body, sent.until, sent.done)
                self.after(_AGAIN_S, again)
                continue
            event = sent.done(answer.code, answer.message)
            if event is not None:
                events.append(event)
        return events

    def after(self, delay_s: float, work: Callable[[], None]) -> None:
        """Do some work after a delay, on the thread of this object."""
        with self._lock:
            heapq.heappush(self._later, (time.monotonic() + delay_s, next(self._numbers), work))
        self._wake.set()

    def stop(self) -> None:
        """Cancel all calls, and end the threads."""
        with self._lock:
            self._stopped = True
            peers = [*self._workers.values(), *self._stores.values()]
            self._workers.clear()
            self._stores.clear()
            for peer in peers:
                peer.gone = True
        self._wake.set()
        self._thread.join()
        for caller in (*(peer.caller for peer in peers), *self._closing):
            caller.close()

    # Peers

    def _add(self, peers: dict[int, _Peer], number: int, address: str, lost: Event) -> None:
        caller = open_caller(address, self._options.credentials, self._options.options, self._metadata)
        peer = _Peer(address, lost, caller, time.monotonic())
        with self._lock:
            if self._stopped:
                self._closing.append(caller)
                return
            peers[number] = peer
        if is_address(address):
            threading.Thread(target=self._reach, args=(peer,), name="fastrt-probe", daemon=True).start()

    def _reach(self, peer: _Peer) -> None:
        """Find out whether a peer serves that has just registered, so that its end is noticed however soon it comes."""
        if not is_closed(peer.address):
            peer.was_reached = True

    def _remove(self, peers: dict[int, _Peer], number: int) -> None:
        with self._lock:
            peer = peers.pop(number, None)
            if peer is None:
                return
            peer.gone = True
            orders, peer.orders = peer.orders, deque()
        for order in orders:
            self.after(0.0, partial(self._answered, order.number))
        with self._lock:
            self._closing.append(peer.caller)
        self._wake.set()

    def _look(self) -> None:
        """Watch the connections, and do the work of `after`."""
        look_at = 0.0
        while not self._stopped:
            now = time.monotonic()
            try:
                if now >= look_at:
                    look_at = now + _LOOK_S
                    self._look_at_peers(now)
                    self._look_at_links(now)
                next_at = self._do_due(now)
            except Exception:
                _log.exception("a look at the peers failed")
                next_at = look_at
            self._wake.wait(max(0.0, min(look_at, next_at) - time.monotonic()))
            self._wake.clear()

    def _do_due(self, now: float) -> float:
        """Do the work that is due; returns when there is more."""
        with self._lock:
            due = []
            while self._later and self._later[0][0] <= now:
                due.append(heapq.heappop(self._later)[2])
            closing, self._closing = self._closing, []
        for work in [*(caller.close for caller in closing), *due]:
            try:
                work()
            except Exception:
                _log.exception("work that was due failed")
        self.flush()
        with self._lock:
            return self._later[0][0] if self._later else math.inf

    def _look_at_peers(self, now: float) -> None:
        with self._lock:
            every = [*self._workers.values(), *self._stores.values()]
            linked = self._attached.keys() & {peer.address for peer in every}
        for peer in every:
            if peer.address in linked or peer.caller.is_ready():  # without a link this connects
                peer.unreachable_since, peer.was_reached = None, True
                continue
            if peer.unreachable_since is None:
                peer.unreachable_since = now
            if now - peer.unreachable_since >= self._options.lost_after_s:
                self._lose(peer)
            elif peer.was_reached and now >= peer.probe_at:
                peer.probe_at = now + _PROBE_S
                threading.Thread(target=self._probe, args=(peer,), name="fastrt-probe", daemon=True).start()

    def _probe(self, peer: _Peer) -> None:
        """Find out whether a peer that was reached before has ended; on a thread, because this may wait."""
        if is_closed(peer.address):
            with self._lock:
                every = [*self._workers.values(), *self._stores.values()]
            for one in every:  # a worker and a store may be one program at one port
                if one.address == peer.address:
                    self._lose(one)

    def _lose(self, peer: _Peer) -> None:
        with self._lock:
            if peer.gone:
                return
            peer.gone = True
        _log.warning("%s cannot be reached: lost", peer.address)
        self._report(peer.lost)

    def _look_at_links(self, now: float) -> None:
        """End the calls that a link has not answered in time."""
        with self._lock:
            late = []
            for link in self._links.values():
                for number in [number for number, sent in link.sent.items() if sent.until < now]:
                    late.append(link.sent.pop(number))
        for sent in late:
            self._end(sent.done, _DEADLINE_EXCEEDED, "Deadline Exceeded")

    # Calls

    def _until(self, timeout_s: float) -> float:
        return time.monotonic() + timeout_s

    def _call(self, peer: _Peer, path: str, body: bytes, until: float, done: Done) -> None:
        """Make a call, over the peer's link or at its port; repeat it while it is UNAVAILABLE, until the timeout."""
        with self._lock:
            link = self._attached.get(peer.address)
            if link is not None:
                link.add(_Sent(peer, path, body, until, done, None))
                self._unsent[link] = None
                return
        self._call_port(peer, path, body, until, done)

    def _call_port(self, peer: _Peer, path: str, body: bytes, until: float, done: Done) -> None:
        def ended(code: int, message: str, answer: bytes) -> None:
            if self._may_repeat(peer, code, until):
                self.after(_AGAIN_S, partial(self._call_port, peer, path, body, until, done))
            else:
                self._end(done, code, message)

        peer.caller.call(path, body, max(until - time.monotonic(), 0.001), ended, wait_for_ready=True)

    def _may_repeat(self, peer: _Peer, code: int, until: float) -> bool:
        return code == _UNAVAILABLE and not peer.gone and time.monotonic() + _AGAIN_S < until

    def _end(self, done: Done, code: int, message: str) -> None:
        event = done(code, message)
        if event is not None:
            self._report(event)

    def _invoked(self, peer: _Peer, order: ev.InvokeCall, code: int, message: str) -> Event | None:
        if code == _OK:
            return ev.InvokeTaken(order.worker, order.task)
        if peer.gone:
            return None
        if code in _BROKEN:
            _log.warning("the worker at %s cannot be given a call: %s", peer.address, message)
            return peer.lost
        return ev.InvokeRefused(order.worker, order.task, f"{_NAMES.get(code, code)}: {message}")

    # Aliases and deallocations

    def _order(self, store: int, order: _Order) -> None:
        with self._lock:
            peer = self._stores.get(store)
            if peer is not None:
                peer.orders.append(order)
        if peer is None:
            # The store is lost, and with it the objects that it held.
            self.after(0.0, partial(self._answered, order.number))
        else:
            self._send_orders(peer)

    def _send_orders(self, peer: _Peer) -> None:
        """Send a store's orders: all of them over its link, else the first one at its port."""
        until = self._until(self._options.call_timeout_s)
        with self._lock:
            if peer.is_ordering or peer.gone or not peer.orders:
                return
            link = self._attached.get(peer.address)
            if link is not None:
                for order in peer.orders:
                    done = partial(self._ordered, peer, order, False)
                    link.add(_Sent(peer, order.path, order.body, until, done, order))
                if any(order.path != _DEALLOCATE for order in peer.orders):
                    self._unsent[link] = None
                peer.orders.clear()
                is_due, self._is_late_due = self._is_late_due, True
            else:
                order = peer.orders.popleft()
                peer.is_ordering = True
        if link is not None:
            if not is_due:
                self.after(_LATE_S, self._send_late)
            return
        self._call_port(peer, order.path, order.body, until, partial(self._ordered, peer, order, True))

    def _send_late(self) -> None:
        """Have the deallocations sent that no other call has taken along; `flush` follows."""
        with self._lock:
            self._is_late_due = False
            self._unsent.update(dict.fromkeys(self._links.values()))

    def _ordered(self, peer: _Peer, order: _Order, at_port: bool, code: int, message: str) -> None:
        if code != _OK and not self._stopped:
            # The store then holds more than it needs, until it is lost or gets a later order.
            _log.warning("the store at %s rejected %s: %s", peer.address, order.path.rpartition("/")[2], message)
        if not self._stopped:  # else the order is sent again after the restart
            self._answered(order.number)
        if at_port:
            with self._lock:
                peer.is_ordering = False
            self._send_orders(peer)
            self.flush()

    # Deliveries

    def _deliver(self, peer: _Peer) -> None:
        """Start the deliveries of a store that wait, as many as the limit allows."""
        while True:
            with self._lock:
                if not peer.deliveries or peer.delivering >= self._options.deliveries_max:
                    return
                order = peer.deliveries.popleft()
                target = self._stores.get(order.target)
                if target is None:
                    continue  # lost; the state knows, and has dropped the delivery
                peer.delivering += 1
            request = _STORE["DeliverObj"][0](objstore_address=target.address, objref=order.ref)
            done = partial(self._delivered, peer, target.address, order)
            body = request.SerializeToString()
            self._call(peer, "/ObjStore/DeliverObj", body, self._until(self._options.delivery_timeout_s), done)

    def _delivered(self, peer: _Peer, target: str, order: ev.DeliverObj, code: int, message: str) -> None:
        with self._lock:
            peer.delivering -= 1
        self._deliver(peer)
        self.flush()
        if code == _OK or peer.gone:
            return
        reason = f"{_NAMES.get(code, code)}: {message}"
        _log.info("object %d was not delivered from %s to %s: %s", order.ref, peer.address, target, reason)
        failed = ev.DeliveryFailed(order.ref, order.source, order.target, reason)
        self.after(_AGAIN_S, partial(self._report, failed))
