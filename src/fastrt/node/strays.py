"""Tasks and actors that wait for a placement group of which no node has a bundle, and which another node has made.

Only the node that made a group knows whether it waits for resources or was removed. So they are sent there: they wait
there as long as the group does, or end with an error. A group ends with the node that made it.
"""

from __future__ import annotations

from fastrt.ids import is_made_on
from fastrt.node.keys import Order
from fastrt.node.placing import Placing
from fastrt.tasks.resources import group_of

LEFT_S = 10.0  # a node that is not there for so long has left: after a restart of the head all others are back by then


class Strays:
    """The placement groups of other nodes that tasks and actors of this node wait for.

    Args:
        placing: knows the other nodes.
    """

    def __init__(self, placing: Placing) -> None:
        self._placing = placing
        self._missed: dict[str, float] = {}  # groups whose node is not there, and since when

    def see(self) -> None:
        """Forget that a node was missed which is there again; called after each report of the nodes."""
        self._missed = {group: since for group, since in self._missed.items() if self._maker(group) is None}

    def decide(self, order: Order, now: float) -> Order | None:
        """Return what becomes of a task or an actor that `Placing` gives the order "ask" for.

        Returns:
            An order "forward" or "refuse"; None: it waits here for now.
        """
        group = group_of(order.demand)
        maker = self._maker(group)
        if maker is not None:
            return self._placing.put(order.key, maker, now)
        if not self._placing.has_uplink:  # the nodes are not known now
            self._missed.clear()
        elif now - self._missed.setdefault(group, now) > LEFT_S:
            self._placing.forget(order.key)
            return order._replace(what="refuse")
        return None

    def _maker(self, group: str) -> str | None:
        """The node that made a group, if it is there."""
        return next((node for node in self._placing.views if is_made_on(group, node)), None)
