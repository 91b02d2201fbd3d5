"""The uplink: connects this node to a cluster. `fastrt.runtime.uplink` runs it as a process.

The uplink is a client of the arena like a worker, but runs no tasks: it claims tasks that would wait too long here,
forwards them to other nodes, and submits the tasks of other nodes here. Workers and drivers see no difference. When it
dies, its tasks run again like those of a dead worker, and a new uplink is started.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio

from fastrt._core.memory.clients import KIND_WORKER, table
from fastrt._core.tasks import tasks as core
from fastrt.cluster.actor_directory import Finder
from fastrt.cluster.borrowing import AnyOf
from fastrt.cluster.daemon_link import Orders
from fastrt.cluster.departure import LOOK_S, Departure
from fastrt.cluster.forwarding import Forwarding
from fastrt.cluster.head_link import HeadLink
from fastrt.cluster.idle import is_used
from fastrt.cluster.large_values import open_native
from fastrt.cluster.load import LoadWatch
from fastrt.cluster.node_tables import NEVER_BYTES, NodeTables
from fastrt.cluster.output import OutputOfTasks
from fastrt.cluster.peer import Peer
from fastrt.cluster.peer_stream import Exchange, tidy_all
from fastrt.cluster.pressure import Pressure
from fastrt.cluster.questions import Answer, Desk, Question
from fastrt.cluster.reasons import Reasons
from fastrt.cluster.references import PeerError
from fastrt.cluster.standing import Standstill
from fastrt.cluster.views import Change
from fastrt.errors import FastrtError
from fastrt.net import supervise
from fastrt.net.address import reachable
from fastrt.net.grpc import streams
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.streams import Access
from fastrt.node.keys import ActorKey
from fastrt.store import join, messages, unread
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.waiter import LoopWaiter
from fastrt.tasks.labels import labels_of
from fastrt.versions import own_versions

_SET = message_set("node")
_Report = _SET.message("fastrt.node.Report")
_EXCHANGE = "/fastrt.node.Node/Exchange"
_BUSY_TICK_S = 0.002  # while tasks begin and end
_QUEUE_TICK_S = 0.016  # at most, while tasks wait for those that run
_TIDY_S = 1.0
_QUIET_TIDY_S = 4.0  # while no message arrives and nothing must be polled: a tick costs 0.5 ms
_AGAIN_S = 0.5  # before another attempt to connect to a node
_END_S = 2.0  # for streams to end in order


class Uplink:
    """This node's connections to its cluster: the head, the other nodes and the daemon.

    Args:
        store: this process's attachment.
        settings: head, listen, name, workers; see `fastrt.runtime.uplink.main`.
        access: the cluster's identity.
        daemon: the connection to this node's daemon.
        read: reads a page of this node's rows for another node; None: this node answers no questions.
    """

    def __init__(
        self,
        store: Store,
        settings: dict[str, Any],
        access: Access,
        daemon: join.Lasting,
        read: Callable[[Question], Answer] | None = None,
    ) -> None:
        self._store = store
        self._client = store.client
        self._client.adopt_job(self._client.job)  # of the tasks that come from other nodes
        self._settings = settings
        self._access = access
        self._daemon = daemon
        self._node = self._client.segment.session
        self._workers: int = settings["workers"]
        self._waiter = LoopWaiter(store, asyncio.get_running_loop())
        self._native = open_native(store, access, settings["listen"])
        limits = (settings["lineage_bytes"], settings["keep_bytes"] or NEVER_BYTES)
        self._tables = NodeTables(store, self._waiter, self._native, *limits)
        self._idle_s: float = settings["peer_idle_s"]
        self._peers: dict[str, Peer] = {}
        self._exchanges: set[Exchange] = set()
        self._departure = Departure(self._client, self._exchanges, self._tables.kept)
        self._pressure = Pressure()
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()  # stopping, and all exchanges are closed
        self._news = asyncio.Event()
        labels = labels_of(self._node, settings["labels"])
        self._report = _Report(
            node=self._node, name=settings["name"], workers=self._workers, labels=labels, versions=own_versions()
        )
        self._tick = _TIDY_S
        self._tidy_s = _TIDY_S
        self._done = 0  # tasks that this node's workers have ended
        self._lineage: list[ObjectRef] = []  # of an earlier uplink; adopted once all of it is here
        self._load: tuple[int, ...] = ()  # forwarded, accepted and finished tasks, at the last look
        self._forwarding = Forwarding(
            store,
            self._waiter,
            bool(self._workers),
            self._peers,
            self._exchanges,
            self._call_soon,
            self._look_elsewhere,
        )
        self._reasons = Reasons(access.identity)
        self._head = HeadLink(settings["head"], access, self._report, self._reasons, self._on_change)
        self._output = OutputOfTasks(settings["name"], self._peers, self._call_soon, daemon, self._tables.jobs)
        others: dict[type[messages.Message], Callable[[Any], None]] = {
            messages.SearchActor: self._on_find,
            messages.ActorEnded: lambda message: self._news.set(),
            messages.ReturnTask: self._departure.on_return,
            messages.TaskOutput: self._output.on_output,
            messages.ReadsOutput: self._on_readers,
            messages.KeptObjects: self._on_kept,
            messages.Fetch: lambda message: self._tables.remote.wanted(message.entry, message.objref),
        }
        self._orders = Orders(settings["name"], self._client, daemon, self._on_orders, others)
        self._head.on_heads = self._orders.keep_heads
        self._tables.kept.on_drop = self._orders.release
        self._tables.lineage.on_store = partial(self._orders.keep_now, self._node)
        self._tables.lineage.on_drop = partial(self._orders.release, self._node)
        self._waiter.open(LoadWatch(self._client, self._news.set))
        self._finder = Finder(self._client, daemon, self._connected, self._tables.jobs)
        self._standstill = Standstill(store, self._exchanges)
        self._desk = Desk(self._reach, read, self._standstill.look, store.client.segment.session, self._exchanges)

    async def run(self) -> None:
        """Serve until SIGTERM comes or the process that started this one ends; at SIGUSR1 leave in order."""
        loop = asyncio.get_running_loop()
        self._tables.adopt()
        loop.add_signal_handler(signal.SIGTERM, self._stopping.set)
        loop.add_signal_handler(signal.SIGINT, self._on_cancelled)
        loop.add_signal_handler(signal.SIGUSR1, self.leave)
        server, address = await streams.serve(
            self._settings["listen"], self._access, _SET, {_EXCHANGE: self._on_stream}, self._ended
        )
        self._report.address = reachable(address, self._settings["head"])
        self._report.native = reachable(self._native.address, self._settings["head"])
        if self._settings["standby"]:
            self._report.standby = reachable(self._settings["standby"], self._settings["head"])
        await self._desk.open(self._store.socket_path)
        background = [loop.create_task(self._stay_joined()), loop.create_task(self._maintain())]
        self._forwarding.begin()
        stopping = loop.create_task(self._stopping.wait())
        streams.end_with_starter(self._stopping)  # before joining, because the head may be away for long
        self._head.announce = partial(supervise.announce, address)
        if not self._settings["join_first"]:
            self._head.joined()
        try:
            done, _ = await asyncio.wait([stopping, *background], return_when=asyncio.FIRST_COMPLETED)
            for one in done - {stopping}:
                one.result()  # an error in a background task ends the process
        finally:
            self._stopping.set()
            for one in background:
                one.cancel()
            self._tables.remote.is_ending = True
            for exchange in list(self._exchanges):
                exchange.close("the node that forwarded it left the cluster", is_leaving=True)
            self._ended.set()
            await streams.stop_server(server, _END_S)
            self._desk.close()
            self._waiter.close()
            self._native.close()

    # ---- the head ----

    async def _stay_joined(self) -> None:
        await self._orders.ready.wait()  # a node must not be announced without its resources
        self._tables.lineage.adopt(self._lineage)
        self._lineage = []
        await self._head.stay_joined(self._orders.heads)

    def _on_change(self, change: Change) -> None:
        """Take the changes of the head's view."""
        for report in change.changed:
            if report.node != self._node:
                self._peers.setdefault(report.node, Peer(report, bool(self._workers))).report = report
        self._orders.report_members(change)
        if change.left:
            self._forget_peers()
        self._claim()
        self._carry_out()
        self._news.set()

    def _forget_peers(self) -> None:
        """Forget the nodes that have left, once they have no stream."""
        there = self._head.members.reports
        for node in [n for n, peer in self._peers.items() if n not in there and peer.exchange is None]:
            del self._peers[node]

    def _look_elsewhere(self) -> None:
        """Update whether the head should send this node the load of the others more often."""
        self._head.look(self._orders.is_looking or self._forwarding.is_looking)

    def _on_kept(self, message: messages.KeptObjects) -> None:
        """Take over what an earlier uplink held: objects until other nodes claim them, and lineage."""
        refs = self._orders.adopt(message)
        self._tables.adopt_stand_ins()
        if message.node != self._node:
            self._tables.kept.keep(message.node, refs)
        elif not self._orders.ready.is_set():  # else a new daemon names what this uplink has stored
            self._lineage += refs

    def _release(self, node: str, objref: int) -> None:
        """Have the daemon drop an object that a node has released on one stream, unless the node uses it otherwise."""
        if not self._tables.kept.is_held(node, objref):
            self._orders.release(node, objref)

    def _claim(self) -> None:
        """Claim from the nodes that keep values for this one; connect to them, and give up those that have left."""
        members = self._head.members.reports or None  # not known before the head has answered
        self._tables.remote.tend(members)
        self._tables.kept.tend(members)
        for node in self._tables.remote.absent():
            peer = self._peers.get(node)
            if peer is not None and peer.exchange is not None and peer.is_open:
                peer.exchange.traffic.claims.claim_more()
            elif peer is not None and peer.report is not None:
                self._call_soon(peer)

    def leave(self) -> None:
        """Leave the cluster as soon as no other node needs this one; no more work comes."""
        self._departure.leave()
        self._report.workers = self._report.idle = 0
        self._head.changed()
        self._report_free()
        self._news.set()

    # ---- streams to other nodes ----

    async def _on_stream(self, requests: AsyncIterator[Any], context: Any) -> None:
        await self._orders.ready.wait()  # the objects that are kept for other nodes have come before
        await self._exchange(requests, context.write, None)

    def _call_soon(self, peer: Peer) -> None:
        """Begin to connect to a node, unless an attempt is in progress or failed a moment ago."""
        if not peer.calling and peer.exchange is None and time.monotonic() >= peer.call_at:
            peer.calling = True
            asyncio.get_running_loop().create_task(self._call(peer))

    async def _call(self, peer: Peer) -> None:
        channel, agreed = None, False
        try:
            channel, call = streams.open_stream(peer.report.address, self._access, _SET, _EXCHANGE)
            stream = call()
            agreed = await self._exchange(stream, stream.write, stream.done_writing)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # connects again as long as the head lists the peer
            why = await self._reasons.find(peer.report.address) if peer.report is not None else None
            if why:
                self._reasons.report(peer.report.address, f"this node cannot connect to node {peer.report.name}: {why}")
        finally:
            peer.calling, peer.call_at = False, time.monotonic() + (0.0 if agreed else _AGAIN_S)
            if channel is not None:
                await channel.close()

    async def _exchange(self, frames: AsyncIterator[Any], write: Any, done_writing: Any) -> bool:
        """Process a stream until it ends; return whether it ended because both sides agreed that it is idle.

        Args:
            frames: of the peer.
            write: sends a frame.
            done_writing: ends this side of the stream, and waits for the peer's end; None: the return does that.
        """
        exchange = Exchange(self._store, self._waiter, self._tables)
        if exchange.traffic.values is not None:
            exchange.traffic.values.on_keep = lambda ref: self._orders.keep(exchange.node, ref)
            exchange.traffic.values.on_release = lambda objref: self._release(exchange.node, objref)
        exchange.on_output = self._output.pass_to_drivers
        self._desk.serve(exchange)
        exchange.standing.on_change = self._standstill.look
        exchange.references.on_held = lambda *about: self._orders.hold(exchange, exchange.node, *about)
        self._exchanges.add(exchange)
        writing = asyncio.create_task(self._write(exchange, write))
        why, is_lost = "the stream to it was closed", True
        try:
            async for frame in frames:
                if not exchange.node and not frame.HasField("hello"):
                    raise PeerError("its first frame has no hello, which names the node")
                await exchange.traffic.arrivals.room_for(frame)
                exchange.on_frame(frame)
                self._on_frame(exchange)
                if frame.idle and self._is_idle(exchange, frame.idle):
                    exchange.out.close()
                    await asyncio.wait([writing])
                    if done_writing is None:
                        break
                    await done_writing()
        except grpc.aio.AioRpcError as exc:
            why = f"{exc.code().name}: {exc.details()}"
        except FastrtError as exc:
            why, is_lost = str(exc), False
            sys.stderr.write(f"fastrt: the stream to node {exchange.name} is closed: {exc}\n")
        finally:
            self._exchanges.discard(exchange)
            peer = self._peers.get(exchange.node)
            if peer is not None and peer.exchange is exchange:
                peer.exchange = None
            exchange.close(why, is_lost)
            self._orders.lost(exchange, exchange.node)
            self._standstill.tidy()
            writing.cancel()
            self._news.set()
        return not exchange.idle.is_open

    def _is_idle(self, exchange: Exchange, word: int) -> bool:
        """Take what the peer says about a stream that it does not use; return whether this side closes it now."""
        was_agreed = exchange.idle.is_agreed
        if exchange.idle.received(word, is_used(exchange), time.monotonic(), self._idle_s):
            exchange.out.stir()
        if exchange.idle.is_open:
            self._carry_out()  # what waited for the peer's answer
        return exchange.idle.is_agreed and not was_agreed

    async def _write(self, exchange: Exchange, write: Any) -> None:
        frame = exchange.first_frame(self._report)
        while frame is not None:
            frame.queued, frame.room = core.queued(self._client), self._room_for(exchange)
            frame.short = exchange.traffic.arrivals.is_short
            frame.idle = exchange.idle.next_word()
            frame.leaves, frame.needless = self._departure.asked, exchange.leaves.answered
            self._orders.flush()  # the peer may claim the objects that the frame names from the next uplink
            await write(frame)
            frame = await exchange.out.next_frame()

    def _room_for(self, exchange: Exchange) -> int:
        """Return how many tasks the peer may have on this node at once."""
        exchange.reported_room = 0 if self._departure.asked else self._pressure.room
        return exchange.ledger.accepted + exchange.reported_room

    def _on_frame(self, exchange: Exchange) -> None:
        peer = self._peers.setdefault(exchange.node, Peer(None, bool(self._workers)))
        if peer.exchange is None:
            peer.exchange, peer.target = exchange, 2.0 * max(1, exchange.workers)
        if peer.exchange is exchange:
            peer.adapt()
        if self._tick > _BUSY_TICK_S and (exchange.ledger.forwarded or exchange.ledger.accepted):
            self._tick = _BUSY_TICK_S
            self._news.set()
        elif self._tidy_s > _TIDY_S:
            self._news.set()
        self._carry_out()
        self._forwarding.update_room()

    # ---- orders of the daemon ----

    def _on_orders(self) -> None:
        self._report_free()
        self._look_elsewhere()
        self._carry_out()
        self._tables.remote.fetch_ahead(self._workers, self._orders.ahead)

    def _report_free(self) -> None:
        """Update the free resources in the report to the head."""
        total, free = self._orders.total, self._orders.free_now()
        if self._departure.asked:  # then no node places anything here
            total, free = {}, {}
        if (total, free) != (dict(self._report.total), dict(self._report.free)):
            for field, parts in ((self._report.total, total), (self._report.free, free)):
                field.clear()
                field.update(parts)
            self._head.changed()

    def _carry_out(self) -> None:
        """Forward the tasks of the daemon's orders to the nodes that are connected, and connect to the others."""
        for node in self._orders.wanted():
            peer = self._peers.get(node)
            if peer is None or peer.leaves:
                self._orders.drop(node)
            elif peer.exchange is not None and peer.is_open:
                for key in self._orders.take(node):
                    if isinstance(key, ActorKey):
                        peer.exchange.remote_actors.host(key.record)
                    else:
                        self._forwarding.forward(peer, key.record)
            elif peer.report is not None:
                self._call_soon(peer)

    # ---- output of tasks ----

    def _on_readers(self, message: messages.ReadsOutput) -> None:
        self._report.reads_output = message.on
        self._head.changed()

    def _on_find(self, message: messages.SearchActor) -> None:
        asyncio.get_running_loop().create_task(self._finder.find(message.ticket, message.name))

    def _reach(self, node: str) -> tuple[bool, Exchange | None]:
        """Return whether a node is a member, and the stream to it; connect to it if there is none."""
        peer = self._peers.get(node)
        if peer is None or peer.report is None:
            return False, None
        self._call_soon(peer)
        return True, peer.exchange if peer.is_open else None

    def _connected(self) -> tuple[list[Exchange], bool]:
        """Return one stream for each connected node, and whether every member is connected; connect to the others."""
        there = [peer.exchange for peer in self._peers.values() if peer.exchange is not None and peer.is_open]
        missing = [peer for peer in self._peers.values() if peer.report is not None and not peer.is_open]
        for peer in missing:
            self._call_soon(peer)
        return there, not missing

    # ---- the loop ----

    async def _maintain(self) -> None:
        """Forward excess tasks and clean up periodically: more often while the load changes."""
        tidy_at = 0.0
        while True:
            for exchange in self._exchanges:
                exchange.hosted_actors.report_ended()
            if self._departure.look():
                self._stopping.set()
            if self._store.tell is not None:
                unread.forward(self._store.tell)
            excess = self._look()
            if excess:
                self._forwarding.forward_excess(excess)
            self._tables.remote.fetch_ahead(self._workers, self._orders.ahead)
            for peer in self._peers.values():
                if peer.output:
                    self._output.send(peer)
            now = time.monotonic()
            if now >= tidy_at:
                self._tidy_s = min(2 * self._tidy_s, _TIDY_S if self._polls() else _QUIET_TIDY_S)
                tidy_at = now + self._tidy_s
                self._report_free()
                self._look_elsewhere()
                self._forget_peers()
                self._carry_out()
                self._finder.tidy()
                self._standstill.tidy()
                self._claim()
                self._on_cancelled()  # covers a process that cancelled a task and died before it sent the signal
                used = AnyOf(self._tables.tidy(), self._finder.kept())
                tidy_at = min(tidy_at, now + tidy_all(self._exchanges, used))
                for exchange in self._exchanges:
                    if exchange.node and exchange.idle.look(is_used(exchange), now, self._idle_s):
                        exchange.out.stir()
            self._news.clear()
            self._tick = self._next_tick()
            try:
                await asyncio.wait_for(self._news.wait(), min(self._tick, max(tidy_at - time.monotonic(), 0.0)))
            except asyncio.TimeoutError:
                continue
            self._tidy_s = _TIDY_S
            tidy_at = min(tidy_at, time.monotonic() + _TIDY_S)

    def _polls(self) -> bool:
        """Return whether something must be polled: orders, unused stand-ins, output to send, nodes to reconnect to."""
        return bool(
            self._orders.wanted()
            or self._finder.kept()
            or any(peer.output for peer in self._peers.values())
            or any(exchange.references.has_stand_ins for exchange in self._exchanges)
            or self._tables.remote.absent()
        )

    def _next_tick(self) -> float:
        """Return how long to sleep if no event comes; the time doubles while the load is constant."""
        if self._departure.is_active:
            return LOOK_S
        before, self._load = self._load, self._load_now()
        if self._peers and self._load != before:
            return _BUSY_TICK_S
        return min(2 * self._tick, _QUEUE_TICK_S if self._peers and self._report.queued else self._tidy_s)

    def _load_now(self) -> tuple[int, ...]:
        return (
            sum(e.ledger.forwarded for e in self._exchanges),
            sum(e.ledger.accepted for e in self._exchanges),
            self._done,
        )

    def _look(self) -> int:
        """Update the report to the head; return how many queued tasks would wait too long here."""
        queued = core.queued(self._client)
        workers = [row for row in table(self._client.segment) if row["kind"] == KIND_WORKER]
        idle = sum(row["task"] is None for row in workers)
        self._done = sum(row["tasks_done"] for row in workers)
        before = self._report.idle, self._report.queued
        if (queued or before[1] or not self._workers) and (idle, queued) != before:
            self._report.idle, self._report.queued = 0 if self._departure.asked else idle, queued
            self._head.changed()
            self._report_free()
        if not self._workers:
            self._forwarding.update_room()
            return 0
        excess = self._pressure.excess(time.monotonic(), queued, idle, self._done)
        for exchange in self._exchanges:
            if self._pressure.room and not exchange.reported_room and exchange.idle.is_open:
                exchange.out.stir()  # a node with too many tasks learns of the room without asking
        return excess

    def _on_cancelled(self) -> None:
        for exchange in self._exchanges:
            exchange.pass_cancels()
