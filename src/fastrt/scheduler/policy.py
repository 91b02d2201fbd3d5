"""Who runs what: ranks nodes for a task that could run now, and waiting tasks for a node that has become free.

Knows neither the wire nor objects. A node is whatever runs tasks: a whole machine with its daemon, or a single worker
of the seed's protocol; its site is where bytes lie, the machine or the worker's store. What a task asks for (its
shape) is compared by value: all tasks of one function usually ask for the same.

A decision takes O(log n) in nodes and in waiting tasks: for each shape in use there is a heap of nodes by load whose
entries may be out of date on the hopeful side only. A node's load in a heap is never above its real one, and only
nodes without room are missing from it, so the first entry that proves right is the best. A wrong one is corrected
when it comes up, which the change that made it wrong has paid for.

Order of preference: the site with most bytes of the task's arguments, then the least loaded node; `spread` asks for
the least loaded at once, `pack` for the first that has room, a node by name for that one or none.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
_HEAPS_MAX = 4096


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
        free: resources not in use.
        load: tasks given to it and not released, and what `set_queue` adds.
    """

    __slots__ = ("alive", "free", "id", "load", "missing", "queue", "raised", "rank", "site", "stored", "total")

    def __init__(self, node_id: Hashable, site: Hashable, resources: Mapping[str, float], rank: int) -> None:
        self.id = node_id
        self.site = site
        self.total = dict(resources)
        self.free = dict(resources)
        self.rank = rank
        self.load = 0
        self.queue = 0
        self.alive = True
        self.stored: dict[_Heap, int] = {}  # its load as each heap has it
        self.raised: set[_Heap] = set()  # heaps that have it at more than 0
        self.missing: set[_Heap] = set()  # heaps that have dropped it

    def __lt__(self, other: Node) -> bool:
        return False  # entries of a heap for one node at one load are alike

    def fits(self, shape: Shape) -> bool:
        """Whether all that is asked for is free."""
        free = self.free
        for name, amount in shape:  # noqa: SIM110  (three times as fast as `all` over a generator)
            if free.get(name, 0) + _ROUNDING < amount:
                return False
        return True


class _Heap:
    """Nodes by load, for tasks of one shape: all nodes, or those at one site. With `pack` in the order they came."""

    __slots__ = ("entries", "pack", "shape", "site")

    def __init__(self, shape: Shape, site: Hashable | None, pack: bool) -> None:
        self.shape = shape
        self.site = site
        self.pack = pack
        self.entries: list[tuple[int, int, Node]] = []

    def ranks(self, node: Node) -> bool:
        """Whether the node is one of those it is for."""
        return self.site is None or self.site == node.site


