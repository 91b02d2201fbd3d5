"""The scheduling policy: ranks nodes for a task that could run now, and waiting tasks for a node that became free.

The policy has no part in the wire or in objects. A node runs tasks: a whole machine with its daemon, or a group of
interchangeable workers of one store. A node's site is where its bytes are: the machine, or that store. The resources
that a task demands (its shape) are compared by value: all tasks of one function usually demand the same.

A decision takes O(log n) in nodes and in waiting tasks. Each shape in use has a heap of nodes by load, whose entries
may be outdated in one direction only: a node's load in a heap is never above its real load, and only nodes without
room are missing from it. So the first entry that proves right is the best. A wrong entry is corrected when it reaches
the top; that cost is paid for by the change that made it wrong. An entry is one integer, load and rank: a thousand
entries fit into few cache lines, and are compared without access to their nodes.

Compiled with the types in policy.pxd when the package is built; ADR 5 says why.

Order of preference: the site with the most bytes of the task's arguments, then the least loaded node. `spread` takes
the least loaded node at once, `pack` the first node that has room, and a demand that names a node only that one.
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
# Fractions of a resource that were taken and returned do not add up exactly.
_ROUNDING = 1e-9
# Sites that are tried for their bytes before the least loaded node is taken.
_SITES_TRIED = 4
# How often a waiting task may be overtaken by tasks whose bytes are local.
_PATIENCE = 64
# A heap with more entries than this for each node is rebuilt without the outdated ones.
_ENTRIES_PER_NODE = 4
# Heaps that exist at a time, of shapes at all sites or at one; beyond it the oldest is dropped.
_HEAPS_MAX = 16384
# An entry of a heap is load << _RANK_BITS | rank: both stay below 2^31, of tasks at a node and nodes ever seen.
_RANK_BITS = 32
_RANKS = (1 << _RANK_BITS) - 1
_NEITHER, _RAISED, _MISSING = range(3)  # which chain of its node a seat is in
_DROPPED = -1  # the load of a seat that its heap has dropped because the node had no room


class Demand(NamedTuple):
    """The demands of a task.

    Attributes:
        shape: resources by name, in order of name; see `shape_of`.
        locality: bytes of the task's arguments by site.
        strategy: empty, `spread` or `pack`.
        node: the only node that the task may run on.
    """

    shape: Shape
    locality: tuple[tuple[Hashable, int], ...] = ()
    strategy: str = ""
    node: Hashable | None = None


def shape_of(resources: Mapping[str, float]) -> Shape:
    """Resources as a shape; amounts of 0 are left out."""
    return tuple(sorted((name, amount) for name, amount in resources.items() if amount > 0))


class Node:
    """A node: it runs tasks.

    Attributes:
        id: its name for the caller.
        site: where its bytes are.
        main: the first of them, most often the only one that a task demands.
        room: the free amount of `main`.
        others: the free amounts of the others; separate, because a lookup there touches four cache lines.
        kinds: abilities that are not used up, such as functions.
        load: tasks placed on it and not released, or what its caller says; see `report`.
        highest: no heap has the node at a load above this.
    """

    def __init__(
        self, node_id: Hashable, site: Hashable, resources: Mapping[str, float], kinds: frozenset[str], rank: int
    ) -> None:
        self.id = node_id
        self.site = site
        self.main = next(iter(resources), "")
        self.room = float(resources.get(self.main, 0.0))
        self.others = {name: amount for name, amount in resources.items() if name != self.main}
        self.kinds = kinds
        self.rank = rank
        self.load = self.highest = 0
        # The first seats of two chains: in heaps that have it at a load above 0, and that have dropped it.
        self.raised: _Seat | None = None
        self.missing: _Seat | None = None

    def fits(self, shape: Shape) -> bool:
        """Whether all demanded resources are free."""
        for name, amount in shape:
            if amount:
                room = self.free(name)
                if room + _ROUNDING < amount:
                    return False
            elif name not in self.kinds:
                return False
        return True

    def free(self, name: str) -> float:
        """The free amount of a resource."""
        return self.room if name == self.main else self.others.get(name, 0.0)

    def use(self, name: str, amount: float) -> None:
        """Take an amount of a resource; a negative amount returns it."""
        if name == self.main:
            self.room -= amount
        else:
            self.others[name] = self.others.get(name, 0.0) - amount

    def can(self, shape: Shape) -> bool:
        """Whether the node has all demanded abilities, free or not."""
        for name, amount in shape:  # noqa: SIM110  (a generator cannot be compiled into a C function)
            if not amount and name not in self.kinds:
                return False
        return True


class _Seat:
    """A node in a heap, with the load the heap has it at; `_DROPPED` when it is not in the heap.

    A chain of seats is in the seats: with a set for each of its chains, a node took three times as much memory.
    """

    def __init__(self, heap: _Heap, node: Node) -> None:
        self.heap, self.node = heap, node
        self.stored, self.chain = _DROPPED, _NEITHER
        self.before: _Seat | None = None
        self.after: _Seat | None = None

    def join(self, chain: int) -> None:
        """Move to another chain of the node."""
        if chain == self.chain:
            return
        node, before, after = self.node, self.before, self.after
        if after is not None:
            after.before = before
        if before is not None:
            before.after = after
        elif self.chain == _RAISED:
            node.raised = after
        elif self.chain == _MISSING:
            node.missing = after
        self.chain, self.before, first = chain, None, None
        if chain == _RAISED:
            first, node.raised = node.raised, self
        elif chain == _MISSING:
            first, node.missing = node.missing, self
        self.after = first
        if first is not None:
            first.before = self


class _Heap:
    """Nodes by load, for tasks of one shape: all nodes, or those at one site. With `pack` in the order of `add`."""

    def __init__(self, shape: Shape, site: Hashable | None, pack: bool) -> None:
        self.shape, self.site, self.pack = shape, site, pack
        self.entries: list[int] = []
        self.seats: dict[int, _Seat] = {}  # by the node's rank

    def best(self) -> Node | None:
        """The node with the lowest load that has room; corrects outdated entries on the way."""
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
                seat.join(_MISSING)
            elif seat.stored < node.load and not self.pack:
                seat.stored = node.load
                node.highest = max(node.highest, node.load)
                seat.join(_RAISED)
                heapreplace(entries, node.load << _RANK_BITS | node.rank)
            else:
                return node
        return None

    def add(self, node: Node) -> None:
        """Rank a node here, if it can run tasks of this shape."""
        if not node.can(self.shape):
            return
        seat = self.seats[node.rank] = _Seat(self, node)
        self.push(seat)

    def push(self, seat: _Seat) -> None:
        """Add an entry for a node at its current load."""
        # For `pack` all loads count as 0, so the order in which nodes were added decides.
        node = seat.node
        stored = 0 if self.pack else node.load
        seat.stored = stored
        if stored:
            node.highest = max(node.highest, stored)
        seat.join(_RAISED if stored else _NEITHER)
        entries = self.entries
        heappush(entries, stored << _RANK_BITS | node.rank)
        if len(entries) > 64 + _ENTRIES_PER_NODE * len(self.seats):
            entries[:] = [s.stored << _RANK_BITS | rank for rank, s in self.seats.items() if s.stored != _DROPPED]
            heapify(entries)

    def drop(self, node: Node) -> None:
        """Stop ranking a node here."""
        seat = self.seats.pop(node.rank, None)
        if seat is not None:
            seat.join(_NEITHER)


class _Ranking:
    """The heaps of one shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.every: _Heap | None = None
        self.packed: _Heap | None = None
        self.at_site: dict[Hashable, _Heap] = {}


