"""Generators whose items are read on another node: they come as they are made, a stream in the arena at either end.

The uplink of the node that runs the task reads its stream on behalf of all readers elsewhere: it takes items and sends
them in order (`Outflow`). The uplink of the node that forwarded the task fills the stream that its program reads
(`Inflow`): it adds the items that come, and reports how many were read and whether more are wanted. Items that were not
read there count as unread for the task, too. So its limit holds over both nodes, and a generator without readers is
closed. Items that have come stay when the other node is lost: the next attempt skips them, wherever it runs.

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
LOOK_S = 0.05  # no wake comes when the last reader goes
PAUSED_S = 0.002  # while so much is to be sent that nothing is added to it
_SENDING_MAX = 64  # items of a stream that are on their way out of this node's memory
_WAITING_BYTES = 4 << 20  # of small messages, beyond which no items are added to them
_ITEMS_A_LOOK = 256


class InOrder:
    """Puts items into order: large ones may come after small ones with higher numbers.

    Args:
        what: describes the stream, for errors.
        count: how many items were added before.

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
            PeerError: it has come before.
        """
        if item <= self.count or item in self._early:
            raise PeerError(f"item {item} of {self._what} has come twice")
        self._early[item] = add
        while self.count + 1 in self._early:
            self.count += 1
            self._early.pop(self.count)()

    def is_whole(self) -> bool:
        """Whether no item is missing before the last one that came."""
        return not self._early


def is_laden(exchange: Exchange, sending: int) -> bool:
    """Whether a flow with `sending` items on their way should pause."""
    return sending >= _SENDING_MAX or exchange.out.nbytes > _WAITING_BYTES


@dataclass(eq=False)
class Outflow:
    """A generator of the other node that runs here.

    Attributes:
        exchange: the stream to that node.
        number: of its task.
        stream: what it fills.
        end: its result.
        next: the number of the next item.
        finish: sends the result.
        sending: how many items are on their way.
        over: there are no more.
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
        return is_laden(self.exchange, self.sending)

    def arm(self) -> float:
        """Have the next item wake this process, unless enough items are on their way."""
        if self.is_paused():
            return PAUSED_S
        return 0.0 if generator_relay.arm_items(self.exchange.client, self.stream, self.end) else LOOK_S

    def look(self) -> None:
        """Send what there is."""
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
            self.exchange.send_value(item, self._sent, task=self.number, item=self.next)

    def stop(self) -> None:
        """Send no more items; the result follows those that are on their way."""
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
        """Readers over there have taken so many items, modulo 2^32, and want that much more."""
        generator_relay.note_readers(self.exchange.client, self.stream, (self.next - taken) % (1 << 32), wanted)
        if wanted != ITEMS and not self.over:
            self.stop()


class Inflow:
    """A generator of this node's that the other node runs.

    Args:
        exchange: the stream to that node.
        producer: fills the stream that the program reads.
        task: of this process.

    Attributes:
        number: by which the other node knows the task.
        limit: unread items from which on the task waits; 0: it never does.
        seen: how many items had been taken at the last look.
    """

    def __init__(self, exchange: Exchange, producer: Producer, task: int) -> None:
        self.exchange, self.producer, self.task = exchange, producer, task
        self.number = 0
        self.limit = int(producer.limit)
        self.seen = producer.taken
        self._read, self._wanted = producer.read, ITEMS  # as reported to the other node last
        self.items = InOrder(f"a stream that node {exchange.name} fills", int(producer.skip))

    def plan(self) -> Any:
        """Describe the stream to the other node."""
        return _Stream(limit=self.limit, produced=self.producer.skip, taken=self._read)

    def wants_items(self) -> bool:
        """Whether items can still be read here."""
        return self.producer.wanted == ITEMS

    def look(self) -> None:
        """Report how many items were read, and whether more are wanted."""
        self.seen = self.producer.taken
        # What this process took for readers on a third node, those may not have read.
        read, wanted = self.producer.read, self.producer.wanted
        if (read != self._read and self.limit) or wanted != self._wanted:
            self._read, self._wanted = read, wanted
            self.exchange.out.add("reads", _Reads(task=self.number, taken=read, wanted=wanted))

    def arm(self) -> float:
        """Have the next reader wake this process, if the task waits for readers."""
        is_read = self.limit and generator_relay.arm_produced(self.exchange.client, self.producer, self.seen)
        return 0.0 if is_read else LOOK_S

    def add_scalar(self, value: Any) -> None:
        """Add a value, or an error in its place where no room for it can be had."""
        try:
            if self.producer.add(value):
                return
        except ObjectStoreFullError:
            pass  # the store asks the daemon for room
        self.producer.add_ref(self.exchange.store.put_or_error(value))


class Flows:
    """The generators of one exchange.

    Args:
        exchange: the stream to the other node.
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
        """Describe a generator that this process has claimed, for the other node."""
        flow = Inflow(self._exchange, Producer(self._store.client, task), task)
        message.stream.CopyFrom(flow.plan())
        return flow

    def register(self, number: int, flow: Inflow) -> None:
        """Register the flow of a forwarded task under its number."""
        flow.number = number
        self._in[number] = flow
        self._waiter.open(flow)

    def on_item(self, message: Any, contains: list[ObjectRef]) -> bool:
        """Take an item, or the first piece of one; False when nothing reads it.

        Raises:
            PeerError: it makes no sense.
        """
        flow = self._in.get(message.task)
        if flow is None:
            return False
        if not flow.wants_items():
            flow.items.put(message.item, lambda: None)
            return False
        if message.kind == 0 and not message.error and len(message.data) == message.size:
            value = pickle.loads(message.data)  # the stream has shown the session's token
            flow.items.put(message.item, partial(flow.add_scalar, value))
            return True
        self._exchange.receive(
            message, contains, flow.task, lambda ref: flow.items.put(message.item, partial(flow.producer.add_ref, ref))
        )
        return True

    def end(self, number: int) -> None:
        """Check and forget a flow whose result has come. The task must be given back afterwards, not before.

        Raises:
            PeerError: items are missing.
        """
        flow = self._in.get(number)
        if flow is not None and not flow.items.is_whole():
            raise PeerError(f"node {self._exchange.name} ends a stream of which items are missing")
        self.drop(number)

    def drop(self, number: int) -> None:
        """Forget the flow of a task that is not forwarded any more."""
        flow = self._in.pop(number, None)
        if flow is not None:
            self._waiter.drop(flow)

    # ---- the side that runs ----

    def create(self, message: Any) -> ObjectRef | None:
        """The stream that a task or a call of the other node's fills here; None when it has none.

        Raises:
            PeerError: it is not that of a task with one result.
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
        """Send what a generator of the other node's yields here.

        Args:
            message: how that node has named the task.
            stream, end: it fills, and its result.
            send: sends the result, once everything before it is sent.
        """
        number = message.task

        def finish(ref: ObjectRef) -> None:
            self._out.pop(number, None)
            send(ref)

        flow = self._out[number] = Outflow(self._exchange, number, stream, end, message.stream.produced, finish)
        self._waiter.open(flow)

    def on_reads(self, message: Any) -> None:
        """The other node reports how many items were read there."""
        flow = self._out.get(message.task)
        if flow is not None:
            flow.on_reads(message.taken, min(message.wanted, ITEMS))

    def close(self) -> None:
        """The exchange has ended: items of generators that run here have no reader any more."""
        for number in list(self._in):
            self.drop(number)
        for flow in self._out.values():
            self._waiter.drop(flow)
            generator_relay.note_readers(self._store.client, flow.stream, 0, NOTHING)
        self._out.clear()
