"""Places the bundles of placement groups: all bundles of a group or none, and again those whose node is lost.

`admission` uses it together with `placing`. All its state can be rebuilt from the bundles' records: a daemon that takes
over adds each bundle again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

from fastrt.ids import is_made_on
from fastrt.node.bundles import assign
from fastrt.node.keys import BundleKey, Order
from fastrt.node.placing import GONE, WAITING, Placing
from fastrt.store.messages import GroupRow, GroupStats
from fastrt.tasks.resources import Amounts, Demand, bundle_name, in_words

_RETRY_S = 0.2  # after a node had no room for a bundle, although its report said so
_GONE_MAX = 1000


class _Shape(NamedTuple):
    """All that decides where bundles go: the amounts of the waiting bundles, the strategy, and the others' nodes."""

    bundles: tuple[Amounts, ...]
    strategy: str
    placed: tuple[str, ...]


@dataclass
class History:
    """How a group was placed; times are those that `Groups` is given.

    Attributes:
        seen_at: when its first bundle came; None: an earlier daemon has placed it.
        tried_at: when they were last given nodes.
        attempts: how often nodes were sought for them.
        pause_s: the last delay before another attempt; 0: there was none.
        lacks: why the last attempt found no nodes: "NO_RESOURCES" or "INFEASIBLE".
        total_s, placing_s: from `seen_at` and from `tried_at` until it was ready; 0 before.
    """

    seen_at: float | None
    tried_at: float = 0.0
    attempts: int = 0
    pause_s: float = 0.0
    lacks: str = ""
    total_s: float = 0.0
    placing_s: float = 0.0

    def tried(self, now: float, lacks: str) -> None:
        """Note an attempt, and why it found no nodes (empty: it did)."""
        self.attempts += 1
        self.tried_at, self.lacks = now, lacks

    def ready(self, now: float) -> None:
        """Note that the group is ready for the first time."""
        if self.seen_at is not None:
            self.total_s, self.placing_s = now - self.seen_at, now - self.tried_at

    def row(self, ready: bool) -> GroupStats:
        """Return the scheduling state, and attempts and times for `placement_group_table`.

        The state is "QUEUED", "SCHEDULING_STARTED", "NO_RESOURCES", "INFEASIBLE" or "FINISHED".
        """
        state = "FINISHED" if ready else self.lacks or ("SCHEDULING_STARTED" if self.attempts else "QUEUED")
        return GroupStats(state, self.attempts, self.total_s, self.placing_s, self.pause_s)


@dataclass
class _Group:
    count: int
    strategy: str
    history: History
    job: int = 0  # that it ends with; 0: its records end with their references
    keys: dict[int, BundleKey] = field(default_factory=dict)  # by the bundle's index
    demands: dict[int, Demand] = field(default_factory=dict)
    ready: bool = False
    complete: bool = False  # its creator has written all records
    created: bool = False  # it was ready at some time
    retry_at: float = 0.0
    warned: bool = False


def _pause(name: str, attempts: int) -> float:
    """How long a group waits after such an attempt: groups that want the same room must not take turns without end."""
    return _RETRY_S * (1 + crc32(f"{name}{attempts}".encode()) % 8 / 2)