class Placement:
    """The nodes, and the choice of the best one for a task."""

    def __init__(self) -> None:
        self._nodes: dict[Hashable, Node] = {}
        self._sites: dict[Hashable, list[Node]] = {}
        self._rankings: dict[Shape, _Ranking] = {}
        self._all_heaps: dict[_Heap, None] = {}
        self._rank = 0

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
        """Add a node.

        Args:
            node_id: its name.
            resources: its resources, all free.
            site: where its bytes are; by default a separate site, named as the node.
            kinds: its abilities, which never change: names that a shape demands by the amount 0.
        Returns:
            The node, for `occupy` and `vacate`.
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
        """Remove a node; the caller places its tasks again."""
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
        """Add resources to a node; negative amounts take them away."""
        node = self._nodes[node_id]
        for name, amount in resources.items():
            node.use(name, -amount)
        self._offer(node)

    def report(self, node: Node, free: Mapping[str, float], load: int) -> None:
        """Set what a node has free and its load, for a caller that counts these itself; see `rank`."""
        node.room = free.get(node.main, 0.0)
        if len(free) > 1 or node.others:
            node.others = {name: amount for name, amount in free.items() if name != node.main}
        self.rank(node, load)

    def rank(self, node: Node, load: int) -> None:
        """Set the load of a node, for a caller that counts it and calls `Node.use` itself.

        Args:
            node: its free amounts are those of now.
            load: at least 0 and below 2^31; nodes with less are preferred.
        """
        node.load = load
        if load < node.highest:
            self._lowered(node)
        if node.missing is not None:
            self._offer(node)

    def place(self, demand: Demand) -> Hashable | None:
        """Choose the best node for a task and take its resources there; None when no node has room."""
        node = self.choose(demand.shape, demand.locality, demand.strategy, demand.node)
        if node is None:
            return None
        self.occupy(node, demand.shape)
        return node.id

    def take(self, node_id: Hashable, shape: Shape) -> None:
        """Take a task's resources from a node that was chosen already and has room."""
        self.occupy(self._nodes[node_id], shape)

    def release(self, node_id: Hashable, shape: Shape) -> None:
        """Return a task's resources to its node."""
        self.vacate(self._nodes[node_id], shape)

    def choose(
        self, shape: Shape, locality: tuple[tuple[Hashable, int], ...], strategy: str, only: Hashable | None
    ) -> Node | None:
        """The best node for a task with the fields of a `Demand`; None when no node has room."""
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
        """Take a task's resources from a node object; see `take`."""
        for name, amount in shape:
            if amount:
                node.use(name, amount)
        node.load += 1

    def vacate(self, node: Node, shape: Shape) -> None:
        """Return a task's resources to a node object; see `release`."""
        for name, amount in shape:
            if amount:
                node.use(name, -amount)
        node.load -= 1
        if node.load < node.highest:
            self._lowered(node)
        if node.missing is not None:
            self._offer(node)

    def _local(self, ranking: _Ranking, locality: tuple[tuple[Hashable, int], ...]) -> Node | None:
        """The best node at the sites with the most bytes; the least loaded site first where the bytes are equal."""
        if len(locality) == 1:
            return self._best_at(ranking, locality[0][0])
        left = list(locality)
        for _ in range(min(len(left), _SITES_TRIED)):  # most often one round is enough, so sorting all would be wasted
            best, most, least = 0, -1.0, -1  # the load is read only where several sites have equal bytes
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
            self._rankings[ranking.shape] = ranking  # the dropped heap may have been its last
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
        """Correct the heaps that have a node at a higher load than it has now."""
        node.highest = node.load
        seat = node.raised
        while seat is not None:
            after = seat.after
            if seat.stored > node.load:
                seat.heap.push(seat)
            seat = after

    def _offer(self, node: Node) -> None:
        """Put a node that has more room back into the heaps that dropped it."""
        seat = node.missing
        while seat is not None:
            after = seat.after
            if node.fits(seat.heap.shape):
                seat.heap.push(seat)
            seat = after

    def _forget(self, heap: _Heap) -> None:
        """Drop a heap; it is rebuilt when it is needed again."""
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
            assert heap.seats.keys() == {node.rank for node in nodes}, f"{about} ranks the wrong nodes"
            for node in nodes:
                seat = heap.seats[node.rank]
                if seat.stored != _DROPPED:
                    assert heap.pack or seat.stored <= node.load, f"{about} has {node.id} above its load"
                    entry = seat.stored << _RANK_BITS | node.rank
                    assert entry in heap.entries, f"{about} has no entry of {node.id}"
                    raised = seat.chain == _RAISED and seat.stored <= node.highest
                    assert heap.pack or not seat.stored or raised, f"{node.id} would stay at too high a load"
                else:
                    assert seat.chain == _MISSING, f"{node.id} is not among those that {about} dropped"
                    assert not node.fits(heap.shape), f"{node.id} fits {about} and is not ranked"


