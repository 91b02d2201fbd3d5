"""Generators that one node runs and another one reads: items are sent as they are yielded.

Each node has a stream in its arena. The uplink of the node that runs the task reads its stream on behalf of all remote
readers: it takes items and sends them in order (`Outflow`). The uplink of the node that forwarded the task fills the
stream that its program reads (`Inflow`): it adds the received items, and reports how many were read and whether more
are wanted. Items that were sent but not read there still count as unread for the task. So the task's limit on unread
items holds across both nodes, and a generator without readers is closed. Received items stay when the peer is lost: the
task's next attempt skips them, on any node.

Order: items are numbered; the task's result is sent once all its items have been sent.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fastrt._core.objects import handles
from fastrt._core.tasks import generator_relay, generators
from fastrt._core.tasks.generators import ITEMS, NOTHING, Producer
from fastrt.cluster.references import PeerError
from fastrt.errors import ObjectStoreFullError
from fastrt.net.grpc.descriptors import message_set
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef

if TYPE_CHECKING:
    from fastrt.cluster.peer_stream import Exchange

_SET = message_set("node")
_Stream, _Reads = (_SET.message(f"fastrt.node.{name}") for name in ("Stream", "Reads"))
LOOK_S = 0.05  # between polls: the last reader sends no wake when it goes
PAUSED_S = 0.002  # between polls while the stream is congested
_SENDING_MAX = 64  # items of one generator that are being sent
_WAITING_BYTES = 4 << 20  # of queued small messages; no items are added beyond it
_ITEMS_A_LOOK = 256


class InOrder:
    """Puts items into order: a large item may arrive after a small one with a higher number.

    Args:
        what: describes the stream, for errors.
        count: how many items were added earlier, by previous attempts.

    Attributes:
        count: how many have been added.
    """

    def __init__(self, what: str, count: int = 0) -> None:
        self.count = count
        self._what = what
        self._early: dict[int, Callable[[], None]] = {}

    def put(self, item: int, add: Callable[[], None]) -> None:
        """Call `add` once all items before this one were added.

        Raises:
            PeerError: this item has already arrived.
        """
        if item <= self.count or item in self._early:
            raise PeerError(f"item {item} of {self._what} has arrived twice")
        self._early[item] = add
        while self.count + 1 in self._early:
            self.count += 1
            self._early.pop(self.count)()

    def is_whole(self) -> bool:
        """Return whether no item is missing before the last one that arrived."""
        return not self._early


def is_congested(exchange: Exchange, sending: int) -> bool:
    """Return whether a generator with `sending` items in transit should pause."""
    return sending >= _SENDING_MAX or exchange.out.nbytes > _WAITING_BYTES


@dataclass(eq=False)
class Outflow:
    """A generator of the peer that this node runs: sends its items to the peer.

    Attributes:
        exchange: the stream to the peer.
        number: the peer's number of the task.
        stream: the local stream that the task fills.
        end: the task's result.
        next: the number of the last item taken.
        finish: sends the result.
        sending: how many items are in transit.
        over: no more items are sent.
    """

    exchange: Exchange
    number: int
    stream: ObjectRef
    end: ObjectRef
    next: int
    finish: Callable[[ObjectRef], None]
    sending: int = 0
    over: bool = False

    def is_paused(self) -> bool:
        """Whether no more should be sent for now."""
        return is_congested(self.exchange, self.sending)

    def arm(self) -> float:
        """Have the next item wake this process, unless enough items are on their way."""
        if self.is_paused():
            return PAUSED_S
        return 0.0 if generator_relay.arm_items(self.exchange.client, self.stream, self.end) else LOOK_S

    def look(self) -> None:
        """Send the items that are ready."""
        for _ in range(_ITEMS_A_LOOK):
            if self.is_paused():
                return
            item = generator_relay.pass_on(self.exchange.client, self.stream, self.end)
            if item is False:
                return
            if item is None or item is self.end:
                self.stop()
                return
            self.next += 1
            self.sending += 1
            self.exchange.traffic.send(item, self._sent, task=self.number, item=self.next)

    def stop(self) -> None:
        """Send no more items; the result follows those in transit."""
        self.exchange.waiter.drop(self)
        self.over = True
        self._end()

    def _sent(self) -> None:
        self.sending -= 1
        self._end()

    def _end(self) -> None:
        if not self.over or self.sending:
            return
        if handles.is_ready(self.exchange.client, self.end):
            self.finish(self.end)
        else:
            self.exchange.waiter.add(self.end, self.finish)

    def on_reads(self, taken: int, wanted: int) -> None:
        """Handle the peer's report: its readers have taken `taken` items (modulo 2^32), and whether they want more."""
        generator_relay.note_readers(self.exchange.client, self.stream, (self.next - taken) % (1 << 32), wanted)
        if wanted != ITEMS and not self.over:
            self.stop()


