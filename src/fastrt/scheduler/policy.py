"""Who runs what: ranks nodes for a task that could run now, and waiting tasks for a node that has become free.

Knows neither the wire nor objects. A node is whatever runs tasks: a whole machine with its daemon, or the workers
beside one store that are alike; its site is where bytes lie, the machine or that store. What a task asks for (its
shape) is compared by value: all tasks of one function usually ask for the same.

A decision takes O(log n) in nodes and in waiting tasks: for each shape in use there is a heap of nodes by load whose
entries may be out of date on the hopeful side only. A node's load in a heap is never above its real one, and only
nodes without room are missing from it, so the first entry that proves right is the best. A wrong one is corrected
when it comes up, which the change that made it wrong has paid for. An entry is one integer, load and rank: a thousand
of them lie in few cache lines, and are compared without a look at their nodes.

Compiled with the types in policy.pxd when the package is built; ADR 5 says why.

Order of preference: the site with most bytes of the task's arguments, then the least loaded node; `spread` asks for
the least loaded at once, `pack` for the first that has room, a node by name for that one or none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

Shape = tuple[tuple[str, float], ...]
Locality = Iterable[tuple[Hashable, int]]

SPREAD = "spread"
PACK = "pack"
# Fractions of a resource that were taken and given back do not add up exactly.
_ROUNDING = 1e-9
# Sites tried for their bytes before the least loaded node is taken.
_SITES_TRIED = 4
# How often a waiting task is passed over by others that have their bytes at hand.
_PATIENCE = 64
# A heap with more entries than this many for each node is written anew without the outdated ones.
_ENTRIES_PER_NODE = 4
# Shapes, at all sites and at single ones, that are ranked at a time; beyond it the oldest is forgotten.
_HEAPS_MAX = 16384
# An entry of a heap is load << _RANK_BITS | rank: both stay below 2^31, of tasks at a node and nodes ever seen.
_RANK_BITS = 32
_RANKS = (1 << _RANK_BITS) - 1
_DROPPED = -1  # the load of a seat that its heap has dropped for want of room


class Demand(NamedTuple):
    """What a task asks for.

    Attributes:
        shape: resources by name, in order of name; see `shape_of`.
        locality: bytes of the task's arguments, by site.
        strategy: empty, `spread` or `pack`.
        node: the only node that will do.
    """

    shape: Shape
    locality: tuple[tuple[Hashable, int], ...] = ()
    strategy: str = ""
    node: Hashable | None = None


def shape_of(resources: Mapping[str, float]) -> Shape:
    """Resources as a shape; those asked for by 0 do not count."""
    return tuple(sorted((name, amount) for name, amount in resources.items() if amount > 0))


class Node:
    """What runs tasks.

    Attributes:
        id: its name for the caller.
        site: where its bytes lie.
        total: all resources.
        main: the first of them, most often the only one that a task asks for.
        room: how much of that is not in use.
        others: how much of the other ones is not in use; apart, as looking into it touches four cache lines.
        kinds: what it can do, however often at a time.
        load: tasks given to it and not released, and what `set_queue` adds.
        highest: no heap has it at a load above this.
    """

    __slots__ = (
        "highest", "id", "kinds", "load", "main", "missing", "others", "queue", "raised", "rank", "room", "site",
        "total",
    )  # fmt: skip

    def __init__(
        self, node_id: Hashable, site: Hashable, resources: Mapping[str, float], kinds: frozenset[str], rank: int
    ) -> None:
        self.id = node_id
        self.site = site
        self.total = dict(resources)
        self.main = next(iter(resources), "")
        self.room = float(resources.get(self.main, 0.0))
        self.others = {name: amount for name, amount in resources.items() if name != self.main}
        self.kinds = kinds
        self.rank = rank
        self.load = 0
        self.queue = 0
        self.highest = 0
        self.raised: dict[_Seat, None] = {}  # in heaps that have it at more than 0
        self.missing: dict[_Seat, None] = {}  # in heaps that have dropped it

    def fits(self, shape: Shape) -> bool:
        """Whether all that is asked for is free."""
        for name, amount in shape:
            if amount:
                room = self.free(name)
                if room + _ROUNDING < amount:
                    return False
            elif name not in self.kinds:
                return False
        return True

    def free(self, name: str) -> float:
        """How much of a resource is not in use."""
        return self.room if name == self.main else self.others.get(name, 0.0)

    def use(self, name: str, amount: float) -> None:
        """Take something of a resource, or give it back."""
        if name == self.main:
            self.room -= amount
        else:
            self.others[name] = self.others.get(name, 0.0) - amount

    def can(self, shape: Shape) -> bool:
        """Whether it can do what is asked for, were it free."""
        for name, amount in shape:  # noqa: SIM110  (a generator cannot be compiled into a C function)
            if not amount and name not in self.kinds:
                return False
        return True


class _Seat:
    """A node in a heap: at which load the heap has it, `_DROPPED` when it has not."""

    __slots__ = ("heap", "node", "stored")

    def __init__(self, heap: _Heap, node: Node) -> None:
        self.heap = heap
        self.node = node
        self.stored = _DROPPED


class _Heap:
    """Nodes by load, for tasks of one shape: all nodes, or those at one site. With `pack` in the order they came."""

    __slots__ = ("entries", "pack", "seats", "shape", "site")

    def __init__(self, shape: Shape, site: Hashable | None, pack: bool) -> None:
        self.shape = shape
        self.site = site
        self.pack = pack
        self.entries: list[int] = []
        self.seats: dict[int, _Seat] = {}  # by the node's rank

    def best(self) -> Node | None:
        """The first node that is where it ought to be, and has room."""
        entries, seats = self.entries, self.seats
        while entries:
            entry = entries[0]
            seat = seats.get(entry & _RANKS)
            if seat is None or seat.stored != entry >> _RANK_BITS:
                heappop(entries)
                continue
            node = seat.node
            if not node.fits(self.shape):
                heappop(entries)
                seat.stored = _DROPPED
                node.raised.pop(seat, None)
                node.missing[seat] = None
            elif seat.stored < node.load and not self.pack:
                seat.stored = node.load
                node.highest = max(node.highest, node.load)
                node.raised[seat] = None
                heapreplace(entries, node.load << _RANK_BITS | node.rank)
            else:
                return node
        return None

    def add(self, node: Node) -> None:
        """A node is to be ranked here from now on, if it can run such tasks at all."""
        if not node.can(self.shape):
            return
        seat = self.seats[node.rank] = _Seat(self, node)
        self.push(seat)

    def push(self, seat: _Seat) -> None:
        """A node is where its load says, from now on."""
        # For `pack` all loads are alike, so that the order in which nodes came decides.
        node = seat.node
        stored = 0 if self.pack else node.load
        seat.stored = stored
        if stored:
            node.highest = max(node.highest, stored)
            node.raised[seat] = None
        elif node.raised:
            node.raised.pop(seat, None)
        entries = self.entries
        heappush(entries, stored << _RANK_BITS | node.rank)
        if len(entries) > 64 + _ENTRIES_PER_NODE * len(self.seats):
            entries[:] = [s.stored << _RANK_BITS | rank for rank, s in self.seats.items() if s.stored != _DROPPED]
            heapify(entries)

    def drop(self, node: Node) -> None:
        """A node is not ranked here any more."""
        seat = self.seats.pop(node.rank, None)
        if seat is not None:
            node.raised.pop(seat, None)
            node.missing.pop(seat, None)


class _Ranking:
    """The heaps of one shape."""

    __slots__ = ("at_site", "every", "packed", "shape")

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.every: _Heap | None = None
        self.packed: _Heap | None = None
        self.at_site: dict[Hashable, _Heap] = {}


class Placement:
    """The nodes, and which of them is best for a task now."""

    def __init__(self) -> None:
        self._nodes: dict[Hashable, Node] = {}
        self._sites: dict[Hashable, list[Node]] = {}
        self._rankings: dict[Shape, _Ranking] = {}
        self._all_heaps: dict[_Heap, None] = {}
        self._rank = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node_id: Hashable) -> bool:
        return node_id in self._nodes

    def __getitem__(self, node_id: Hashable) -> Node:
        return self._nodes[node_id]

    def add(
        self,
        node_id: Hashable,
        resources: Mapping[str, float],
        site: Hashable | None = None,
        kinds: frozenset[str] = frozenset(),
    ) -> Node:
        """A node has come.

        Args:
            node_id: its name.
            resources: what it has, all free.
            site: where its bytes lie; by default a site of its own, named as the node.
            kinds: what it can do, for good: names that a shape asks for by the amount 0.
        Returns:
            What `occupy` and `vacate` take.
        """
        self._rank += 1
        node = Node(node_id, node_id if site is None else site, resources, kinds, self._rank)
        self._nodes[node_id] = node
        self._sites.setdefault(node.site, []).append(node)
        for ranking in self._rankings.values():
            for heap in (ranking.every, ranking.packed, ranking.at_site.get(node.site)):
                if heap is not None:
                    heap.add(node)
        return node

    def remove(self, node_id: Hashable) -> None:
        """A node has gone; what ran on it is the caller's to place again."""
        node = self._nodes.pop(node_id)
        beside = self._sites[node.site]
        beside.remove(node)
        for ranking in self._rankings.values():
            for heap in (ranking.every, ranking.packed, ranking.at_site.get(node.site)):
                if heap is not None:
                    heap.drop(node)
            if not beside and node.site in ranking.at_site:
                del self._all_heaps[ranking.at_site.pop(node.site)]
        if not beside:
            del self._sites[node.site]

    def gain(self, node_id: Hashable, resources: Mapping[str, float]) -> None:
        """A node has more of something, or something new."""
        node = self._nodes[node_id]
        for name, amount in resources.items():
            node.total[name] = node.total.get(name, 0) + amount
            node.use(name, -amount)
        self._offer(node)

    def set_queue(self, node_id: Hashable, count: int) -> None:
        """A node reports how many tasks wait in its own queue; they count as load."""
        node = self._nodes[node_id]
        node.load += count - node.queue
        node.queue = count
        self._lowered(node)

    def place(self, demand: Demand) -> Hashable | None:
        """The best node for a task, which takes what it asks for; None when no node has that now."""
        node = self.choose(demand.shape, demand.locality, demand.strategy, demand.node)
        if node is None:
            return None
        self.occupy(node, demand.shape)
        return node.id

    def take(self, node_id: Hashable, shape: Shape) -> None:
        """Take what a task asks for from a node chosen already, which has it."""
        self.occupy(self._nodes[node_id], shape)

    def release(self, node_id: Hashable, shape: Shape) -> None:
        """A task has ended on a node."""
        self.vacate(self._nodes[node_id], shape)

    def choose(
        self, shape: Shape, locality: tuple[tuple[Hashable, int], ...], strategy: str, only: Hashable | None
    ) -> Node | None:
        """The best node for a task that asks for this, as `Demand` says; None when no node has that now."""
        if only is not None:
            node = self._nodes.get(only)
            return node if node is not None and node.fits(shape) else None
        ranking = self._rankings.get(shape)
        if ranking is None:
            ranking = self._rankings[shape] = _Ranking(shape)
        if locality and not strategy:
            node = self._local(ranking, locality)
            if node is not None:
                return node
        heap = ranking.packed if strategy == PACK else ranking.every
        if heap is None:
            heap = self._new_heap(ranking, None, strategy == PACK)
        return heap.best()

    def occupy(self, node: Node, shape: Shape) -> None:
        """As `take`, of a node at hand."""
        for name, amount in shape:
            if amount:
                node.use(name, amount)
        node.load += 1

    def vacate(self, node: Node, shape: Shape) -> None:
        """As `release`, of a node at hand."""
        for name, amount in shape:
            if amount:
                node.use(name, -amount)
        node.load -= 1
        if node.load < node.highest:
            self._lowered(node)
        if node.missing:
            self._offer(node)

    def feasible(self, demand: Demand) -> bool:
        """Whether any node could ever run it, were it idle. Looks at every node."""
        nodes = self._nodes.values() if demand.node is None else filter(None, [self._nodes.get(demand.node)])
        return any(
            node.can(demand.shape) and all(node.total.get(name, 0) >= amount for name, amount in demand.shape)
            for node in nodes
        )

    def _local(self, ranking: _Ranking, locality: tuple[tuple[Hashable, int], ...]) -> Node | None:
        """The best node at the sites that have most bytes; of those with as many, where the load is least."""
        if len(locality) == 1:
            return self._best_at(ranking, locality[0][0])
        left = list(locality)
        for _ in range(min(len(left), _SITES_TRIED)):  # the first is most often the last: sorting all is for nothing
            best, most, least = 0, -1.0, -1  # the load is looked at where there are several with as many
            for i in range(len(left)):
                place = left[i]
                nbytes = place[1]
                if nbytes > most:
                    best, most, least = i, nbytes, -1
                elif nbytes == most:
                    if least < 0:
                        place = left[best]
                        least = self._load_at(place[0])
                    place = left[i]
                    load = self._load_at(place[0])
                    if load < least:
                        best, least = i, load
            node = self._best_at(ranking, left.pop(best)[0])
            if node is not None:
                return node
        return None

    def _best_at(self, ranking: _Ranking, site: Hashable) -> Node | None:
        """The least loaded node at a site."""
        heap = ranking.at_site.get(site)
        if heap is None:
            beside = self._sites.get(site)
            if beside is None:
                return None
            if len(beside) == 1:
                node = beside[0]
                return node if node.fits(ranking.shape) else None
            heap = self._new_heap(ranking, site, False)
        return heap.best()

    def _load_at(self, site: Hashable) -> int:
        """The load of the first node at a site."""
        beside = self._sites.get(site)
        if beside is None:
            return 0
        node = beside[0]
        return node.load

    def _new_heap(self, ranking: _Ranking, site: Hashable | None, pack: bool) -> _Heap:
        if len(self._all_heaps) >= _HEAPS_MAX:
            self._forget(next(iter(self._all_heaps)))
            self._rankings[ranking.shape] = ranking  # that may have been its last
        heap = _Heap(ranking.shape, site, pack)
        if site is not None:
            ranking.at_site[site] = heap
        elif pack:
            ranking.packed = heap
        else:
            ranking.every = heap
        self._all_heaps[heap] = None
        for node in self._ranked(heap):
            heap.add(node)
        return heap

    def _ranked(self, heap: _Heap) -> Iterable[Node]:
        return self._nodes.values() if heap.site is None else self._sites.get(heap.site, ())

    def _lowered(self, node: Node) -> None:
        """A node's load has fallen, so some heaps may have it too high."""
        higher = [seat for seat in node.raised if seat.stored > node.load]
        node.highest = node.load
        for seat in higher:
            seat.heap.push(seat)

    def _offer(self, node: Node) -> None:
        """A node has more free: back into the heaps that dropped it."""
        for seat in list(node.missing):
            if node.fits(seat.heap.shape):
                del node.missing[seat]
                seat.heap.push(seat)

    def _forget(self, heap: _Heap) -> None:
        """Drop a heap; it is made anew when it is wanted again."""
        del self._all_heaps[heap]
        ranking = self._rankings[heap.shape]
        if heap.site is not None:
            del ranking.at_site[heap.site]
        elif heap.pack:
            ranking.packed = None
        else:
            ranking.every = None
        for node in self._ranked(heap):
            heap.drop(node)
        if not ranking.at_site and ranking.packed is None and ranking.every is None:
            del self._rankings[heap.shape]

    def check_invariants(self) -> None:
        """Raise AssertionError when a heap could hide a better node."""
        for heap in self._all_heaps:
            about = f"{heap.shape} at {heap.site}"
            nodes = [node for node in self._ranked(heap) if node.can(heap.shape)]
            assert heap.seats.keys() == {node.rank for node in nodes}, f"{about} ranks others"
            for node in nodes:
                seat = heap.seats[node.rank]
                if seat.stored != _DROPPED:
                    assert heap.pack or seat.stored <= node.load, f"{node.id} is lower than {about} has it"
                    entry = seat.stored << _RANK_BITS | node.rank
                    assert entry in heap.entries, f"{node.id} is not where it ought to be"
                    raised = seat in node.raised and seat.stored <= node.highest
                    assert heap.pack or not seat.stored or raised, f"{node.id} would stay too high"
                else:
                    assert seat in node.missing, f"{node.id} is in no list of {about}"
                    assert not node.fits(heap.shape), f"{node.id} fits {about} and is not ranked"


