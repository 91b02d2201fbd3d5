"""The scheduler's outgoing calls to workers and stores, on an event loop in a separate thread.

Aliases and deallocations are sent to a store one after the other, in the order given; deliveries run concurrently, with
a limit per store. Failures are reported as facts. A peer that cannot be reached for `lost_after_s` is lost, and at once
if its connection ends and its port is closed: its process has ended. A loss is reported at most once; the connection is
watched from the peer's registration on, also while it is idle.

Source: `WorkerService` and `ObjStore` of protos/ray.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from fastrt.net.grpc.channel import bearer, open_aio_channel
from fastrt.net.grpc.descriptors import message_set
from fastrt.scheduler import events as ev
from fastrt.scheduler.events import Event
from fastrt.scheduler.liveness import is_closed
from fastrt.scheduler.wire import invoke_request

_log = logging.getLogger(__name__)

_SET = message_set("ray")
_STORE = _SET.methods("ObjStore")
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_AGAIN_S = 0.1
_PROBE_S = 0.5  # between two looks at a peer whose connection is broken


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
class _Peer:
    """A worker or a store, its channel, and the calls under way."""

    address: str
    lost: Event
    channel: grpc.aio.Channel
    deliveries: asyncio.Semaphore
    orders: asyncio.Queue[tuple[int, str, Any]] = field(default_factory=asyncio.Queue)
    work: set[asyncio.Task[None]] = field(default_factory=set)


class Outgoing:
    """Carries out effects. Its methods may be called from any thread, and never block.

    Args:
        options: timeouts and credentials.
        report: receives facts, on this object's thread.
        answered: receives the number of each order of `notify` and `deallocate` once its store has answered.
    """

    def __init__(
        self, options: OutgoingOptions, report: Callable[[Event], None], answered: Callable[[int], None]
    ) -> None:
        self._options = options
        self._report = report
        self._answered = answered
        self._metadata: Sequence[tuple[str, str]] | None = bearer(options.token) if options.token is not None else None
        self._workers: dict[int, _Peer] = {}
        self._stores: dict[int, _Peer] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fastrt-scheduler-out", daemon=True)
        self._thread.start()

    def add_worker(self, worker: int, address: str) -> None:
        """Connect to a worker that has registered."""
        self._loop.call_soon_threadsafe(self._add, self._workers, worker, address, ev.WorkerLost(worker))

    def add_store(self, store: int, address: str) -> None:
        """Connect to a store that has registered."""
        self._loop.call_soon_threadsafe(self._add, self._stores, store, address, ev.ObjStoreLost(store))

    def remove_worker(self, worker: int) -> None:
        """Disconnect from a lost worker."""
        self._loop.call_soon_threadsafe(self._remove, self._workers, worker)

    def remove_store(self, store: int) -> None:
        """Disconnect from a lost store."""
        self._loop.call_soon_threadsafe(self._remove, self._stores, store)

    def invoke(self, order: ev.InvokeCall) -> None:
        """Send a call to a worker."""
        self._loop.call_soon_threadsafe(self._begin, self._workers, order.worker, self._invoke, order)

    def deliver(self, order: ev.DeliverObj) -> None:
        """Order a store to deliver an object."""
        self._loop.call_soon_threadsafe(self._begin, self._stores, order.source, self._deliver, order)

    def notify(self, number: int, order: ev.NotifyAlias) -> None:
        """Notify a store of an alias."""
        request = _STORE["NotifyAlias"][0](alias_objref=order.alias, canonical_objref=order.canonical)
        self._loop.call_soon_threadsafe(self._order, order.store, number, "NotifyAlias", request)

    def deallocate(self, number: int, order: ev.DeallocateObject) -> None:
        """Order a store to drop an object."""
        request = _STORE["DeallocateObject"][0](canonical_objref=order.canonical)
        self._loop.call_soon_threadsafe(self._order, order.store, number, "DeallocateObject", request)

    def after(self, delay_s: float, work: Callable[[], None]) -> None:
        """Call a function on this object's thread after a while, unless it stops before."""
        self._loop.call_soon_threadsafe(self._loop.call_later, delay_s, work)

    def stop(self) -> None:
        """Cancel all calls, and end the thread."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    # On the loop's thread

    def _add(self, peers: dict[int, _Peer], number: int, address: str, lost: Event) -> None:
        channel = open_aio_channel(address, self._options.credentials, self._options.options)
        peer = _Peer(address, lost, channel, asyncio.Semaphore(self._options.deliveries_max))
        peers[number] = peer
        self._spawn(peer, self._watch(peer))
        if peers is self._stores:
            self._spawn(peer, self._carry_out(peer))

    def _remove(self, peers: dict[int, _Peer], number: int) -> None:
        peer = peers.pop(number, None)
        if peer is not None:
            while not peer.orders.empty():
                self._answered(peer.orders.get_nowait()[0])
            task = self._loop.create_task(self._shut(peer))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _shut(self, peer: _Peer) -> None:
        """Cancel a peer's calls, and only then close its channel: a watch of a closed channel fails."""
        for task in list(peer.work):
            task.cancel()
        await asyncio.gather(*peer.work, return_exceptions=True)
        await peer.channel.close()

    def _begin(self, peers: dict[int, _Peer], number: int, work: Any, order: Any) -> None:
        peer = peers.get(number)
        if peer is not None:
            self._spawn(peer, work(peer, order))

    def _order(self, store: int, number: int, method: str, request: Any) -> None:
        peer = self._stores.get(store)
        if peer is None:
            self._answered(number)  # the store is lost, and with it the objects that it held
        else:
            peer.orders.put_nowait((number, method, request))

    def _spawn(self, peer: _Peer, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        peer.work.add(task)
        task.add_done_callback(peer.work.discard)

    async def _close(self) -> None:
        for peers in (self._workers, self._stores):
            for number in list(peers):
                self._remove(peers, number)
        await asyncio.gather(*self._closing, return_exceptions=True)
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _watch(self, peer: _Peer) -> None:
        """Watch whether the peer can be reached; report it lost after `lost_after_s`, or when its port is closed."""
        ready = grpc.ChannelConnectivity.READY
        connected = False
        while await self._is_reached(peer, connected):
            connected = True
            await peer.channel.wait_for_state_change(ready)
        _log.warning("%s cannot be reached: lost", peer.address)
        self._report(peer.lost)

    async def _is_reached(self, peer: _Peer, connected: bool) -> bool:
        """Wait for a connection to a peer; False when it is lost: too late, or its port is closed that was open."""
        until = self._loop.time() + self._options.lost_after_s
        while (state := peer.channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            left_s = until - self._loop.time()
            if left_s <= 0 or (connected and await is_closed(peer.address)):
                return False
            changed = self._loop.create_task(peer.channel.wait_for_state_change(state))
            peer.work.add(changed)
            changed.add_done_callback(peer.work.discard)
            try:  # not `wait_for`: it may swallow a cancellation that comes with the timeout
                await asyncio.wait((changed,), timeout=min(left_s, _PROBE_S))
            finally:
                changed.cancel()
        return True

    async def _carry_out(self, peer: _Peer) -> None:
        """Send a store's aliases and deallocations, one after the other."""
        while True:
            number, method, request = await peer.orders.get()
            try:
                await self._call(peer, f"/ObjStore/{method}", request.SerializeToString(), self._options.call_timeout_s)
            except grpc.aio.AioRpcError as error:
                # The store then holds more than it needs, until it is lost or gets a later order.
                _log.warning("the store at %s rejected %s: %s", peer.address, method, error.details())
            self._answered(number)

    async def _invoke(self, peer: _Peer, order: ev.InvokeCall) -> None:
        body = invoke_request(order.body, order.results)
        try:
            await self._call(peer, "/WorkerService/InvokeCall", body, self._options.call_timeout_s)
            self._report(ev.InvokeTaken(order.worker, order.task))
        except grpc.aio.AioRpcError as error:
            if error.code() in _BROKEN:
                _log.warning("the worker at %s cannot be given a call: %s", peer.address, error.details())
                self._report(peer.lost)
            else:
                reason = f"{error.code().name}: {error.details()}"
                self._report(ev.InvokeRefused(order.worker, order.task, reason))

    async def _deliver(self, peer: _Peer, order: ev.DeliverObj) -> None:
        target = self._stores.get(order.target)
        if target is None:
            return  # lost; the state knows, and has dropped the delivery
        request = _STORE["DeliverObj"][0](objstore_address=target.address, objref=order.ref)
        try:
            async with peer.deliveries:
                timeout_s = self._options.delivery_timeout_s
                await self._call(peer, "/ObjStore/DeliverObj", request.SerializeToString(), timeout_s)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            _log.info("object %d was not delivered from %s to %s: %s", order.ref, peer.address, target.address, reason)
            await asyncio.sleep(_AGAIN_S)
            self._report(ev.DeliveryFailed(order.ref, order.source, order.target, reason))

    async def _call(self, peer: _Peer, path: str, body: bytes, timeout_s: float) -> None:
        """Make a call; repeat it while the peer cannot be reached, until the timeout."""
        until = self._loop.time() + timeout_s
        method = peer.channel.unary_unary(path)
        while True:
            left_s = max(until - self._loop.time(), 0.001)
            try:
                await method(body, timeout=left_s, metadata=self._metadata, wait_for_ready=True)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or self._loop.time() + _AGAIN_S > until:
                    raise
            await asyncio.sleep(_AGAIN_S)