class Inflow:
    """A generator of this node that the peer runs: adds the received items to the local stream.

    Args:
        exchange: the stream to the peer.
        producer: fills the stream that the program reads.
        task: the task, which this process has claimed.

    Attributes:
        number: the task's number on the stream to the peer.
        limit: the number of unread items at which the task pauses; 0: it never does.
        seen: how many items had been taken at the last look.
    """

    def __init__(self, exchange: Exchange, producer: Producer, task: int) -> None:
        self.exchange, self.producer, self.task = exchange, producer, task
        self.number = 0
        self.limit = int(producer.limit)
        self.seen = producer.taken
        self._read, self._wanted = producer.read, ITEMS  # as reported to the peer last
        self.items = InOrder(f"a stream that node {exchange.name} fills", int(producer.skip))

    def plan(self) -> Any:
        """Return the message that describes the stream to the peer."""
        return _Stream(limit=self.limit, produced=self.producer.skip, taken=self._read)

    def wants_items(self) -> bool:
        """Return whether items can still be read here."""
        return self.producer.wanted == ITEMS

    def look(self) -> None:
        """Report how many items were read, and whether more are wanted."""
        self.seen = self.producer.taken
        # `taken` includes items that this process took for a third node, whose readers may not have read them yet.
        read, wanted = self.producer.read, self.producer.wanted
        if (read != self._read and self.limit) or wanted != self._wanted:
            self._read, self._wanted = read, wanted
            self.exchange.out.add("reads", _Reads(task=self.number, taken=read, wanted=wanted))

    def arm(self) -> float:
        """Have the next reader wake this process, if the task can pause for readers."""
        is_read = self.limit and generator_relay.arm_produced(self.exchange.client, self.producer, self.seen)
        return 0.0 if is_read else LOOK_S

    def add_scalar(self, value: Any) -> None:
        """Add a value, or an error in its place when no room for it can be made."""
        try:
            if self.producer.add(value):
                return
        except ObjectStoreFullError:
            pass  # the store asks the daemon for room
        self.producer.add_ref(self.exchange.store.put_or_error(value))


class Flows:
    """The generators that are forwarded over one exchange, in both directions.

    Args:
        exchange: the stream to the peer.
        store: this process's attachment.
    """

    def __init__(self, exchange: Exchange, store: Store) -> None:
        self._exchange = exchange
        self._store = store
        self._waiter = exchange.waiter
        self._in: dict[int, Inflow] = {}  # by the task's number
        self._out: dict[int, Outflow] = {}

    # ---- the side that forwards ----

    def describe(self, task: int, message: Any) -> Inflow:
        """Describe a generator that this process has claimed in the message to the peer."""
        flow = Inflow(self._exchange, Producer(self._store.client, task), task)
        message.stream.CopyFrom(flow.plan())
        return flow

    def register(self, number: int, flow: Inflow) -> None:
        """Register the flow of a forwarded task under its number."""
        flow.number = number
        self._in[number] = flow
        self._waiter.open(flow)

    def on_item(self, message: Any, contains: list[ObjectRef]) -> bool:
        """Take an item, or the first piece of one; return False when nothing reads it.

        Raises:
            PeerError: the item is invalid.
        """
        flow = self._in.get(message.task)
        if flow is None:
            return False
        if not flow.wants_items():
            flow.items.put(message.item, lambda: None)
            return False
        if message.kind == 0 and not message.error and len(message.data) == message.size:
            value = pickle.loads(message.data)  # safe: the peer has proved the session's token
            flow.items.put(message.item, partial(flow.add_scalar, value))
            return True
        self._exchange.traffic.receive(
            message, contains, flow.task, lambda ref: flow.items.put(message.item, partial(flow.producer.add_ref, ref))
        )
        return True

    def end(self, number: int) -> None:
        """Check and forget the flow of a task whose result has arrived. Call this before the task is finished.

        Raises:
            PeerError: items are missing.
        """
        flow = self._in.get(number)
        if flow is not None and not flow.items.is_whole():
            raise PeerError(f"node {self._exchange.name} ended a generator, but some of its items did not arrive")
        self.drop(number)

    def drop(self, number: int) -> None:
        """Forget the flow of a task that is no longer forwarded."""
        flow = self._in.pop(number, None)
        if flow is not None:
            self._waiter.drop(flow)

    # ---- the side that runs ----

    def create(self, message: Any) -> ObjectRef | None:
        """Create the local stream that a generator of the peer fills; return None if the task or call is no generator.

        Raises:
            PeerError: the generator has not exactly one result.
        """
        if not message.HasField("stream"):
            return None
        if message.results != 1:
            raise PeerError(f"node {self._exchange.name} sends a generator with {message.results} results")
        plan = message.stream
        stream: ObjectRef = generators.create(self._store.client, plan.limit, plan.produced)
        generator_relay.note_readers(self._store.client, stream, (plan.produced - plan.taken) % (1 << 32), ITEMS)
        return stream

    def run(self, message: Any, stream: ObjectRef, end: ObjectRef, send: Callable[[ObjectRef], None]) -> None:
        """Send the items that a generator of the peer yields on this node.

        Args:
            message: the peer's message with the task or call.
            stream, end: the local stream that it fills, and its result.
            send: sends the result; called once all items are sent.
        """
        number = message.task

        def finish(ref: ObjectRef) -> None:
            self._out.pop(number, None)
            send(ref)

        flow = self._out[number] = Outflow(self._exchange, number, stream, end, message.stream.produced, finish)
        self._waiter.open(flow)

    def on_reads(self, message: Any) -> None:
        """Handle the peer's report of how many items were read."""
        flow = self._out.get(message.task)
        if flow is not None:
            flow.on_reads(message.taken, min(message.wanted, ITEMS))

    def close(self) -> None:
        """End all flows with the exchange: the generators that run here have no readers any more."""
        for number in list(self._in):
            self.drop(number)
        for flow in self._out.values():
            self._waiter.drop(flow)
            generator_relay.note_readers(self._store.client, flow.stream, 0, NOTHING)
        self._out.clear()