class Groups:
    """The placement groups that were created on this node.

    The cost of `decide` depends on the changes since the last call: it examines groups with a bundle that has moved;
    when resources have become free, it examines waiting groups, and tries one for each shape.

    Args:
        placing: knows the free resources.

    Attributes:
        is_away: whether another node has a bundle, by its record.
    """

    def __init__(self, placing: Placing) -> None:
        self._placing = placing
        self.is_away: Callable[[BundleKey], bool] = lambda key: False
        self._groups: dict[str, _Group] = {}
        self._gone: dict[str, str] = placing.gone_groups  # by name: why it can never be reserved; empty: it was removed
        self._waiting: dict[str, None] = {}  # groups with an unplaced bundle, the oldest first
        self._rooms: dict[str, dict[str, int]] = {}
        self._grown = -1  # `placing.growth` when the waiting groups were last examined
        self._seen = -1  # `placing.changes` when rooms and shapes were computed
        self._no_room: dict[_Shape, bool] = {}  # shapes without room now, and whether they could ever fit

    def add(self, key: BundleKey, demand: Demand, now: float | None) -> None:
        """Add a bundle that waits from now on, or (None) that an earlier daemon has placed; those come first."""
        name, index, count, strategy, *job = demand.bundle.split("/")
        group = self._groups.setdefault(name, _Group(int(count), strategy, History(now), int(job[0], 16) if job else 0))
        group.keys[int(index)], group.demands[int(index)] = key, demand
        if len(group.keys) == group.count:
            group.complete, group.created = True, group.created or now is None
        self._placing.stirred_groups[name] = None
        self._look_whether_ready(name, group, None)

    def decide(self, now: float) -> list[Order]:
        """Place bundles: orders "admit", "forward", "refuse", "warn", and "release": give up the bundle's resources."""
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
                self._look_whether_ready(name, group, now)
        return orders

    def _look(self, name: str, group: _Group, now: float) -> list[Order]:
        """Forget bundles that have ended, and place the waiting ones."""
        for index, key in list(group.keys.items()):
            if self._placing.place_of(key) == GONE:
                del group.keys[index], group.demands[index]
        if not group.keys:
            self._forget(name, "")
            return []
        if len(group.keys) < group.count and not group.complete:
            return []  # its creator has not written all records yet
        return self._place(name, group, now)

    def _place(self, name: str, group: _Group, now: float) -> list[Order]:
        placing = self._placing
        unplaced = [index for index, key in group.keys.items() if placing.place_of(key) == WAITING]
        waiting = [index for index in unplaced if not self._is_away(name, index, group.keys[index], now)]
        if all(placing.place_of(group.keys[index]) != WAITING for index in unplaced):
            self._waiting.pop(name, None)
            return []
        self._waiting[name] = None
        if not waiting:
            return []
        if now < group.retry_at:
            placing.stirred_groups[name] = None  # the next call examines it again, whether or not anything changes
            return []
        placed = [placing.node_of(key) for index, key in group.keys.items() if index not in waiting]
        if placed and not group.created:  # a node had no room after all: two groups would block each other
            group.history.pause_s = _pause(name, group.history.attempts)
            group.retry_at = now + group.history.pause_s
            placing.stirred_groups[name] = None
            return [Order(key, "release", group.demands[k]) for k, key in group.keys.items() if k not in waiting]
        chosen, feasible = self._choose(_Shape(
            tuple(group.demands[index].amounts for index in waiting), group.strategy, tuple(placed)
        ))  # fmt: skip
        if chosen is not None and not placing.fit_here(
            [group.demands[k] for k, node in zip(waiting, chosen, strict=True) if node == placing.node]
        ):
            group.history.tried(now, "NO_RESOURCES")
            return []  # enough is free, but no device is: tried again when more is free
        group.history.tried(now, "" if chosen is not None else "NO_RESOURCES" if feasible else "INFEASIBLE")
        if chosen is not None:
            return [placing.put(group.keys[k], node, now) for k, node in zip(waiting, chosen, strict=True)]
        if placed or feasible or group.warned:
            return []
        if placing.can_grow:
            group.warned = True
            return [Order(group.keys[waiting[0]], "warn", group.demands[waiting[0]])]
        refused = [Order(key, "refuse", group.demands[k]) for k, key in group.keys.items()]
        self._forget(name, self.shortage(name))
        return refused

    def _is_away(self, name: str, index: int, key: BundleKey, now: float) -> bool:
        """Whether an earlier daemon has sent a bundle to another node; note its place once a report names it."""
        if not self.is_away(key):
            return False
        for view in self._placing.views.values():
            if bundle_name(name, index) in view.total:
                self._placing.put(key, view.node, now)
                break
        return True

    def _choose(self, shape: _Shape) -> tuple[list[str] | None, bool]:
        """A node for each bundle of a shape, or None; and whether the nodes could ever hold it."""
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
        """Forget a group, and its records: they may be used again for others."""
        for key in self._groups.pop(name).keys.values():
            self._placing.forget(key)
        self._waiting.pop(name, None)
        self._placing.pending_groups.discard(name)
        self._note_gone(name, why)

    def _note_gone(self, name: str, why: str) -> None:
        self._gone[name] = why
        while len(self._gone) > _GONE_MAX:
            del self._gone[next(iter(self._gone))]  # the oldest

    def _look_whether_ready(self, name: str, group: _Group, now: float | None) -> None:
        group.ready = self._is_ready(name, group)
        if group.ready and not group.created and now is not None:
            group.history.ready(now)
        group.created = group.created or group.ready
        (self._placing.pending_groups.discard if group.ready else self._placing.pending_groups.add)(name)

    def _is_ready(self, name: str, group: _Group) -> bool:
        """Whether tasks can use all bundles where they were placed, by the last reports of their nodes."""
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
        """Whether a group is fully reserved; None when the group is unknown or removed."""
        group = self._groups.get(name)
        return None if group is None else group.ready

    def why_gone(self, name: str) -> str | None:
        """Why a group created here can never be reserved; empty: it was removed; None: it is not known to be gone."""
        return self._gone.get(name)

    def keys_of(self, name: str) -> list[BundleKey] | None:
        """The keys of a group's bundles; None when this node does not know all of them."""
        group = self._groups.get(name)
        return None if group is None or len(group.keys) < group.count else list(group.keys.values())

    def may_be_removed(self, name: str) -> bool:
        """Whether a group was made here and is not known: it was removed, or its records have not been read yet."""
        return bool(name) and name not in self._groups and is_made_on(name, self._placing.node)

    def remove(self, name: str) -> None:
        """Note that a group is removed, also one of which no bundle has been added yet."""
        if name not in self._groups:
            self._note_gone(name, self._gone.get(name, ""))

    def of_ended_jobs(self, runs: Callable[[int], bool]) -> list[str]:
        """The groups whose job has ended; `runs` says of a job's number whether it has not."""
        running = {job: runs(job) for job in {group.job for group in self._groups.values()} - {0}}
        return [name for name, group in self._groups.items() if not running.get(group.job, True)]

    def shortage(self, name: str) -> str:
        """Say what the bundles of a group need, and what the nodes have."""
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
            stats = group.history.row(group.ready)
            found.append(GroupRow(name, group.strategy, state, bundles, nodes, stats))
        return found
