"""The placement policy for tasks with demands, actors and bundles: pure state and decisions, without processes.

Callers report facts, with the time where it matters, and `decide` returns orders. This module is a cache: the tasks'
records say where each task is. A new daemon reports the facts again, and a task whose order was lost as waiting.

Order of placement: the highest priority first, then the oldest task of each demand. A task whose resources are taken
does not block other demands, unless it has been passed over `_PATIENCE` times. A task runs here if there is room, else
where the scheduling policy says: on the node that has most bytes of its arguments, else on the least used one. A node
that finishes tasks quickly gets a few more than it has room for, so that it need not wait for the next order. Actors
without demands stay here until there is one for each CPU, and are then dealt out over the nodes by their CPUs.

A decision does not look at every node: the policy keeps the other nodes in order of load. Only nodes that have changed
are looked at again for a task that found no room. Compiled with the types in placing.pxd, as `other_nodes` is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from typing import Any

from fastrt.config import RESOURCE_PARTS
from fastrt.ids import is_made_on, is_node_id
from fastrt.node.devices import Devices
from fastrt.node.keys import BundleKey, Key, Order, TaskKey, pair_of
from fastrt.node.other_nodes import OtherNodes, Search, load_of
from fastrt.node.selectors import Selectors
from fastrt.store.messages import DemandRow, NodeRow, TaskRecord
from fastrt.tasks.resources import (
    CPU,
    INSIDE,
    NOTHING,
    SPREAD,
    Demand,
    choices_of,
    device_amounts,
    given_by,
    group_of,
    lacking,
)

Bytes = dict[str, int]  # of a task's arguments, by the node that has them
_PATIENCE = 256
_ORDER_S = 3.0  # in which the uplink forwards a task; then the order counts as lost
_GRACE_S = 1.0  # before a task is reported or refused as infeasible: its node may just be joining
_order = tuple.__new__  # makes an Order in a seventh of the instructions of its own constructor
_CPU_INSIDE = CPU + INSIDE  # prefix of the names of placement groups' CPUs
# Where a task is, for `moved`; ORDERED: the uplink has the order to forward it.
GONE, WAITING, HERE, BLOCKED, ELSEWHERE, ORDERED = range(6)


class _Entry:
    def __init__(self, key: Key, demand: Demand, since: float = 0.0, priority: int = 0) -> None:
        self.key, self.demand, self.since, self.priority = key, demand, since, priority
        self.amounts, self.is_spread, self.is_bundle = demand.amounts, demand.strategy == SPREAD, bool(demand.bundle)
        self.place, self.node, self.listed = WAITING, "", False
        self.there: Any = None  # the other node that it was last sent to, as `OtherNodes.at` returns it
        self.named: Sequence[int] = ()  # the objects that its arguments name
        # How many workers of the pool it occupies: none if it is an actor, which has its own process.
        self.workers = int(isinstance(key, TaskKey))
        self.is_plain = not (self.workers or self.amounts or self.is_bundle)  # an actor without demands


class _Line:
    """Waiting tasks of one demand and priority; `choices` are the demands that are tried for each, in order."""

    def __init__(self, choices: tuple[Demand, ...]) -> None:
        self.choices = choices
        self.searches = [Search(choice.amounts) for choice in choices]
        self.tasks: deque[_Entry] = deque()
        self.passed, self.warned = 0, False


class Placing:
    """The placement decisions of one node.

    Args:
        node: its id.
        total: parts of its resources by name.
        can_grow: whether other nodes may join, so that an infeasible task may run later.
        labels: of the node.

    Attributes:
        pending_groups: placement groups created here that are not fully reserved yet: their tasks wait.
        gone_groups: groups created here whose tasks can never run, with the reason.
        node, name, total, labels: as given; `name` is set once it is known. `used`: parts in use here.
        stirred_groups: placement groups with a bundle that has moved, in order; `groups` takes them out.
        changes, growth: how often free resources have changed, and how often they may have grown.
        waiting_actors: generations of the waiting actors and bundles, by the index of their record.
        placed_actors, tasks_here: the actors and bundles that do not wait; how many tasks are admitted here.
        followed: whose moves the caller shall report by `moved` from now on (True), and not any more (False).
        unopened: bundles placed here that tasks cannot use yet, with what they reserve; see `open`.
        held: sizes of large objects that other nodes have copies of, by object number and node.
        devices: those of the node.
        relief: parts of a CPU by which the tasks here take less than one CPU each: the node needs more workers.
    """

    def __init__(
        self, node: str, total: Mapping[str, int], can_grow: bool, labels: Mapping[str, str] | None = None
    ) -> None:
        self.node, self.name = node, ""
        self.total, self.labels = dict(total), dict(labels or {})
        self.used, self.relief = dict.fromkeys(total, 0), 0
        self.devices = Devices(total)
        self._has_devices = self.devices.count > 0
        self.can_grow, self.has_uplink = can_grow, False
        self._others = OtherNodes(node)
        self._entries: dict[Key, _Entry] = {}
        self._placed: dict[_Entry, Key] = {}  # all that do not wait
        self.placed_actors: dict[_Entry, Key] = {}
        self.followed: dict[Key, bool] = {}
        self._ordered: list[_Entry] = []  # also some that are not any more
        self._lines: dict[tuple[Demand, int], _Line] = {}
        self._gone_groups: set[str] = set()
        self.pending_groups: set[str] = set()
        self.gone_groups: dict[str, str] = {}
        self.stirred_groups: dict[str, None] = {}
        self.changes = self.growth = self.tasks_here = 0
        self.waiting_actors: dict[int, int] = {}
        self.unopened: dict[Key, Demand] = {}
        self.held: dict[int, dict[str, int]] = {}
        self._selectors = Selectors(self.total, self.used, self.labels)
        self._spread_here = 0  # tasks and actors with the strategy "spread" that are here
        self._plain_here = 0  # actors without demands that are here

    @property
    def views(self) -> Mapping[str, NodeRow]:
        """The other nodes' reports, by node."""
        return self._others.views

    # ---- facts ----

    def wait(self, key: Key, demand: Demand, now: float, named: Sequence[int] = (), priority: int = 0) -> None:
        """Take a task that waits to be admitted, new or returned; `named` are the objects that its arguments name."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(key, demand, now, priority)
        elif entry.place != WAITING:
            self._leave(entry, WAITING)
        if not entry.workers:
            self.waiting_actors.update([pair_of(key)])
        entry.since, entry.named = now, named or entry.named
        if entry.is_bundle:  # bundles are placed together, by `groups`
            self._learn(demand)
        elif not entry.listed:
            entry.listed = True
            line = self._lines.get((demand, entry.priority))
            if line is None:
                self._learn(demand)
                line = self._lines[demand, entry.priority] = _Line(choices_of(demand))
            line.tasks.append(entry)

    def put(self, key: Key, node: str, now: float) -> Order:
        """Place a waiting task on a node without a check of its resources: the caller has checked them."""
        return self._send(self._entries[key], node, now)

    def leave(self, key: Key) -> None:
        """Let a task wait again that has given up its resources here."""
        self._leave(self._entries[key], WAITING)

    def forget(self, key: Key) -> None:
        """Drop a waiting task that will never be placed."""
        self.moved(key, GONE, 0.0)

    def node_of(self, key: Key) -> str:
        """The node that a task was placed on; empty: none."""
        entry = self._entries.get(key)
        return "" if entry is None or entry.place in (WAITING, GONE) else entry.node

    def rooms(self, whole: bool = False) -> dict[str, dict[str, int]]:
        """Free amounts on each node that runs something, this one first; with `whole` the node's total amounts.

        Amounts reserved by placement groups are left out: bundles are not reserved from them.
        """
        found = {}
        if self.total:
            found[self.node] = {n: parts if whole else self._free(n) for n, parts in _plain(self.total)}
        for view in self.views.values() if self.has_uplink else ():
            if view.total:
                free = self._others.free
                found[view.node] = {n: parts if whole else free(view.node, n) for n, parts in _plain(view.total)}
        return found

    def found(self, key: Key, demand: Demand, devices: int = 0) -> None:
        """Take a task that an earlier daemon has admitted here, with the bits of its devices."""
        if key not in self._entries:
            self._learn(demand)
            self._entries[key] = entry = _Entry(key, demand)
            self._enter(entry, HERE, devices)
            self.open(key)

    def keep(self, key: Key) -> bool:
        """Place an actor without demands here if it belongs here; return whether it is here."""
        if key not in self._entries and self._deal() == self.node:
            self.found(key, NOTHING)
        return self.place_of(key) == HERE

    def open(self, key: Key) -> None:
        """Let tasks use a bundle that is placed here: tasks that ran on its CPUs before have ended."""
        demand = self.unopened.pop(key, None)
        if demand is not None:
            self._give(demand, 1)
            self._stir(self._entries[key])

    def moved(self, key: Key, place: int, now: float) -> None:
        """Update where a task is: GONE, WAITING, HERE, BLOCKED (here, asleep in a get) or ELSEWHERE."""
        entry = self._entries.pop(key, None) if place == GONE else self._entries.get(key)
        if entry is None or place == entry.place:
            return
        if place == GONE:
            if entry.place == ELSEWHERE:
                self._others.ended(entry.there, now)
            self._leave(entry, GONE)
            self._stop_waiting(entry)
        elif place == WAITING:  # `wait` reports it, unless its order was lost
            if entry.place == ORDERED and now - entry.since > _ORDER_S:
                self.wait(key, entry.demand, now)
        elif place == ELSEWHERE:
            if entry.place == ORDERED:
                entry.place = ELSEWHERE
            else:
                self._leave(entry, WAITING)  # the uplink took it from the queue, and will return it
        else:
            devices = self.devices.of(key)
            self._leave(entry, WAITING)
            self._enter(entry, place, devices)

    def see(self, views: Iterable[NodeRow], left: Iterable[str] | None = None) -> None:
        """Take reports of other nodes.

        Args:
            views: those of all other nodes, or of those whose reports have changed.
            left: nodes that have left; the others are as before. None: there are only those in `views`.
        """
        views = list(views)
        for view in views:
            self._selectors.mark(view)
        self._others.see(views, left)
        self.changes += 1
        self.growth += 1
        for entry in self.placed_actors:
            if entry.place in (ORDERED, ELSEWHERE):
                self._stir(entry)
        if left == [] and not [view for view in views if not view.total]:
            return
        for entry in self.ordered():
            if entry.node not in self.views or not self.views[entry.node].total:  # it has left, or is about to
                self.wait(entry.key, entry.demand, entry.since)
        self._others.drop_gone({entry.node for entry in self._placed})  # some take no resources there

    def holds(self, node: str, objref: int, nbytes: int) -> None:
        """Record that another node has a copy of an object of this node; with 0 bytes: no longer."""
        there = self.held.setdefault(objref, {})
        if nbytes:
            there[node] = nbytes
        else:
            there.pop(node, None)
        if not there:
            del self.held[objref]

    def linger(self, held: Iterable[tuple[int, int]]) -> None:
        """Take the (devices, parts) of processes that have not ended, but whose task or actor has."""
        if self.devices.linger(held):
            self.changes += 1
            self.growth += 1

    def ordered(self) -> list[_Entry]:
        """All that the uplink has the order to forward and has not forwarded: an order can be lost."""
        self._ordered = [entry for entry in self._ordered if entry.place == ORDERED]
        return self._ordered

    def fit_here(self, demands: Sequence[Demand]) -> bool:
        """Whether bundles together find devices here."""
        taken: list[Key] = []
        for k, demand in enumerate(demands):
            devices = self.devices.choose(demand)
            if devices is None:
                break
            taken.append(BundleKey(-1 - k, 0))
            self.devices.take(taken[-1], demand, devices)
        for key in taken:
            self.devices.give(key)
        return len(taken) == len(demands)

    def placed(self) -> list[Key]:
        """The tasks, actors and bundles that do not wait."""
        return list(self._placed.values())

    def demand(self) -> list[DemandRow]:
        """The tasks and actors that wait, by what they wait for; the largest numbers first.

        Bundles, and tasks inside a placement group, are not among them: the group waits for them.
        """
        counts = Counter(
            (isinstance(entry.key, TaskKey), entry.demand)
            for line in self._lines.values()
            for entry in line.tasks
            if entry.place == WAITING
        )
        return [
            DemandRow(
                *("task" if is_task else "actor", dict(demand.amounts), demand.strategy, demand.node, demand.soft),
                *(count, self._feasible(demand)),
            )
            for (is_task, demand), count in counts.most_common()
            if not demand.bundle and not group_of(demand)
        ]

    def waiting(self) -> list[Key]:
        """Tasks that wait here; some may have ended meanwhile."""
        return [key for key, entry in self._entries.items() if entry.place == WAITING]

    def only_here(self, most: int) -> list[TaskRecord]:
        """The next tasks that wait for resources of this node and can run on no other one: at most `most`."""
        found: list[TaskRecord] = []
        for (demand, _), line in sorted(self._lines.items(), key=_rank) if self.views else ():
            only = demand.node and not demand.soft
            elsewhere = self._named(demand.node) != self.node if only else self._others.able(demand.amounts)
            if len(found) < most and not elsewhere and self._able(self.total, demand):
                entries = [entry for entry in islice(line.tasks, most) if entry.place == WAITING]
                found += [TaskRecord(*pair_of(entry.key)) for entry in entries if isinstance(entry.key, TaskKey)]
        return found[:most]

    @property
    def is_looking(self) -> bool:
        """Whether something waits that other nodes may have resources for; right after `decide`."""
        return bool(self._lines or self.waiting_actors)

    def place_of(self, key: Key) -> int:
        """Where a task, actor or bundle is by the last report."""
        entry = self._entries.get(key)
        return GONE if entry is None else entry.place

    def take_gone_groups(self) -> set[str]:
        """Placement groups that have given up resources here since the last call."""
        gone, self._gone_groups = self._gone_groups, set()
        return gone

    # ---- decisions ----

    def decide(self, now: float) -> list[Order]:
        """Place all tasks that can be placed now."""
        orders: list[Order] = []
        short: set[str] = set()  # resources kept for demands that were passed over too often
        passed: list[tuple[_Line, int]] = []
        for (demand, priority), line in sorted(self._lines.items(), key=_rank):
            count = len(orders)
            group = group_of(demand)
            if group in self.gone_groups:
                orders += self._hopeless(demand, priority, line, now)
                continue
            if group in self.pending_groups:
                continue
            while line.tasks:
                entry = line.tasks[0]
                if entry.place != WAITING:
                    line.tasks.popleft().listed = False
                    continue
                node = self._place(line, short, now, self._near(entry) if self.held else {}, bool(entry.workers))
                if node is None:
                    break
                line.tasks.popleft().listed = False
                orders.append(self._send(entry, node, now))
            if not line.tasks:
                self._drop_line(demand, priority)
            elif not self._feasible(demand):
                orders += self._hopeless(demand, priority, line, now)
            else:
                line.passed = line.passed if len(orders) == count else 0
                passed.append((line, len(orders)))
                if line.passed > _PATIENCE:
                    short |= {name for name, parts in demand.amounts if self._free(name) < parts}
                    if self.devices.choose(demand) is None:  # enough is free, but no device is
                        short |= {name for name, _ in device_amounts(demand.amounts)}
        for line, count in passed:
            line.passed += len([order for order in orders[count:] if order.what == "admit"])
        return orders

    def shortage(self, demand: Demand) -> str:
        """Say what a demand asks for that no node has, and what the nodes have."""
        there = [(self.name or "this node", self.total), *((view.name, view.total) for view in self.views.values())]
        return lacking(demand, there)

    def _free(self, name: str) -> int:
        return self.total.get(name, 0) - self.used.get(name, 0)

    def _near(self, entry: _Entry) -> Bytes:
        """Bytes of a task's arguments by the node that has them."""
        found: Counter[str] = Counter()
        for objref in entry.named:
            found.update(self.held.get(objref, {}))
        if found:
            found[self.node] = max(found.values())  # this node has all of them
        return dict(found)

    def _drop_line(self, demand: Demand, priority: int) -> None:
        for search in self._lines.pop((demand, priority)).searches:
            self._others.stop_search(search)

    def _place(self, line: _Line, short: set[str], now: float, near: Bytes, ahead: bool) -> str | None:
        """The node for a task now, by its first selector that finds one; `near` are the arguments' bytes by node."""
        for k, choice in enumerate(line.choices):  # no actor goes `ahead`: that room may go to one that lives long
            node = self._place_by(choice, line.searches[k] if ahead else None, short, now, near)
            if node is not None:
                return node
        return None

    def _place_by(self, demand: Demand, search: Search | None, short: set[str], now: float, near: Bytes) -> str | None:
        fits = bool(self.total)  # else this node runs nothing
        for name, parts in demand.amounts if fits else ():
            fits = fits and self._free(name) >= parts and name not in short
        fits = fits and (not self._has_devices or self.devices.choose(demand) is not None)
        if demand.node:
            node = self._named(demand.node)
            if node == self.node and self._could(self.total, demand):
                return node if fits else None
            if node is not None and node in self.views and self._could(self.views[node].total, demand):
                return node if self.has_uplink and self._others.room(node, demand.amounts, now) else None
            if not demand.soft:
                return None
        if demand.strategy == SPREAD:
            return self._spread(demand, fits, near)
        if search is None and demand[:2] == NOTHING[:2]:
            return self._deal()
        if fits:
            return self.node
        if not self.has_uplink:
            return None
        if near:
            near.pop(self.node, None)
        return self._others.choose(demand, near) or (self._others.soon(search, near, now) if search else None)

    def _spread(self, demand: Demand, fits: bool, near: Bytes) -> str | None:
        """The least used node with room; of equally used ones the one with most bytes of the arguments."""
        here = load_of(self.total.get(CPU, 0), self._free(CPU), self._spread_here, 0) if fits else None
        best = self._others.least_used(demand.amounts, near, here) if self.has_uplink else None
        return best or (self.node if fits else None)

    def _deal(self) -> str | None:
        """The node for an actor without demands: here until each CPU has one, then where the fewest are for each."""
        cpus, count = self.total.get(CPU, 0), self._plain_here
        if count * RESOURCE_PARTS < cpus:
            return self.node
        best = self._others.fewest_plain((count + 1) / cpus if cpus else inf)
        if best is None or (cpus and not self.has_uplink):
            return self.node if self.total else None
        return best if self.has_uplink else None

    def _named(self, node: str) -> str | None:
        """The id of a node, given its id or name."""
        return self.node if node in (self.node, self.name) else self._others.named(node)

    def _feasible(self, demand: Demand) -> bool:
        """Whether any node that has joined could ever run a task with this demand."""
        if demand.node and not demand.soft:
            only = self._named(demand.node)
            return only is not None and self._able(self.total if only == self.node else self.views[only].total, demand)
        return self._able(self.total, demand) or self._others.able(demand.amounts)

    @classmethod
    def _able(cls, total: Mapping[str, int], demand: Demand) -> bool:
        """Whether a node with these resources runs something, and could run the task if it were idle."""
        return bool(total) and cls._could(total, demand)

    @staticmethod
    def _could(total: Mapping[str, int], demand: Demand) -> bool:
        return all(total.get(name, 0) >= parts for name, parts in demand.amounts)

    def _hopeless(self, demand: Demand, priority: int, line: _Line, now: float) -> list[Order]:
        waiting = [entry for entry in line.tasks if entry.place == WAITING]
        group = group_of(demand)
        is_gone, only = group in self.gone_groups, "" if demand.soft else demand.node
        stays = group and not is_gone and only == self.node  # another node has sent it here
        never = stays or (only and not group and (self._named(only) or is_node_id(only)))  # none other has its place
        unsure = (group or never) and any(now - entry.since < _GRACE_S for entry in waiting)  # may not be known yet
        ours = group and is_made_on(group, self.node)  # the caller looks whether it was removed, again and again
        if is_gone or ((never or not (self.can_grow or ours)) and not unsure):
            for entry in waiting:
                self.forget(entry.key)
            self._drop_line(demand, priority)
            return [Order(entry.key, "return" if stays else "refuse", demand) for entry in waiting]
        if group and not stays and not ours:
            return [Order(entry.key, "ask", demand) for entry in waiting if now - entry.since > _GRACE_S]
        if not (self.can_grow or ours) or line.warned or not waiting or now - waiting[0].since < _GRACE_S:
            return []
        line.warned = not group
        return [Order(waiting[0].key, "warn", demand)]

    def _learn(self, demand: Demand) -> None:
        """Give the resources that stand for the selectors of a demand to the nodes that match them."""
        if changed := self._selectors.learn(demand, self.views.values(), self._demands):
            self._others.see(changed, [])

    def _demands(self) -> Iterable[Demand]:
        """The demands of known tasks, actors and bundles."""
        return {entry.demand for entry in self._entries.values()} | {demand for demand, _ in self._lines}

    # ---- keeping count ----

    def _send(self, entry: _Entry, node: str, now: float) -> Order:
        if node == self.node:
            devices = self.devices.choose(entry.demand) or 0
            self._enter(entry, HERE, devices)
            return _order(Order, (entry.key, "admit", entry.demand, "", devices))
        self.changes += 1
        entry.place, entry.node, entry.since = ORDERED, node, now
        self._keep(entry)
        self._ordered.append(entry)
        self._stop_waiting(entry)
        self._stir(entry)
        entry.there = self._others.at(node)
        self._others.charge(entry.there, entry.amounts, 1, entry.is_spread, entry.is_plain)
        return _order(Order, (entry.key, "forward", entry.demand, node, 0))

    def _enter(self, entry: _Entry, place: int, devices: int) -> None:
        self.changes += 1
        if devices:
            self.devices.take(entry.key, entry.demand, devices)
        entry.place, entry.node = place, self.node
        self._keep(entry)
        self.tasks_here += entry.workers
        self._spread_here += entry.is_spread
        self._plain_here += entry.is_plain
        self._count(entry, 1)
        self._stop_waiting(entry)
        if entry.is_bundle:
            self.unopened[entry.key] = entry.demand
            self._stir(entry)

    def _leave(self, entry: _Entry, place: int) -> None:
        if entry.place != WAITING:
            self.changes += 1
            self.growth += 1
            del self._placed[entry]
            self.placed_actors.pop(entry, None)
            self.followed[entry.key] = False
        if entry.place in (ORDERED, ELSEWHERE):
            self._others.charge(entry.there, entry.amounts, -1, entry.is_spread, entry.is_plain)
        elif entry.place != WAITING:
            self._spread_here -= entry.is_spread
            self._plain_here -= entry.is_plain
            self.tasks_here -= entry.workers
            if self.unopened.pop(entry.key, None) is None:
                self._give(entry.demand, -1)
            self._count(entry, -1)
        if self._has_devices:
            self.devices.give(entry.key)
        entry.place = place
        self._stir(entry)

    def _keep(self, entry: _Entry) -> None:
        self._placed[entry] = entry.key
        self.followed[entry.key] = True
        if not entry.workers:
            self.placed_actors[entry] = entry.key

    def _stir(self, entry: _Entry) -> None:
        if entry.is_bundle:
            self.stirred_groups[entry.demand.bundle_group] = None

    def _stop_waiting(self, entry: _Entry) -> None:
        if not entry.workers and pair_of(entry.key) in self.waiting_actors.items():
            del self.waiting_actors[entry.key.record]

    def _give(self, demand: Demand, sign: int) -> None:
        """Add a bundle's reserved amounts to this node's totals (sign=1) or remove them (-1)."""
        if demand.bundle and sign < 0:
            self._gone_groups.add(demand.bundle_group)
        for name, parts in given_by(demand):
            self.total[name] = self.total.get(name, 0) + sign * parts
            if not self.total[name]:
                del self.total[name]

    def _count(self, entry: _Entry, sign: int) -> None:
        """Add a task's amounts to those in use here (sign=1), or subtract them (-1).

        The CPUs of a task that sleeps in a get are free for other tasks meanwhile: those of the node, or of its group.
        """
        if entry.place not in (HERE, BLOCKED):
            return
        cpu = 0
        for name, parts in entry.amounts:
            if name == CPU:
                cpu = parts
            if entry.place == HERE or not (name == CPU or name.startswith(_CPU_INSIDE)):
                self.used[name] = self.used.get(name, 0) + sign * parts
        if entry.place == HERE:
            self.relief += sign * (RESOURCE_PARTS * entry.workers - cpu)


def _plain(total: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Amounts that are not inside a placement group."""
    return (item for item in total.items() if INSIDE not in item[0])


def _rank(item: tuple[tuple[Demand, int], _Line]) -> tuple[int, float]:
    (_, priority), line = item
    return -priority, line.tasks[0].since if line.tasks else 0.0