class _Waiting:
    """A task in a backlog."""

    __slots__ = ("demand", "gone", "number", "site", "skipped", "task")

    def __init__(self, number: int, task: Hashable, demand: Demand, site: Hashable | None) -> None:
        self.number = number
        self.task = task
        self.demand = demand
        self.site = site
        self.skipped = 0
        self.gone = False


class _Line:
    """Waiting tasks of one shape (and node, if they name one): in order, and by the site that has most bytes."""

    def __init__(self) -> None:
        self.count = 0
        self.order: deque[_Waiting] = deque()
        self.by_site: dict[Hashable, deque[_Waiting]] = {}

    def add(self, waiting: _Waiting) -> None:
        self.count += 1
        self.order.append(waiting)
        if waiting.site is not None:
            self.by_site.setdefault(waiting.site, deque()).append(waiting)

    def first(self, site: Hashable) -> _Waiting | None:
        """What a node at this site should run next: what has its bytes here, else the oldest."""
        oldest = _head(self.order)
        if oldest is None or oldest.skipped >= _PATIENCE:
            return oldest
        local = self.by_site.get(site)
        near = _head(local) if local is not None else None
        if local is not None and near is None:
            del self.by_site[site]
        return near or oldest

    def drop(self, waiting: _Waiting) -> None:
        waiting.gone = True
        self.count -= 1
        if len(self.order) > 64 + 2 * self.count:
            left = [each for each in self.order if not each.gone]
            self.order, self.by_site, self.count = deque(), {}, 0
            for each in left:
                self.add(each)


