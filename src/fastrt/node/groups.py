"""Places the bundles of placement groups: all of a group or none, and again those whose node is lost.

Part of what `admission` decides by. It keeps nothing that is not in the bundles' records: a daemon that takes over is
told of each bundle once more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fastrt.node.bundles import assign
from fastrt.node.keys import BundleKey
from fastrt.node.placing import GONE, WAITING, Order, Placing
from fastrt.store.messages import GroupRow
from fastrt.tasks.resources import Amounts, Demand, bundle_name, in_words

_AGAIN_S = 0.2  # after a node had no room for what it seemed to have room for
_GONE_MAX = 1000


class _Shape(NamedTuple):
    """All by which a group's bundles are placed: what those take that wait, and where the others are."""

    bundles: tuple[Amounts, ...]
    strategy: str
    placed: tuple[str, ...]


@dataclass
class _Group:
    count: int
    strategy: str
    keys: dict[int, BundleKey] = field(default_factory=dict)  # records, by the bundle's index
    demands: dict[int, Demand] = field(default_factory=dict)
    ready: bool = False
    complete: bool = False  # all bundles had a place at some time
    created: bool = False  # it was ready at some time
    again_at: float = 0.0
    warned: bool = False


class Groups:
    """The placement groups that were made on this node.

    A look costs what has changed: groups of which a bundle has moved are looked at, and when something has become free,
    those that wait; of these, one of each shape.

    Args:
        placing: knows what is free.
    """

    def __init__(self, placing: Placing) -> None:
        self._placing = placing
        self._groups: dict[str, _Group] = {}
        self._gone: dict[str, str] = placing.gone_groups  # by name: why it never can be; empty: it was removed
        self._waiting: dict[str, None] = {}  # groups with a bundle that has no place, the oldest first
        self._rooms: dict[str, dict[str, int]] = {}
        self._grown = -1  # growth of what is free, as those that wait know it
        self._seen = -1  # changes of it, as these rooms and shapes know it
        self._no_room: dict[_Shape, bool] = {}  # shapes without room now, and whether there could ever be

    def add(self, key: BundleKey, demand: Demand, placed: bool = False) -> None:
        """There is a bundle, which waits, or (`placed`) of which another daemon had decided."""
        name, index, count, strategy = demand.bundle.split("/")
        group = self._groups.setdefault(name, _Group(int(count), strategy))
        group.keys[int(index)], group.demands[int(index)] = key, demand
        if placed and len(group.keys) == group.count:
            group.complete = group.created = all(self._placing.node_of(one) for one in group.keys.values())
        self._placing.stirred_groups[name] = None
        self._look_whether_ready(name, group)

    def decide(self, now: float) -> list[Order]:
        """Place what can be placed: orders "admit", "forward", "refuse", "warn", and "release": give up what it has."""
        orders: list[Order] = []
        stirred, self._placing.stirred_groups = self._placing.stirred_groups, {}
        names = [name for name in stirred if name not in self._waiting and name in self._groups]
        grown, self._grown = self._grown != self._placing.growth, self._placing.growth
        for name in [*self._waiting, *names] if grown else stirred:
            group = self._groups.get(name)
            if group is not None:
                orders += self._look(name, group, now)
        for name in stirred | self._placing.stirred_groups:
            group = self._groups.get(name)
            if group is not None:
                self._look_whether_ready(name, group)
        return orders

    def _look(self, name: str, group: _Group, now: float) -> list[Order]:
        """Do what there is to do for one group."""
        for index, key in list(group.keys.items()):
            if self._placing.place_of(key) == GONE:
                del group.keys[index], group.demands[index]
        if not group.keys:
            self._forget(name, "")
            return []
        if len(group.keys) < group.count and not group.complete:
            return []  # its maker has not come further yet
        return self._place(name, group, now)

    def _place(self, name: str, group: _Group, now: float) -> list[Order]:
        placing = self._placing
        waiting = [index for index, key in group.keys.items() if placing.place_of(key) == WAITING]
        group.complete = group.complete or not waiting
        if not waiting:
            self._waiting.pop(name, None)
            return []
        self._waiting[name] = None
        if now < group.again_at:
            placing.stirred_groups[name] = None  # it is looked at again, whether or not anything changes
            return []
        placed = [placing.node_of(key) for index, key in group.keys.items() if index not in waiting]
        chosen, feasible = self._choose(_Shape(
            tuple(group.demands[index].amounts for index in waiting), group.strategy, tuple(placed)
        ))  # fmt: skip
        if chosen is not None:
            return [placing.put(group.keys[k], node, now) for k, node in zip(waiting, chosen, strict=True)]
        if placed and not group.complete:  # a node had no room after all: all or none
            group.again_at = now + _AGAIN_S
            placing.stirred_groups[name] = None
            return [Order(key, "release", group.demands[k]) for k, key in group.keys.items() if k not in waiting]
        if placed or feasible or group.warned:
            return []
        if placing.can_grow:
            group.warned = True
            return [Order(group.keys[waiting[0]], "warn", group.demands[waiting[0]])]
        refused = [Order(key, "refuse", group.demands[k]) for k, key in group.keys.items()]
        self._forget(name, self.shortage(name))
        return refused

    def _choose(self, shape: _Shape) -> tuple[list[str] | None, bool]:
        """A node for each bundle of a shape, or None; and whether the nodes could hold it at all."""
        if self._seen != self._placing.changes:
            self._seen, self._rooms = self._placing.changes, self._placing.rooms()
            self._no_room.clear()
        if shape in self._no_room:
            return None, self._no_room[shape]
        chosen = assign(shape.bundles, self._rooms, shape.strategy, shape.placed)
        if chosen is not None:
            return chosen, True
        feasible = assign(shape.bundles, self._placing.rooms(whole=True), shape.strategy) is not None
        self._no_room[shape] = feasible
        return None, feasible

    def _forget(self, name: str, why: str) -> None:
        """There is no such group any more. What is left of its records is not looked at again: others may have them."""
        for key in self._groups.pop(name).keys.values():
            self._placing.forget(key)
        self._waiting.pop(name, None)
        self._placing.pending_groups.discard(name)
        self._gone[name] = why
        while len(self._gone) > _GONE_MAX:
            del self._gone[next(iter(self._gone))]  # the oldest

    def _look_whether_ready(self, name: str, group: _Group) -> None:
        group.ready = self._is_ready(name, group)
        group.created = group.created or group.ready
        (self._placing.pending_groups.discard if group.ready else self._placing.pending_groups.add)(name)

    def _is_ready(self, name: str, group: _Group) -> bool:
        """Whether tasks can use all bundles where they were placed, as far as this node has been told."""
        if len(group.keys) < group.count:
            return False
        for index, key in group.keys.items():
            node = self._placing.node_of(key)
            view = self._placing.views.get(node)
            total = self._placing.total if node == self._placing.node else {} if view is None else view.total
            if not node or bundle_name(name, index) not in total:
                return False
        return True

    def is_ready(self, name: str) -> bool | None:
        """Whether everything is reserved for a group; None when there is no such group (any more)."""
        group = self._groups.get(name)
        return None if group is None else group.ready

    def why_gone(self, name: str) -> str | None:
        """Why a group that was made here never can be; empty: it was removed; None: it is not known to be gone."""
        return self._gone.get(name)

    def keys_of(self, name: str) -> list[BundleKey] | None:
        """The records of a group's bundles; None when this node does not know all of them."""
        group = self._groups.get(name)
        return None if group is None or len(group.keys) < group.count else list(group.keys.values())

    def shortage(self, name: str) -> str:
        """What the bundles of a group want that never can be had, and what there is."""
        group = self._groups[name]
        wanted = "; ".join(in_words(dict(one.amounts)) for _, one in sorted(group.demands.items()))
        rooms = [in_words(room) for room in self._placing.rooms(whole=True).values()]
        return f"bundles ({wanted}) as {group.strategy}, for which the nodes do not suffice ({'; '.join(rooms)})"

    def rows(self) -> list[GroupRow]:
        """All groups, for `placement_group_table`."""
        found = []
        for name, group in self._groups.items():
            state = "CREATED" if group.ready else "RESCHEDULING" if group.created else "PENDING"
            bundles = {str(index): dict(one.amounts) for index, one in group.demands.items()}
            nodes = {str(index): self._placing.node_of(key) for index, key in group.keys.items()}
            found.append(GroupRow(name, group.strategy, state, bundles, nodes))
        return found