class _Waiting:
    """A task in a backlog."""

    def __init__(self, number: int, task: Hashable, demand: Demand, site: Hashable | None) -> None:
        self.number, self.task, self.demand, self.site = number, task, demand, site
        self.skipped, self.gone = 0, False


class _Line:
    """Waiting tasks of one shape (and node, if they name one): in order, and by the site with the most bytes."""

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
        """The task that a node at this site should run next: one whose bytes are here, else the oldest."""
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
    """Tasks that wait for a node with room: oldest first, but tasks with local bytes before others."""

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
        """Whether tasks with the same demands wait already, so that another one has to queue behind them."""
        return bool(self._lines) and (shape, node) in self._lines

    def add(self, task: Hashable, demand: Demand) -> None:
        """Queue a task that waits for a node."""
        self._number += 1
        site = max(demand.locality, key=lambda place: place[1])[0] if demand.locality else None
        waiting = _Waiting(self._number, task, demand, site)
        self._waiting[task] = waiting
        self._lines.setdefault((demand.shape, demand.node), _Line()).add(waiting)

    def remove(self, task: Hashable) -> None:
        """Remove a task that no longer waits."""
        waiting = self._waiting.pop(task)
        key = (waiting.demand.shape, waiting.demand.node)
        line = self._lines[key]
        line.drop(waiting)
        if not line.count:
            del self._lines[key]

    def take(self, node: Node) -> tuple[Hashable, Demand] | None:
        """Remove and return the task that a node with room should run next; None when none fits."""
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
    """The first task that still waits; removed tasks before it are dropped from the line."""
    while line and line[0].gone:
        line.popleft()
    return line[0] if line else None
