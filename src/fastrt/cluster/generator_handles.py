"""Generators whose handles came from the other node of a stream: read here, while their tasks are that node's.

A `Mirror` represents such a generator's stream on this node: a stream that this process fills with fetched items.
Nothing is fetched before a reader here wants an item; from then on items are fetched ahead of the readers, so that they
need not wait for each. The other node takes items as any reader does (`Feed`), as many as it was asked for: readers on
both nodes share them. The result of the generator's task travels separately and may come first. Readers stop waiting
when the other node reports how many items there were. When that node is lost, the last item is an error.
"""

from __future__ import annotations

import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

from fastrt._core.tasks import generator_relay, generators
from fastrt.cluster.generators import LOOK_S, PAUSED_S, InOrder, is_laden
from fastrt.errors import ObjectLostError
from fastrt.net.grpc.descriptors import message_set
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import serialize

if TYPE_CHECKING:
    from fastrt.cluster.peer_stream import Exchange

_SET = message_set("node")
_Over, _Reads = (_SET.message(f"fastrt.node.{name}") for name in ("Over", "Reads"))
_AHEAD = 64  # items that are fetched ahead; once half of them are read, more are asked for
_ITEMS_A_LOOK = 256


class Feed:
    """A stream of this node's that the other one reads.

    Args:
        exchange: the stream to that node.
        ref: the stream.
    """

    def __init__(self, exchange: Exchange, ref: ObjectRef) -> None:
        # A stream whose task has ended, or is a third node's, is its own end: what it lacks then it will never have.
        self._exchange, self._ref = exchange, ref
        self.pair = (ref, generator_relay.end_of(exchange.client, ref) or ref)
        self._sent = self._allowed = self._sending = 0

    def is_paused(self) -> bool:
        """Whether no more should be sent for now."""
        return is_laden(self._exchange, self._sending)

    def arm(self) -> float:
        """Have the next item wake this process, unless enough items are on their way."""
        if self.is_paused():
            return PAUSED_S
        return 0.0 if generator_relay.arm_items(self._exchange.client, *self.pair) else LOOK_S

    def on_reads(self, items: int) -> None:
        """The other node asks for items, up to this number in all."""
        self._allowed = items
        self._exchange.waiter.open(self)

    def look(self) -> None:
        """Send the items that are ready."""
        exchange = self._exchange
        for _ in range(_ITEMS_A_LOOK):
            if self.is_paused():
                return
            if self._sent >= self._allowed:
                break
            item = generators.take(exchange.client, *self.pair, 0, 0.0)
            if item is False:
                return
            if item is None or item is self.pair[1]:
                exchange.out.add("over", _Over(objref=self._ref.objref, items=self._sent))
                break
            self._sent += 1
            self._sending += 1
            exchange.send_value(item, self._taken, objref=self._ref.objref, item=self._sent)
        else:
            return
        exchange.waiter.drop(self)

    def _taken(self) -> None:
        self._sending -= 1


class Mirror:
    """A stream of the other node's, read here.

    Args:
        exchange: the stream to that node.
        objref: there.
        ref: the stream that represents it here.
    """

    def __init__(self, exchange: Exchange, objref: int, ref: ObjectRef) -> None:
        self._exchange, self.objref, self.ref = exchange, objref, ref
        self.items = InOrder(f"a stream of node {exchange.name}")
        self.seen, self._asked, self._most = 0, 0, -1

    def arm(self) -> float:
        """Have the next reader wake this process. No wake comes for the first item: `look` finds its reader."""
        is_read = self._asked and generator_relay.arm_taken(self._exchange.client, self.ref, self.seen)
        return 0.0 if is_read else LOOK_S

    def look(self) -> None:
        """Ask for more, if they are wanted."""
        self.seen = generators.info(self._exchange.client, self.ref)["taken"]
        if not self._asked and not generator_relay.is_awaited(self._exchange.client, self.ref):
            return
        if self._asked - self.seen <= _AHEAD // 2:
            self._asked = self.seen + _AHEAD
            self._exchange.out.add("reads", _Reads(objref=self.objref, items=self._asked))

    def add(self, ref: ObjectRef) -> None:
        """Add the next item."""
        generator_relay.add_to(self._exchange.client, self.ref, ref)
        self._close_if_whole()

    def on_over(self, items: int) -> None:
        """The other node has reported how many items there are in all."""
        self._most = items
        self._close_if_whole()

    def _close_if_whole(self) -> None:
        if self.items.count == self._most:
            self._exchange.waiter.drop(self)
            generator_relay.close(self._exchange.client, self.ref)

    def lose(self, lost: str) -> None:
        """The other node is lost."""
        if self.items.count != self._most:
            error = serialize(ObjectLostError(f"further items of a generator are lost: {lost}"))
            generator_relay.add_to(
                self._exchange.client, self.ref, self._exchange.store.put_serialized(error, error=True)
            )
            self._most = self.items.count
            self._close_if_whole()


class Streams:
    """The generators that the two nodes of one stream have named to each other.

    Args:
        exchange: the stream.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._feeds: dict[int, Feed] = {}  # by this node's object
        self._mirrors: dict[int, Mirror] = {}  # by the other node's

    def feed(self, ref: ObjectRef) -> None:
        """Prepare to send items of a stream of this node, which was named to the other node."""
        self.stop(ref.objref)
        self._feeds[ref.objref] = Feed(self._exchange, ref)

    def stop(self, objref: int) -> None:
        """Send no more items of a stream: the other node has released it."""
        feed = self._feeds.pop(objref, None)
        if feed is not None:
            self._exchange.waiter.drop(feed)

    def on_reads(self, message: Any) -> None:
        """The other node wants items."""
        feed = self._feeds.get(message.objref)
        if feed is not None:
            feed.on_reads(message.items)

    def mirror(self, objref: int, ref: ObjectRef) -> None:
        """A stream of the other node's has been named."""
        mirror = self._mirrors[objref] = Mirror(self._exchange, objref, ref)
        self._exchange.waiter.open(mirror)

    def on_item(self, message: Any, contains: list[ObjectRef]) -> bool:
        """Take an item, or the first piece of one; False when nothing here reads the stream.

        Raises:
            PeerError: it makes no sense.
        """
        mirror = self._mirrors.get(message.objref)
        if mirror is None:
            return False

        def put(ref: ObjectRef) -> None:
            mirror.items.put(message.item, partial(mirror.add, ref))

        if message.kind == 0 and not message.error and len(message.data) == message.size:
            put(
                self._exchange.store.put_or_error(pickle.loads(message.data))
            )  # the stream has shown the session's token
        else:
            self._exchange.receive(message, contains, -message.objref, put)
        return True

    def on_over(self, message: Any) -> None:
        """A stream of the other node's has ended."""
        mirror = self._mirrors.get(message.objref)
        if mirror is not None:
            mirror.on_over(message.items)

    def given_up(self, objref: int) -> None:
        """Drop the mirror of a stream that nothing here reads any more."""
        mirror = self._mirrors.pop(objref, None)
        if mirror is not None:
            self._exchange.waiter.drop(mirror)

    def close(self, lost: str) -> None:
        """The other node is lost."""
        for objref in list(self._feeds):
            self.stop(objref)
        for objref, mirror in list(self._mirrors.items()):
            self.given_up(objref)
            mirror.lose(lost)
