"""Generators whose handles came from the peer: they are read here, and the peer owns their tasks.

A `Mirror` represents a remote generator locally: it is a stream that this process fills with fetched items. Nothing is
fetched before a reader here wants an item. From then on items are fetched ahead of the readers, so that they need not
wait for each one. On the peer a `Feed` takes items like any other reader, as many as were requested: the readers on
both nodes share the items. The result of the generator's task travels separately and may arrive first. Readers stop
waiting once the peer has reported the total number of items. When the peer is lost, the last item is an error.
"""

from __future__ import annotations

import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

from fastrt._core.tasks import generator_relay, generators
from fastrt.cluster.generators import LOOK_S, PAUSED_S, InOrder, is_congested
from fastrt.errors import ObjectLostError
from fastrt.net.grpc.descriptors import message_set
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import serialize

if TYPE_CHECKING:
    from fastrt.cluster.peer_stream import Exchange

_SET = message_set("node")
_Over, _Reads = (_SET.message(f"fastrt.node.{name}") for name in ("Over", "Reads"))
_AHEAD = 64  # items fetched ahead of the readers; more are requested once half of them are read
_ITEMS_A_LOOK = 256


class Feed:
    """A generator's stream on this node that the peer reads.

    Args:
        exchange: the stream to the peer.
        ref: the generator's stream.
    """

    def __init__(self, exchange: Exchange, ref: ObjectRef) -> None:
        # If the task has ended or belongs to a third node, the stream also serves as its end: no items are added then.
        self._exchange, self._ref = exchange, ref
        self.pair = (ref, generator_relay.end_of(exchange.client, ref) or ref)
        self._sent = self._allowed = self._sending = 0

    def is_paused(self) -> bool:
        """Whether no more should be sent for now."""
        return is_congested(self._exchange, self._sending)

    def arm(self) -> float:
        """Have the next item wake this process, unless enough items are on their way."""
        if self.is_paused():
            return PAUSED_S
        return 0.0 if generator_relay.arm_items(self._exchange.client, *self.pair) else LOOK_S

    def on_reads(self, items: int) -> None:
        """Handle the peer's request for items; `items` is the total so far."""
        self._allowed = items
        self._exchange.waiter.open(self)

    def look(self) -> None:
        """Send the items that are ready, up to the number requested."""
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
            exchange.traffic.send(item, self._taken, objref=self._ref.objref, item=self._sent)
        else:
            return
        exchange.waiter.drop(self)

    def _taken(self) -> None:
        self._sending -= 1


class Mirror:
    """The local stream that represents a generator of the peer.

    Args:
        exchange: the stream to the peer.
        objref: the object's number on the peer.
        ref: the local stream.
    """

    def __init__(self, exchange: Exchange, objref: int, ref: ObjectRef) -> None:
        self._exchange, self.objref, self.ref = exchange, objref, ref
        self.items = InOrder(f"a stream of node {exchange.name}")
        self.seen, self._asked, self._most = 0, 0, -1

    def arm(self) -> float:
        """Have the next reader wake this process. The first reader sends no wake: `look` polls for it."""
        is_read = self._asked and generator_relay.arm_taken(self._exchange.client, self.ref, self.seen)
        return 0.0 if is_read else LOOK_S

    def look(self) -> None:
        """Request more items if readers here need them."""
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

    @property
    def is_closed(self) -> bool:
        """Return whether all items are here."""
        return self.items.count == self._most

    def on_over(self, items: int) -> None:
        """Handle the peer's report of the total number of items."""
        self._most = items
        self._close_if_whole()

    def _close_if_whole(self) -> None:
        if self.is_closed:
            self._exchange.waiter.drop(self)
            generator_relay.close(self._exchange.client, self.ref)

    def lose(self, lost: str) -> None:
        """End the stream with an error, because the peer is lost."""
        if not self.is_closed:
            self._most = self.items.count
            self._exchange.waiter.drop(self)
            _end(self._exchange.store, self.ref, lost)


def end_abandoned(store: Store) -> None:
    """End the mirrors of an earlier uplink of this node with an error: nothing fills them any more.

    Their feeds have ended with its streams, and so are the items that were on their way.
    """
    for ref in generator_relay.mirrors(store.client):
        _end(store, ref, "this node's uplink, which fetched them, has ended")


def _end(store: Store, ref: ObjectRef, lost: str) -> None:
    error = serialize(ObjectLostError(f"further items of a generator are lost: {lost}"))
    generator_relay.add_to(store.client, ref, store.put_serialized(error, error=True))
    generator_relay.close(store.client, ref)


class Streams:
    """The generators that this node and the peer have named to each other.

    Args:
        exchange: the stream to the peer.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._feeds: dict[int, Feed] = {}  # by this node's object
        self._mirrors: dict[int, Mirror] = {}  # by the peer's object

    def feed(self, ref: ObjectRef) -> None:
        """Prepare to send items of a stream of this node, because the peer has received its name."""
        self.stop(ref.objref)
        self._feeds[ref.objref] = Feed(self._exchange, ref)

    def stop(self, objref: int) -> None:
        """Send no more items of a stream: the peer has released it."""
        feed = self._feeds.pop(objref, None)
        if feed is not None:
            self._exchange.waiter.drop(feed)

    def on_reads(self, message: Any) -> None:
        """Handle the peer's request for items of a stream."""
        feed = self._feeds.get(message.objref)
        if feed is not None:
            feed.on_reads(message.items)

    def mirror(self, objref: int, ref: ObjectRef) -> None:
        """Create the mirror of a stream of the peer, which this node has received the name of."""
        mirror = self._mirrors[objref] = Mirror(self._exchange, objref, ref)
        self._exchange.waiter.open(mirror)

    def on_item(self, message: Any, contains: list[ObjectRef]) -> bool:
        """Take an item, or the first piece of one; return False when nothing here reads the stream.

        Raises:
            PeerError: the item is invalid.
        """
        mirror = self._mirrors.get(message.objref)
        if mirror is None:
            return False

        def put(ref: ObjectRef) -> None:
            mirror.items.put(message.item, partial(mirror.add, ref))

        if message.kind == 0 and not message.error and len(message.data) == message.size:
            put(
                self._exchange.store.put_or_error(pickle.loads(message.data))
            )  # safe: the peer has proved the session's token
        else:
            self._exchange.traffic.receive(message, contains, -message.objref, put)
        return True

    @property
    def is_empty(self) -> bool:
        """Return whether this node has no generator of the peer that may still get items."""
        return all(mirror.is_closed for mirror in self._mirrors.values())

    def on_over(self, message: Any) -> None:
        """Handle the end of a stream of the peer."""
        mirror = self._mirrors.get(message.objref)
        if mirror is not None:
            mirror.on_over(message.items)

    def given_up(self, objref: int) -> None:
        """Drop the mirror of a stream that nothing here reads any more."""
        mirror = self._mirrors.pop(objref, None)
        if mirror is not None:
            self._exchange.waiter.drop(mirror)

    def close(self, lost: str) -> None:
        """Stop all feeds, and end all mirrors with an error, because the peer is lost."""
        for objref in list(self._feeds):
            self.stop(objref)
        for objref, mirror in list(self._mirrors.items()):
            self.given_up(objref)
            mirror.lose(lost)
