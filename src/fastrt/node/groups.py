"""Places the bundles of placement groups: all of a group or none, and again those whose node is lost.

Part of what `admission` decides by. It keeps nothing that is not in the bundles' records: a daemon that takes over is
told of each bundle once more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastrt.node.bundles import assign
from fastrt.node.placing import GONE, HERE, WAITING, Order, Placing, Task
from fastrt.tasks.demand import Demand, in_words

_AGAIN_S = 0.2  # after a node had no room for what it seemed to have room for
_GONE_MAX = 1000


@dataclass
class _Group:
    count: int
    strategy: str
    tasks: dict[int, Task] = field(default_factory=dict)  # records, by the bundle's index
    demands: dict[int, Demand] = field(default_factory=dict)
    complete: bool = False  # it was, at some time
    again_at: float = 0.0
    warned: bool = False


class Groups:
    """The placement groups that were made on this node.

    Args:
        placing: knows what is free.
    """

    def __init__(self, placing: Placing) -> None:
        self._placing = placing
        self._groups: dict[str, _Group] = {}
        self._gone: dict[str, str] = placing.gone_groups  # by name: why it never can be; empty: it was removed

    def add(self, task: Task, demand: Demand, placed: bool = False) -> None:
        """There is a bundle, which waits, or (`placed`) of which another daemon had decided."""
        name, index, count, strategy = demand.bundle.split("/")
        group = self._groups.setdefault(name, _Group(int(count), strategy))
        group.tasks[int(index)], group.demands[int(index)] = task, demand
        if placed and len(group.tasks) == group.count:
            group.complete = all(self._placing.node_of(one) for one in group.tasks.values())
        self._placing.pending_groups = {one for one, known in self._groups.items() if not self._is_ready(one, known)}

    def decide(self, now: float) -> list[Order]:
        """Place what can be placed: orders "admit", "lend", "refuse", "warn", and "release": give up what it has."""
        orders: list[Order] = []
        for name, group in list(self._groups.items()):
            for index, task in list(group.tasks.items()):
                if self._placing.place_of(task) == GONE:
                    del group.tasks[index], group.demands[index]
            if not group.tasks:
                self._forget(name, "")
            elif len(group.tasks) == group.count or group.complete:
                orders += self._place(name, group, now)
        self._placing.pending_groups = {one for one, known in self._groups.items() if not self._is_ready(one, known)}
        return orders

    def _place(self, name: str, group: _Group, now: float) -> list[Order]:
        placing = self._placing
        waiting = [index for index, task in group.tasks.items() if placing.place_of(task) == WAITING]
        placed = [placing.node_of(task) for index, task in group.tasks.items() if index not in waiting]
        group.complete = group.complete or not waiting
        if not waiting or now < group.again_at:
            return []
        wanted = [group.demands[index].amounts for index in waiting]
        chosen = assign(wanted, placing.rooms(), group.strategy, placed)
        if chosen is not None:
            return [placing.put(group.tasks[k], node, now) for k, node in zip(waiting, chosen, strict=True)]
        if placed and not group.complete:  # a node had no room after all: all or none
            group.again_at = now + _AGAIN_S
            return [Order(task, "release", group.demands[k]) for k, task in group.tasks.items() if k not in waiting]
        if placed or assign(wanted, placing.rooms(whole=True), group.strategy) is not None or group.warned:
            return []
        if placing.can_grow:
            group.warned = True
            return [Order(group.tasks[waiting[0]], "warn", group.demands[waiting[0]])]
        refused = [Order(task, "refuse", group.demands[k]) for k, task in group.tasks.items()]
        self._forget(name, self.shortage(name))
        return refused

    def _forget(self, name: str, why: str) -> None:
        """There is no such group any more. What is left of its records is not looked at again: others may have them."""
        for task in self._groups.pop(name).tasks.values():
            self._placing.forget(task)
        self._gone[name] = why
        while len(self._gone) > _GONE_MAX:
            del self._gone[next(iter(self._gone))]  # the oldest

    def _is_ready(self, name: str, group: _Group) -> bool:
        """Whether all bundles are where they were placed, as far as this node has been told."""
        if len(group.tasks) < group.count:
            return False
        for index, task in group.tasks.items():
            node = self._placing.node_of(task)
            if not node:
                return False
            if node != self._placing.node:
                view = self._placing.views.get(node)
                if view is None or not any(one.endswith(f"@{name}/{index}") for one in view.total):
                    return False
            elif self._placing.place_of(task) != HERE:
                return False
        return True

    def is_ready(self, name: str) -> bool | None:
        """Whether everything is reserved for a group; None when there is no such group (any more)."""
        group = self._groups.get(name)
        return None if group is None else self._is_ready(name, group)

    def why_gone(self, name: str) -> str | None:
        """Why a group that was made here never can be; empty: it was removed; None: it is not known to be gone."""
        return self._gone.get(name)

    def tasks_of(self, name: str) -> list[Task]:
        """The records of a group's bundles."""
        return list(self._groups[name].tasks.values()) if name in self._groups else []

    def waiting(self) -> list[Task]:
        """The records of bundles that have no place."""
        tasks = [task for group in self._groups.values() for task in group.tasks.values()]
        return [task for task in tasks if self._placing.place_of(task) == WAITING]

    def shortage(self, name: str) -> str:
        """What the bundles of a group want that never can be had, and what there is."""
        group = self._groups[name]
        wanted = "; ".join(in_words(dict(one.amounts)) for _, one in sorted(group.demands.items()))
        rooms = [in_words(room) for room in self._placing.rooms(whole=True).values()]
        return f"bundles ({wanted}) as {group.strategy}, for which the nodes do not suffice ({'; '.join(rooms)})"

    def rows(self) -> list[dict[str, Any]]:
        """All groups, for `placement_group_table`."""
        found = []
        for name, group in self._groups.items():
            ready = self._is_ready(name, group)
            state = "CREATED" if ready else "RESCHEDULING" if group.complete else "PENDING"
            found.append(
                {
                    "placement_group_id": name,
                    "strategy": group.strategy,
                    "state": state,
                    "bundles": {index: one.amounts for index, one in group.demands.items()},
                    "bundles_to_node_id": {i: self._placing.node_of(task) for i, task in group.tasks.items()},
                }
            )
        return found