class Placement:
    """The nodes, and which of them is best for a task now."""

    def __init__(self) -> None:
        self._nodes: dict[Hashable, Node] = {}
        self._sites: dict[Hashable, dict[Hashable, Node]] = {}
        self._heaps: dict[tuple[Hashable | None, bool], dict[Shape, _Heap]] = {}
        self._all_heaps: dict[_Heap, None] = {}
        self._rank = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node_id: Hashable) -> bool:
        return node_id in self._nodes

    def __getitem__(self, node_id: Hashable) -> Node:
        return self._nodes[node_id]

    def add(self, node_id: Hashable, resources: Mapping[str, float], site: Hashable | None = None) -> None:
        """A node has come.

        Args:
            node_id: its name.
            resources: what it has, all free.
            site: where its bytes lie; by default a site of its own, named as the node.
        """
        self._rank += 1
        node = Node(node_id, node_id if site is None else site, resources, self._rank)
        self._nodes[node_id] = node
        self._sites.setdefault(node.site, {})[node_id] = node
        for heap in self._all_heaps:
            if heap.ranks(node):
                self._push(node, heap)

    def remove(self, node_id: Hashable) -> None:
        """A node has gone; what ran on it is the caller's to place again."""
        node = self._nodes.pop(node_id)
        node.alive = False
        beside = self._sites[node.site]
        del beside[node_id]
        if not beside:
            del self._sites[node.site]
            for heap in self._heaps.pop((node.site, False), {}).values():
                del self._all_heaps[heap]

    def gain(self, node_id: Hashable, resources: Mapping[str, float]) -> None:
        """A node has more of something, or something new."""
        node = self._nodes[node_id]
        for name, amount in resources.items():
            node.total[name] = node.total.get(name, 0) + amount
            node.free[name] = node.free.get(name, 0) + amount
        self._offer(node)

    def set_queue(self, node_id: Hashable, count: int) -> None:
        """A node reports how many tasks wait in its own queue; they count as load."""
        node = self._nodes[node_id]
        node.load += count - node.queue
        node.queue = count
        self._lowered(node)

    def place(self, demand: Demand) -> Hashable | None:
        """The best node for a task, which takes what it asks for; None when no node has that now."""
        shape, locality, strategy, only = demand
        if only is not None:
            node = self._nodes.get(only)
            if node is None or not node.fits(shape):
                return None
        else:
            node = self._local(shape, locality) if locality and not strategy else None
            if node is None:
                node = self._best(shape, None, strategy == PACK)
        return None if node is None else self._take(node, shape)

    def take(self, node_id: Hashable, shape: Shape) -> None:
        """Take what a task asks for from a node chosen already, which has it."""
        self._take(self._nodes[node_id], shape)

    def release(self, node_id: Hashable, shape: Shape) -> None:
        """A task has ended on a node."""
        node = self._nodes[node_id]
        for name, amount in shape:
            node.free[name] += amount
        node.load -= 1
        self._lowered(node)
        self._offer(node)

    def feasible(self, demand: Demand) -> bool:
        """Whether any node could ever run it, were it idle. Looks at every node."""
        nodes = self._nodes.values() if demand.node is None else filter(None, [self._nodes.get(demand.node)])
        return any(all(node.total.get(name, 0) >= amount for name, amount in demand.shape) for node in nodes)

    def _local(self, shape: Shape, locality: tuple[tuple[Hashable, int], ...]) -> Node | None:
        """The best node at the sites that have most bytes; of those with as many, where the load is least."""
        ranked: Iterable[tuple[Hashable, int]] = locality
        if len(locality) == 2 and locality[0][1] != locality[1][1]:
            if locality[0][1] < locality[1][1]:
                ranked = (locality[1], locality[0])
        elif len(locality) > 1:
            ranked = sorted(locality, key=self._by_bytes)[:_SITES_TRIED]
        for site, _ in ranked:
            beside = self._sites.get(site)
            if beside is None:
                continue
            if len(beside) == 1:
                (node,) = beside.values()
                if node.fits(shape):
                    return node
                continue
            best = self._best(shape, site, False)
            if best is not None:
                return best
        return None

    def _by_bytes(self, place: tuple[Hashable, int]) -> tuple[int, int]:
        beside = self._sites.get(place[0])
        return -place[1], 0 if beside is None else next(iter(beside.values())).load

    def _take(self, node: Node, shape: Shape) -> Hashable:
        for name, amount in shape:
            node.free[name] -= amount
        node.load += 1
        return node.id

    def _best(self, shape: Shape, site: Hashable | None, pack: bool) -> Node | None:
        """The first node of a heap that is where it ought to be, and has room."""
        shapes = self._heaps.get((site, pack))
        heap = shapes.get(shape) if shapes is not None else None
        if heap is None:
            heap = self._new_heap(shape, site, pack)
        entries = heap.entries
        while entries:
            stored, _, node = entries[0]
            if not node.alive or node.stored.get(heap) != stored:
                heapq.heappop(entries)
            elif not node.fits(shape):
                heapq.heappop(entries)
                del node.stored[heap]
                node.raised.discard(heap)
                node.missing.add(heap)
            elif stored < node.load and not pack:
                node.stored[heap] = node.load
                node.raised.add(heap)
                heapq.heapreplace(entries, (node.load, node.rank, node))
            else:
                return node
        return None

    def _new_heap(self, shape: Shape, site: Hashable | None, pack: bool) -> _Heap:
        if len(self._all_heaps) >= _HEAPS_MAX:
            self._forget(next(iter(self._all_heaps)))
        heap = _Heap(shape, site, pack)
        self._heaps.setdefault((site, pack), {})[shape] = heap
        self._all_heaps[heap] = None
        for node in self._ranked(heap):
            self._push(node, heap)
        return heap

    def _ranked(self, heap: _Heap) -> Iterable[Node]:
        return (self._nodes if heap.site is None else self._sites.get(heap.site, {})).values()

    def _push(self, node: Node, heap: _Heap) -> None:
        # For `pack` all loads are alike, so that the order in which nodes came decides.
        stored = 0 if heap.pack else node.load
        node.stored[heap] = stored
        node.missing.discard(heap)
        if stored:
            node.raised.add(heap)
        else:
            node.raised.discard(heap)
        entries = heap.entries
        heapq.heappush(entries, (stored, node.rank, node))
        if len(entries) > 64 + _ENTRIES_PER_NODE * len(self._nodes):
            fresh = {id(n): (load, rank, n) for load, rank, n in entries if n.alive and n.stored.get(heap) == load}
            entries[:] = fresh.values()
            heapq.heapify(entries)

    def _lowered(self, node: Node) -> None:
        """A node's load has fallen, so some heaps may have it too high."""
        if node.raised:
            for heap in [heap for heap in node.raised if node.stored[heap] > node.load]:
                self._push(node, heap)

    def _offer(self, node: Node) -> None:
        """A node has more free: back into the heaps that dropped it."""
        if node.missing:
            for heap in [heap for heap in node.missing if node.fits(heap.shape)]:
                self._push(node, heap)

    def _forget(self, heap: _Heap) -> None:
        """Drop a heap; it is made anew when it is wanted again."""
        del self._all_heaps[heap]
        del self._heaps[heap.site, heap.pack][heap.shape]
        for node in self._ranked(heap):
            node.stored.pop(heap, None)
            node.raised.discard(heap)
            node.missing.discard(heap)

    def check_invariants(self) -> None:
        """Raise AssertionError when a heap could hide a better node."""
        for heap in self._all_heaps:
            about = f"{heap.shape} at {heap.site}"
            entries = {(load, id(node)) for load, _, node in heap.entries}
            for node in self._ranked(heap):
                if heap in node.stored:
                    assert heap.pack or node.stored[heap] <= node.load, f"{node.id} is lower than {about} has it"
                    assert (node.stored[heap], id(node)) in entries, f"{node.id} is not where it ought to be"
                    assert heap.pack or not node.stored[heap] or heap in node.raised, f"{node.id} would stay too high"
                else:
                    assert heap in node.missing, f"{node.id} is in no list of {about}"
                    assert not node.fits(heap.shape), f"{node.id} fits {about} and is not ranked"


@dataclass(eq=False)
class _Waiting:
    """A task in a backlog."""

    number: int
    task: Hashable
    demand: Demand
    site: Hashable | None
    skipped: int = 0
    gone: bool = False


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

    def blocks(self, demand: Demand) -> bool:
        """Whether tasks that ask for the same wait already, so that another one has to go behind them."""
        return (demand.shape, demand.node) in self._lines

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
