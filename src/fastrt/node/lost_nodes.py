"""The nodes that have left the cluster, for people: the placement of tasks does not use them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fastrt.store.messages import NodeRow

_MOST = 1000


class LostNodes:
    """The last nodes that have left while this node's daemon knew them."""

    def __init__(self) -> None:
        self._lost: dict[str, NodeRow] = {}

    def note(self, there: Mapping[str, NodeRow], others: Collection[NodeRow], left: Collection[str] | None) -> None:
        """Compare the nodes that were there with a report.

        Args:
            there: the nodes before it, by id.
            others: the nodes of the report; with `left` only those that have changed.
            left: nodes that have left; None: all that are not in the report.
        """
        if left is None:
            reported = {row.node for row in others}
            left = [node for node in there if node not in reported]
        for node in left:
            if node in there:
                self._lost[node] = there[node]._replace(total={}, free={})
        for row in others if self._lost else ():
            self._lost.pop(row.node, None)
        while len(self._lost) > _MOST:
            del self._lost[next(iter(self._lost))]

    def rows(self) -> list[NodeRow]:
        """These nodes, without resources."""
        return list(self._lost.values())
