"""Resources that stand for label selectors: the nodes that match a selector have its resource."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from fastrt.store.messages import NodeRow
from fastrt.tasks.labels import mark, matches
from fastrt.tasks.resources import Demand, selectors_of

_MOST = 1000  # known selectors from which on unused ones are forgotten


class Selectors:
    """The selectors of all demands that a node has seen.

    Args:
        total, used: parts of the node's resources by name; the resources of selectors are added and removed there.
        labels: of the node.
    """

    def __init__(self, total: dict[str, int], used: dict[str, int], labels: dict[str, str]) -> None:
        self._total, self._used, self._labels = total, used, labels
        self._known: dict[str, None] = {}
        self._most = _MOST

    def mark(self, view: NodeRow) -> None:
        """Add the resources of the known selectors to a new report of a node."""
        if self._known:
            mark(view.total, view.labels, self._known)
            mark(view.free, view.labels, self._known)

    def learn(
        self, demand: Demand, views: Collection[NodeRow], in_use: Callable[[], Iterable[Demand]]
    ) -> Collection[NodeRow]:
        """Give the resources that stand for the selectors of a demand to the nodes that match them.

        Args:
            demand: a demand.
            views: the reports of the other nodes.
            in_use: returns the demands whose selectors are kept when there are too many.
        Returns:
            The reports that were changed.
        """
        if not (new := [name for name in selectors_of(demand) if name not in self._known]):
            return ()
        is_full = len(self._known) >= self._most
        if is_full:
            self._forget({name for one in in_use() for name in selectors_of(one)}, views)
        self._known.update(dict.fromkeys(new))
        mark(self._total, self._labels, new)
        changed = [view for view in views if any(matches(name, view.labels) for name in new)]
        for view in changed:
            mark(view.total, view.labels, new)
            mark(view.free, view.labels, new)
        return views if is_full else changed

    def _forget(self, used: set[str], views: Collection[NodeRow]) -> None:
        """Forget the selectors that are not used."""
        amounts = [self._total, self._used, *(parts for view in views for parts in (view.total, view.free))]
        for name in [name for name in self._known if name not in used]:
            del self._known[name]
            for parts in amounts:
                parts.pop(name, None)
        self._most = max(_MOST, 2 * len(self._known))
