"""Which node sends a large value to which, when several nodes want it. A pure state machine.

A node that has the value sends it to one other node at a time, and each node that has received it sends it on. The
first owner sends it only while no other node has it. So a value goes along a tree, and its owner's network carries it
about once, however many nodes want it. If more nodes have it than wait for it, several send a part of it each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

Peer = Hashable
BYTES_MIN = 4 << 20  # smaller values are fetched from their owners at once: to ask takes as long as to send 1 MiB
SENDERS_MAX = 4  # of one node: more would occupy nodes that another one may ask for the value next


class Sender(NamedTuple):
    """A node that shall send a value, or a part of it, and the value's number there; None: the owner."""

    peer: Peer | None
    number: int


class Order(NamedTuple):
    """The nodes that shall send a value to another one."""

    receiver: Peer
    senders: tuple[Sender, ...]


class Spread:
    """The nodes that have or want one value.

    Args:
        number: of the value at its owner.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._copies: dict[Peer, int] = {}  # who has received it, and under which number it offers it
        self._sending: dict[Peer, tuple[Sender, ...]] = {}  # by receiver
        self._waiting: deque[Peer] = deque()

    @property
    def is_idle(self) -> bool:
        """Return whether no node waits for it or has it."""
        return not (self._copies or self._sending or self._waiting)

    def ask(self, peer: Peer) -> list[Order]:
        """Handle a node that wants the value. If it asks again, a sender that it was given has failed."""
        for failed in self._sending.pop(peer, ()):
            self._copies.pop(failed.peer, None)
        self._copies.pop(peer, None)  # it has dropped its copy
        for receiver, senders in self._sending.items():
            # The receiver waits for this one's part: the others count as free, or this one could wait for them.
            self._sending[receiver] = tuple(one for one in senders if one.peer == peer) or senders
        if peer not in self._waiting:
            self._waiting.append(peer)
        return self._assign()

    def received(self, peer: Peer, number: int) -> list[Order]:
        """Handle a node that has received the value, and offers it under a number of its own; 0: it does not."""
        self._sending.pop(peer, None)
        if number:
            self._copies[peer] = number
        return self._assign()

    def remove(self, peer: Peer) -> list[Order]:
        """Handle a node that does not need the value any more, or whose stream has ended."""
        self._copies.pop(peer, None)
        self._sending.pop(peer, None)
        if peer in self._waiting:
            self._waiting.remove(peer)
        return self._assign()

    def _assign(self) -> list[Order]:
        orders = []
        while self._waiting:
            busy = {sender.peer for senders in self._sending.values() for sender in senders}
            free = [Sender(peer, number) for peer, number in self._copies.items() if peer not in busy]
            if free:
                share = min(max(1, len(free) // len(self._waiting)), SENDERS_MAX)
                senders = tuple(free[:share])
            elif None not in busy and not self._copies:
                senders = (Sender(None, self._number),)
            else:
                break
            receiver = self._waiting.popleft()
            self._sending[receiver] = senders
            orders.append(Order(receiver, senders))
        return orders


class Fetch(NamedTuple):
    """A peer of `Spreads`: a node's fetch of a value, and then its copy.

    A node knows a value by numbers: several of its objects can share one number, and one object can have two. So an
    object says which fetches are of one value, and is no name for a fetch.
    """

    stream: Hashable
    number: int


class Spreads:
    """The values of this node that other nodes want.

    Args:
        order: called with each order.
    """

    def __init__(self, order: Callable[[Order], None]) -> None:
        self._order = order
        self._spreads: dict[int, Spread] = {}
        self._values: dict[Fetch, int] = {}  # by fetch: the object under which it was entered

    def ask(self, objref: int, fetch: Fetch) -> None:
        """Handle a node that wants an object's value."""
        spread = self._find(fetch)
        if spread is None:
            self._values[fetch] = objref
            spread = self._spreads.setdefault(objref, Spread(0))
        self._carry_out(spread.ask(fetch))

    def received(self, fetch: Fetch, number: int) -> None:
        """Handle a node that has received a value; `number` as for `Spread.received`."""
        spread = self._find(fetch)
        if spread is not None:
            self._carry_out(spread.received(fetch, number))
            self._drop_idle(fetch)

    def remove(self, fetch: Fetch) -> None:
        """Handle a node that does not need a value any more."""
        spread = self._find(fetch)
        if spread is not None:
            self._carry_out(spread.remove(fetch))
            self._drop_idle(fetch)
        self._values.pop(fetch, None)

    def leave(self, stream: Hashable) -> None:
        """Handle the end of the stream to a node."""
        for fetch in [one for one in self._values if one.stream is stream]:
            self.remove(fetch)

    def _find(self, fetch: Fetch) -> Spread | None:
        return self._spreads.get(self._values.get(fetch, 0))

    def _drop_idle(self, fetch: Fetch) -> None:
        objref = self._values.get(fetch, 0)
        spread = self._spreads.get(objref)
        if spread is not None and spread.is_idle:
            del self._spreads[objref]

    def _carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            self._order(order)