class Backlog:
    """Tasks that could run but for a node with room: oldest first, but those with bytes at hand before others."""

    def __init__(self) -> None:
        self._lines: dict[tuple[Shape, Hashable | None], _Line] = {}
        self._waiting: dict[Hashable, _Waiting] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._waiting)

    def __contains__(self, task: Hashable) -> bool:
        return task in self._waiting

    def blocks(self, shape: Shape, node: Hashable | None = None) -> bool:
        """Whether tasks that ask for the same wait already, so that another one has to go behind them."""
        return bool(self._lines) and (shape, node) in self._lines

    def add(self, task: Hashable, demand: Demand) -> None:
        """A task waits for a node."""
        self._number += 1
        site = max(demand.locality, key=lambda place: place[1])[0] if demand.locality else None
        waiting = _Waiting(self._number, task, demand, site)
        self._waiting[task] = waiting
        self._lines.setdefault((demand.shape, demand.node), _Line()).add(waiting)

    def remove(self, task: Hashable) -> None:
        """A task waits no more."""
        waiting = self._waiting.pop(task)
        key = (waiting.demand.shape, waiting.demand.node)
        line = self._lines[key]
        line.drop(waiting)
        if not line.count:
            del self._lines[key]

    def take(self, node: Node) -> tuple[Hashable, Demand] | None:
        """The task that a node with room should run next, no longer waiting; None when none fits."""
        best: _Waiting | None = None
        for (shape, only), line in self._lines.items():
            if (only is None or only == node.id) and node.fits(shape):
                found = line.first(node.site)
                if found is not None and (best is None or self._before(found, best, node.site)):
                    best = found
        if best is None:
            return None
        oldest = _head(self._lines[best.demand.shape, best.demand.node].order)
        if oldest is not None and oldest is not best:
            oldest.skipped += 1
        self.remove(best.task)
        return best.task, best.demand

    @staticmethod
    def _before(one: _Waiting, other: _Waiting, site: Hashable) -> bool:
        if (one.skipped >= _PATIENCE) != (other.skipped >= _PATIENCE):
            return one.skipped >= _PATIENCE
        if (one.site == site) != (other.site == site):
            return one.site == site
        return one.number < other.number


def _head(line: deque[_Waiting]) -> _Waiting | None:
    """The first that still waits; those before it are dropped from the line."""
    while line and line[0].gone:
        line.popleft()
    return line[0] if line else None
