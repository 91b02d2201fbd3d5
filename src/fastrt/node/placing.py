"""Where tasks with demands run: what this node has and who uses it, what other nodes are said to have, and who waits.

Pure: facts come in by calls, with the time where it matters, and `decide` gives orders. Nothing here is the truth.
What a task uses follows from where its record says that it is, so whoever starts anew tells the facts again; and an
order that is lost is given again, because the task is still said to wait.

Order: the highest priority first, then the oldest task of each kind of demand; one whose resources are taken does not
keep others from theirs, unless it has been passed over `_PATIENCE` times. Here if there is room, else on the node that
has most bytes of its arguments, and of those with as many on the one with most room. A node that works off quickly what
it gets is given a little more than it has room for, so that it need not wait for the next task.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastrt.config import RESOURCE_PARTS
from fastrt.node.keys import Key, TaskKey
from fastrt.store.messages import NodeRow
from fastrt.tasks.resources import CPU, INSIDE, PACK, SPREAD, Demand, given_by, group_of, in_words

_PATIENCE = 256
_ORDER_S = 3.0  # in which the uplink lends what it was told to
_GRACE_S = 1.0  # before anybody is told that a task cannot run: its node may just be joining
_RECENT_S = 0.5  # tasks that have ended within this time show how quickly a node works;
_AHEAD = 25  # one of so many is what it works off while the next order is on its way
_CPU_INSIDE = CPU + INSIDE  # how the names of a placement group's CPUs begin
# Where a task is, as `moved` is told.
GONE, WAITING, HERE, BLOCKED, ELSEWHERE = range(5)
ORDERED = 5  # told to the uplink


class Order(NamedTuple):
    """What is to be done with a task.

    Attributes:
        key: which.
        what: "admit" here, "forward" to `node`, "refuse" (it can never run), or "warn" (it cannot run as things are).
    """

    key: Key
    what: str
    demand: Demand
    node: str = ""


@dataclass
class _Entry:
    key: Key
    demand: Demand
    place: int = WAITING
    node: str = ""
    since: float = 0.0
    listed: bool = False
    named: Sequence[int] = ()  # large objects, and others, that its arguments name
    priority: int = 0

    @property
    def workers(self) -> int:
        """How many workers of the pool it occupies: an actor has a process of its own."""
        return int(isinstance(self.key, TaskKey))


@dataclass
class _Line:
    """Tasks of one demand and priority that wait."""

    tasks: deque[_Entry] = field(default_factory=deque)
    passed: int = 0
    warned: bool = False


class _Elsewhere:
    """Another node, and what this one has there."""

    def __init__(self) -> None:
        self.mine: dict[str, int] = {}
        self.others: dict[str, int] = {}
        self.ended: deque[float] = deque()
        self.told: Mapping[str, int] | None = None

    def see(self, view: NodeRow) -> None:
        """What is in use there and not by us is by others, and stays so until the next report."""
        if view.free == self.told:
            return  # it is another node that has news
        self.told = view.free
        for name, total in view.total.items():
            self.others[name] = max(0, total - view.free.get(name, 0) - self.mine.get(name, 0))

    def free(self, view: NodeRow, name: str) -> int:
        return view.total.get(name, 0) - self.others.get(name, 0) - self.mine.get(name, 0)

    def ahead(self, now: float) -> int:
        while self.ended and now - self.ended[0] > _RECENT_S:
            self.ended.popleft()
        return -(-len(self.ended) // _AHEAD)


class Placing:
    """This node's part.

    Args:
        node: its id.
        total: parts of its resources by name.
        can_grow: whether other nodes may join, so that what cannot run now may run later.

    Attributes:
        pending_groups: placement groups made here whose tasks wait until all that is reserved for them is there.
        gone_groups: those made here whose tasks never can run, with the reason.
        node, name, total: as given; `name` is set once it is known.
        used: parts in use here.
        stirred_groups: placement groups of which a bundle has changed its place, in order; `groups` takes them out.
        changes, growth: counts of how often what is free has changed, and how often there may have become more of it.
        waiting_actors: generations by index of the actors and bundles that wait.
        unopened: bundles placed here that tasks cannot use yet, with what they reserve; see `open`.
        held: bytes of large objects, by number and by the other node that has them, too.
        relief: by how many parts of a CPU the tasks here take less than one each: they need further workers.
    """

    def __init__(self, node: str, total: Mapping[str, int], can_grow: bool) -> None:
        self.node = node
        self.name = ""
        self.total = dict(total)
        self.used = dict.fromkeys(total, 0)
        self.relief = 0
        self.can_grow = can_grow
        self.has_uplink = False
        self.views: dict[str, NodeRow] = {}
        self._elsewhere: dict[str, _Elsewhere] = {}
        self._entries: dict[Key, _Entry] = {}
        self._placed: dict[Key, _Entry] = {}  # those that do not wait
        self._lines: dict[tuple[Demand, int], _Line] = {}
        self._turn = 0
        self._gone_groups: set[str] = set()
        self.pending_groups: set[str] = set()
        self.gone_groups: dict[str, str] = {}
        self.stirred_groups: dict[str, None] = {}
        self.changes = self.growth = 0
        self.waiting_actors: dict[int, int] = {}
        self.unopened: dict[Key, Demand] = {}
        self.held: dict[int, dict[str, int]] = {}
        self._spread_to: Counter[str] = Counter()  # tasks and actors that are spread, by where they are

    # ---- facts ----

    def wait(self, key: Key, demand: Demand, now: float, named: Sequence[int] = (), priority: int = 0) -> None:
        """A task waits to be admitted: a new one, or one that is back; `named` are objects that its arguments name."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(key, demand, since=now, priority=priority)
        elif entry.place != WAITING:
            self._leave(entry, WAITING)
        if not isinstance(key, TaskKey):
            self.waiting_actors[key.index] = key.gen
        entry.since = now
        entry.named = named or entry.named
        if not entry.listed and not demand.bundle:  # bundles are placed together, by `groups`
            entry.listed = True
            self._lines.setdefault((demand, entry.priority), _Line()).tasks.append(entry)

    def put(self, key: Key, node: str, now: float) -> Order:
        """Place one that waits there, whatever is free: somebody has looked."""
        return self._send(self._entries[key], node, now)

    def leave(self, key: Key) -> None:
        """Let one wait again that has given up what it had here."""
        self._leave(self._entries[key], WAITING)

    def forget(self, key: Key) -> None:
        """One that waits will never be placed."""
        self._entries.pop(key, None)
        self._wait_no_more(key)

    def node_of(self, key: Key) -> str:
        """The node that one was placed on; empty: none."""
        entry = self._entries.get(key)
        return "" if entry is None or entry.place in (WAITING, GONE) else entry.node

    def rooms(self, whole: bool = False) -> dict[str, dict[str, int]]:
        """Free amounts on each node that has workers, this one first; with `whole` all that the node has.

        The amounts that placement groups have are left out: nothing is reserved from those.
        """
        found = {}
        if self.total.get(CPU):
            found[self.node] = {n: parts if whole else self._free(n) for n, parts in _plain(self.total)}
        for view in self.views.values() if self.has_uplink else ():
            there = self._elsewhere[view.node]
            if view.total.get(CPU):
                found[view.node] = {n: parts if whole else there.free(view, n) for n, parts in _plain(view.total)}
        return found

    def found(self, key: Key, demand: Demand) -> None:
        """A task was admitted here already, by one who has died."""
        if key not in self._entries:
            self._entries[key] = entry = _Entry(key, demand)
            self._enter(entry, HERE)
            self.open(key)

    def open(self, key: Key) -> None:
        """Let tasks use a bundle that is placed here: the tasks that ran on its CPUs before have ended."""
        demand = self.unopened.pop(key, None)
        if demand is not None:
            self._give(demand, 1)
            self._stir(demand)

    def moved(self, key: Key, place: int, now: float) -> None:
        """Where a task is that was placed: GONE, WAITING, HERE, BLOCKED (here, asleep in a get) or ELSEWHERE."""
        entry = self._entries.get(key)
        if entry is None or place == entry.place:
            return
        if place == GONE:
            if entry.place == ELSEWHERE:
                self._elsewhere[entry.node].ended.append(now)
            self._leave(entry, GONE)
            del self._entries[key]
            self._wait_no_more(key)
        elif entry.place == ORDERED and place == WAITING:
            if now - entry.since > _ORDER_S:
                self.wait(key, entry.demand, now)
        elif place == WAITING:
            return  # it comes by `wait`
        elif place == ELSEWHERE:
            if entry.place == ORDERED:
                entry.place = ELSEWHERE
            else:
                self._leave(entry, WAITING)  # the uplink took it from the queue; it gives it back
        else:
            self._leave(entry, WAITING)
            self._enter(entry, place)

    def see(self, views: Iterable[NodeRow]) -> None:
        """The other nodes, as they are now."""
        self.views = {view.node: view for view in views}
        self.changes += 1
        self.growth += 1
        for entry in self._placed.values():
            if entry.place in (ORDERED, ELSEWHERE):
                self._stir(entry.demand)
        for view in self.views.values():
            self._elsewhere.setdefault(view.node, _Elsewhere()).see(view)
        for entry in [entry for entry in self._placed.values() if entry.place == ORDERED]:
            if entry.node not in self.views:
                self.wait(entry.key, entry.demand, entry.since)
        used = {entry.node for entry in self._placed.values()}  # also by what takes nothing there
        for node in [node for node in self._elsewhere if node not in self.views and node not in used]:
            del self._elsewhere[node]

    def holds(self, node: str, objref: int, nbytes: int) -> None:
        """Another node has the value of an object of this node's, too; with 0 bytes: not any more."""
        there = self.held.setdefault(objref, {})
        if nbytes:
            there[node] = nbytes
        else:
            there.pop(node, None)
        if not there:
            del self.held[objref]

    def placed(self) -> list[Key]:
        """Tasks of which `moved` should be told."""
        return list(self._placed)

    def waiting(self) -> list[Key]:
        """Tasks that wait here; some may have ended otherwise."""
        return [key for key, entry in self._entries.items() if entry.place == WAITING]

    def here(self) -> int:
        """How many tasks are admitted here."""
        return sum(entry.place in (HERE, BLOCKED) and entry.workers for entry in self._placed.values())

    def place_of(self, key: Key) -> int:
        """Where a task or an actor is, as far as this is known."""
        entry = self._entries.get(key)
        return GONE if entry is None else entry.place

    def take_gone_groups(self) -> set[str]:
        """Placement groups that have given something up here since this was last asked."""
        gone, self._gone_groups = self._gone_groups, set()
        return gone

    # ---- decisions ----

    def decide(self, now: float) -> list[Order]:
        """Place what can be placed."""
        orders: list[Order] = []
        short: set[str] = set()  # resources that are kept for those who were passed over too often
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
                if entry.place != WAITING or entry.key not in self._entries:
                    line.tasks.popleft().listed = False
                    continue
                node = self._place(demand, short, now, self._near(entry))
                if node is None:
                    break
                line.tasks.popleft().listed = False
                orders.append(self._send(entry, node, now))
            if not line.tasks:
                del self._lines[demand, priority]
            elif not self._feasible(demand):
                orders += self._hopeless(demand, priority, line, now)
            else:
                line.passed = line.passed if len(orders) == count else 0
                passed.append((line, len(orders)))
                if line.passed > _PATIENCE:
                    short |= {name for name, parts in demand.amounts if self._free(name) < parts}
        for line, count in passed:
            line.passed += sum(order.what == "admit" for order in orders[count:])
        return orders

    def shortage(self, demand: Demand) -> str:
        """What there is, beside a demand that nobody can meet."""
        there = [(self.name or "this node", self.total), *((view.name, view.total) for view in self.views.values())]
        nodes = "; ".join(f"{name}: {in_words(total)}" for name, total in there)
        wanted = in_words(dict(demand.amounts)) + (f" on node {demand.node!r}" if demand.node else "")
        return f"{wanted}, which no node has ({nodes})"

    def _free(self, name: str) -> int:
        return self.total.get(name, 0) - self.used.get(name, 0)

    def _near(self, entry: _Entry) -> Counter[str]:
        """How many bytes of a task's arguments other nodes have."""
        found: Counter[str] = Counter()
        for objref in entry.named if self.held else ():
            found.update(self.held.get(objref, {}))
        if found:
            found[self.node] = max(found.values())  # all are here
        return found

    def _place(self, demand: Demand, short: set[str], now: float, near: Counter[str]) -> str | None:
        """The node that a task should run on now; `near` are bytes of its arguments there."""
        fits = all(self._free(name) >= parts and name not in short for name, parts in demand.amounts)
        if not self.total.get(CPU):
            fits = False  # nobody works here
        if demand.node:
            node = self._named(demand.node)
            if node == self.node and self._could(self.total, demand):
                return node if fits else None
            if node in self.views and self._could(self.views[node].total, demand):
                return node if self._room(self.views[node], demand, now) else None
            if not demand.soft:
                return None
        if demand.strategy == SPREAD:
            return self._spread(demand, fits, near)
        if fits:
            return self.node
        able = {view.node: self._elsewhere[view.node].free(view, CPU) for view in self._others(demand)}
        if able and demand.strategy == PACK:
            return min(able, key=lambda node: (able[node], -near[node]))
        if able:
            return max(able, key=lambda node: (near[node], able[node]))
        soon = [view.node for view in self.views.values() if self._room(view, demand, now)]
        return max(soon, key=lambda node: near[node], default=None)

    def _others(self, demand: Demand) -> list[NodeRow]:
        """The other nodes that have room for a task now."""
        return [view for view in self.views.values() if self._has(view, demand)]

    def _spread(self, demand: Demand, fits: bool, near: Counter[str]) -> str | None:
        """The node that is used least among those with room; of equal ones the nearest, or each in its turn."""
        able = [view.node for view in self._others(demand)] + [self.node] * fits
        if not able:
            return None
        self._turn += 1
        turn = self._turn
        return min(
            able,
            key=lambda node: (self._busy(node), self._spread_to[node], -near[node], (sum(node.encode()) + turn) % 7),
        )

    def _busy(self, node: str) -> float:
        """How much of a node's CPUs is in use."""
        if node == self.node:
            return self.used.get(CPU, 0) / max(1, self.total.get(CPU, 0))
        view = self.views[node]
        total = view.total.get(CPU, 0)
        return (total - self._elsewhere[node].free(view, CPU)) / max(1, total)

    def _has(self, view: NodeRow, demand: Demand) -> bool:
        """Whether another node has room for a task now."""
        there = self._elsewhere[view.node]
        return (
            self.has_uplink
            and bool(view.total.get(CPU))
            and all(there.free(view, name) >= parts for name, parts in demand.amounts)
        )

    def _room(self, view: NodeRow, demand: Demand, now: float) -> bool:
        """Whether another node should get a task now: it has room, or will soon."""
        if self._has(view, demand):
            return True
        if not self.has_uplink or not view.total.get(CPU) or not self._could(view.total, demand):
            return False
        there = self._elsewhere[view.node]
        ahead = there.ahead(now)
        return ahead > 0 and all(there.free(view, name) >= parts * (1 - ahead) for name, parts in demand.amounts)

    def _named(self, node: str) -> str | None:
        """The id of a node that somebody calls by its id or name."""
        if node in (self.node, self.name):
            return self.node
        return next((view.node for view in self.views.values() if node in (view.node, view.name)), None)

    def _feasible(self, demand: Demand) -> bool:
        """Whether any node that is there could ever run it."""
        totals = {self.node: self.total, **{view.node: view.total for view in self.views.values()}}
        if demand.node and not demand.soft:
            totals = {node: total for node, total in totals.items() if node == self._named(demand.node)}
        return any(total.get(CPU) and self._could(total, demand) for total in totals.values())

    @staticmethod
    def _could(total: Mapping[str, int], demand: Demand) -> bool:
        return all(total.get(name, 0) >= parts for name, parts in demand.amounts)

    def _hopeless(self, demand: Demand, priority: int, line: _Line, now: float) -> list[Order]:
        waiting = [entry for entry in line.tasks if entry.place == WAITING]
        group = group_of(demand)
        soon = group and any(now - entry.since < _GRACE_S for entry in waiting)  # perhaps it is not known here yet
        if group in self.gone_groups or (not self.can_grow and not soon):
            for entry in waiting:
                self.forget(entry.key)
            del self._lines[demand, priority]
            return [Order(entry.key, "refuse", demand) for entry in waiting]
        if not self.can_grow or line.warned or not waiting or now - waiting[0].since < _GRACE_S:
            return []
        line.warned = True
        return [Order(waiting[0].key, "warn", demand)]

    # ---- keeping count ----

    def _send(self, entry: _Entry, node: str, now: float) -> Order:
        if node == self.node:
            self._enter(entry, HERE)
            return Order(entry.key, "admit", entry.demand)
        self.changes += 1
        entry.place, entry.node, entry.since = ORDERED, node, now
        self._placed[entry.key] = entry
        self._wait_no_more(entry.key)
        self._stir(entry.demand)
        self._spread_to[node] += entry.demand.strategy == SPREAD
        mine = self._elsewhere[node].mine
        for name, parts in entry.demand.amounts:
            mine[name] = mine.get(name, 0) + parts
        return Order(entry.key, "forward", entry.demand, node)

    def _enter(self, entry: _Entry, place: int) -> None:
        self.changes += 1
        entry.place, entry.node = place, self.node
        self._placed[entry.key] = entry
        self._spread_to[self.node] += entry.demand.strategy == SPREAD
        self._count(entry, 1)
        self._wait_no_more(entry.key)
        if entry.demand.bundle:
            self.unopened[entry.key] = entry.demand
            self._stir(entry.demand)

    def _leave(self, entry: _Entry, place: int) -> None:
        if entry.place != WAITING:
            self.changes += 1
            self.growth += 1
            self._spread_to[entry.node] -= entry.demand.strategy == SPREAD
        if entry.place in (ORDERED, ELSEWHERE):
            mine = self._elsewhere[entry.node].mine
            for name, parts in entry.demand.amounts:
                mine[name] -= parts
        else:
            if entry.place in (HERE, BLOCKED) and self.unopened.pop(entry.key, None) is None:
                self._give(entry.demand, -1)
            self._count(entry, -1)
        entry.place = place
        self._placed.pop(entry.key, None)
        self._stir(entry.demand)

    def _stir(self, demand: Demand) -> None:
        if demand.bundle:
            self.stirred_groups[demand.bundle.split("/")[0]] = None

    def _wait_no_more(self, key: Key) -> None:
        if not isinstance(key, TaskKey) and self.waiting_actors.get(key.index) == key.gen:
            del self.waiting_actors[key.index]

    def _give(self, demand: Demand, sign: int) -> None:
        """Add a bundle's reserved amounts to this node's totals (sign=1) or remove them (-1)."""
        if demand.bundle and sign < 0:
            self._gone_groups.add(demand.bundle.split("/")[0])
        for name, parts in given_by(demand):
            self.total[name] = self.total.get(name, 0) + sign * parts
            if not self.total[name]:
                del self.total[name]

    def _count(self, entry: _Entry, sign: int) -> None:
        """Add a task's amounts to what is in use here (sign=1), or take them off (-1).

        A task that sleeps in a get lends its CPUs to others meanwhile: the node's, or those of its placement group.
        """
        if entry.place not in (HERE, BLOCKED):
            return
        cpu = 0
        for name, parts in entry.demand.amounts:
            if name == CPU:
                cpu = parts
            if entry.place == HERE or not (name == CPU or name.startswith(_CPU_INSIDE)):
                self.used[name] = self.used.get(name, 0) + sign * parts
        if entry.place == HERE:
            self.relief += sign * (RESOURCE_PARTS * entry.workers - cpu)


def _plain(total: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Amounts that are not a placement group's."""
    return (item for item in total.items() if INSIDE not in item[0])


def _rank(item: tuple[tuple[Demand, int], _Line]) -> tuple[int, float]:
    (_, priority), line = item
    return -priority, line.tasks[0].since if line.tasks else 0.0
