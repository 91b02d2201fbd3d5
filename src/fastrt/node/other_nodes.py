"""Choose another node for a task: the state of the other nodes, and the policy that ranks them.

`placing` passes on what the nodes report and what it sends to them. The scheduling policy keeps the nodes in order of
load, so a choice costs O(log n). A node that finishes tasks quickly may get a few more than it has room for. A task
that found no node is compared again only with nodes that may have more room since: a search remembers which ones.

Compiled with the types in other_nodes.pxd when the package is built; ADR 5 says why.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from heapq import nlargest

from fastrt.config import RESOURCE_PARTS
from fastrt.scheduler.policy import Node, Placement
from fastrt.store.messages import NodeRow
from fastrt.tasks.resources import CPU, PACK, Demand

Amounts = tuple[tuple[str, int], ...]

_RECENT_S = 0.5  # the number of tasks that ended within this time shows how quickly a node works,
_AHEAD = 25  # and it gets one task beyond its room for each 25 of them, to run while the next order arrives
# The load of a node for the policy: its share of CPUs in use, then the tasks with the strategy "spread" that this node
# has there, then how few CPUs are free (by powers of two), then an order that differs from node to node: several nodes
# with tasks do not all choose the same one.
_USE_SHIFT, _SPREAD_SHIFT, _ROOM_SHIFT = 14, 7, 3
_ALL_IN_USE, _SPREAD_MAX, _ROOM_MAX, _ORDERS = 1 << 16, 127, 15, 7
_ABLE_MOST = 1000
_A_CPU = RESOURCE_PARTS
_NEAR_TRIED = 4  # nodes with bytes of the arguments that are compared with the least used one


def load_of(cpus: int, free: int, spread: int, order: int) -> int:
    """How much a node is used, for the policy.

    Args:
        cpus: parts of a CPU that it has.
        free: parts of a CPU that are free.
        spread: tasks with the strategy "spread" that were sent there.
        order: among equally loaded nodes.
    """
    cpus = cpus or 1
    free = cpus if free > cpus else max(free, 0)
    use = _ALL_IN_USE - free * _ALL_IN_USE // cpus
    room, whole = _ROOM_MAX, free // _A_CPU
    while whole and room:
        whole >>= 1
        room -= 1
    spread = _SPREAD_MAX if spread > _SPREAD_MAX else spread
    return use << _USE_SHIFT | spread << _SPREAD_SHIFT | room << _ROOM_SHIFT | order


class _OtherNode:
    """One node: its report, and what tasks of this node use there. The policy's node has the free amounts.

    Most demands are for CPUs only, so those are counted apart: a decision at 10,000 nodes waits for memory.
    """

    def __init__(self, node: str, order: int) -> None:
        self.node = node
        self.order = order
        self.view: NodeRow | None = None  # None: it has left
        self.ranked: Node | None = None  # its place in the policy; None: it runs nothing
        self.cpus = 0  # parts of a CPU that it has
        self.spread = 0
        self.plain = 0  # actors of this node without demands
        self.cpus_used = 0  # by tasks of this node, as the other resources:
        self.used: dict[str, int] = {}
        # Tasks of this node that ended there in the window of `_RECENT_S` that began at `since`, and in the one before.
        self.since, self.ended, self.ended_before = 0.0, 0, 0
        self.is_quick = False  # among `OtherNodes._quick`

    def left(self, view: NodeRow, name: str) -> int:
        """Parts of a resource that are free by a report: what tasks of this node use need not be in it yet."""
        unused = view.total[name] - (self.cpus_used if name == CPU else self.used.get(name, 0))
        free = view.free.get(name, 0)
        return unused if unused < free else free

    def end(self, now: float) -> None:
        """Count a task of this node that has ended there."""
        age = now - self.since
        if age >= _RECENT_S:
            self.ended_before = self.ended if age < 2 * _RECENT_S else 0
            self.since = self.since + _RECENT_S if age < 2 * _RECENT_S else now
            self.ended = 0
        self.ended += 1

    def recent(self, now: float) -> float:
        """About how many tasks of this node have ended there in the last `_RECENT_S`."""
        age = (now - self.since) / _RECENT_S
        if age < 1:
            return self.ended + self.ended_before * (1 - age)
        return self.ended * (2 - age) if age < 2 else 0.0

    def ahead(self, now: float) -> int:
        """How many tasks it gets beyond its room."""
        recent = self.recent(now)
        whole = int(recent / _AHEAD)
        return whole + (recent > whole * _AHEAD)

    def room(self, amounts: Amounts, now: float) -> bool:
        """Whether it should get a task now: it has room, or will have soon."""
        ranked, view = self.ranked, self.view
        if ranked is None or view is None:
            return False
        ahead = -1
        for name, parts in amounts:
            free = int(ranked.free(name))
            if free < parts:
                if ahead < 0:
                    ahead = self.ahead(now)
                if ahead == 0 or free < parts * (1 - ahead) or view.total.get(name, 0) < parts:
                    return False
        return True


class Search:
    """The search of waiting tasks for a node that will have room soon.

    Args:
        amounts: that they demand of resources.

    Attributes:
        left: the nodes that may have room since they were looked at.
    """

    def __init__(self, amounts: Amounts) -> None:
        self.amounts = amounts
        self.left: dict[_OtherNode, None] = {}


class OtherNodes:
    """The other nodes of one node.

    Args:
        node: the id of the node that places.

    Attributes:
        views: the last reports, by node.
    """

    def __init__(self, node: str) -> None:
        self.node = node
        self.views: dict[str, NodeRow] = {}
        self._known: dict[str, _OtherNode] = {}  # also nodes that have left, while tasks of this node are there
        self._policy = Placement()  # those that have workers
        self._names: dict[str, str] = {}  # ids by name
        self._quick: list[_OtherNode] = []  # those that have finished tasks of this node a moment ago
        self._searches: dict[Search, None] = {}
        self._is_able: dict[Amounts, bool] = {}  # see `able`; until the nodes have other resources

    def see(self, views: Iterable[NodeRow], left: Iterable[str] | None) -> None:
        """Take reports; `left` as for `Placing.see`."""
        views = list(views)
        gone = self.views.keys() - {view.node for view in views} if left is None else left
        for node in gone:
            self._lose(node)
            self._is_able.clear()
        for view in views:
            there = self._known.get(view.node)
            if there is None:
                order = zlib.crc32(f"{self.node} {view.node}".encode()) & _ORDERS
                there = self._known[view.node] = _OtherNode(view.node, order)
            before = there.view
            if before is None or before.name != view.name:
                self._names[view.name] = view.node
            self.views[view.node] = there.view = view
            if before is None or before is view or before.total != view.total:  # `mark` changes totals in place
                self._is_able.clear()
            elif before.free == view.free:
                continue  # another node has changed
            self._rank(there, view, before is view)

    def _rank(self, there: _OtherNode, view: NodeRow, again: bool) -> None:
        """Have the policy know what a node has free; `again`: by the same report, whose resources have changed."""
        totals, ranked = view.total, there.ranked
        there.cpus = totals.get(CPU, 0)
        if not totals:
            self._unrank(there)
            return
        known: Collection[str] = ()
        if ranked is None:
            cpus = {CPU: there.cpus} if there.cpus else {}  # first, as nearly all tasks demand it
            ranked = there.ranked = self._policy.add(there.node, cpus | totals)
        elif again:
            known = {ranked.main, *ranked.others}
        free = {name: int(ranked.free(name)) if name in known else there.left(view, name) for name in totals}
        self._policy.report(ranked, free, load_of(there.cpus, free.get(CPU, 0), there.spread, there.order))
        self._look_again(there)

    def _unrank(self, there: _OtherNode) -> None:
        if there.ranked is not None:
            self._policy.remove(there.node)
            there.ranked = None

    def drop_gone(self, used: Collection[str]) -> None:
        """Forget nodes that have left, unless tasks of this node are there."""
        for node in [node for node in self._known if node not in self.views and node not in used]:
            del self._known[node]
        self._keep_quick([there for there in self._quick if there.node in self._known])

    def _keep_quick(self, quick: list[_OtherNode]) -> None:
        before, self._quick = self._quick, quick
        for there in before:
            there.is_quick = False
        for there in quick:
            there.is_quick = True

    def at(self, node: str) -> _OtherNode:
        """A node, for `charge` and `ended`: the same object as long as tasks of this node are there."""
        return self._known[node]

    def charge(self, there: _OtherNode, amounts: Amounts, sign: int, spread: bool, plain: bool) -> None:
        """Count what a task takes on a node (sign=1), or gives back (-1); `plain`: it is an actor without demands."""
        there.spread += sign * spread
        there.plain += sign * plain
        ranked = there.ranked
        for name, parts in amounts:
            change = sign * parts
            if name == CPU:
                there.cpus_used += change
            else:
                there.used[name] = there.used.get(name, 0) + change
            if ranked is not None:
                ranked.use(name, change)
        if ranked is not None:
            load = load_of(there.cpus, int(ranked.free(CPU)), there.spread, there.order)
            if sign < 0:
                self._policy.rank(ranked, load)
                self._look_again(there)
            else:
                ranked.load = load  # it has become higher: the policy finds that out by itself

    def ended(self, there: _OtherNode, now: float) -> None:
        """A task of this node has ended there."""
        there.end(now)
        if not there.is_quick:
            there.is_quick = True
            self._quick.append(there)

    def free(self, node: str, name: str) -> int:
        """Free parts of a resource of a node that is there."""
        ranked = self._known[node].ranked
        return 0 if ranked is None else int(ranked.free(name))

    def room(self, node: str, amounts: Amounts, now: float) -> bool:
        """Whether a node should get a task now: it has room, or will have soon."""
        return self._known[node].room(amounts, now)

    def able(self, amounts: Amounts) -> bool:
        """Whether there is a node that runs something, and could run a task with these amounts if it were idle."""
        found = self._is_able.get(amounts)
        if found is None:
            if len(self._is_able) >= _ABLE_MOST:
                self._is_able.clear()
            totals = (view.total for view in self.views.values() if view.total)
            found = any(all(total.get(name, 0) >= parts for name, parts in amounts) for total in totals)
            self._is_able[amounts] = found
        return found

    def named(self, node: str) -> str | None:
        """The id of a node, given its id or name."""
        return node if node in self.views else self._names.get(node)

    def choose(self, demand: Demand, near: Mapping[str, int]) -> str | None:
        """The node with room that a task should go to; `near` are the bytes of its arguments by node."""
        places = tuple(near.items()) if near else ()
        best = self._policy.choose(demand.amounts, places, PACK if demand.strategy == PACK else "", None)
        return None if best is None else str(best.id)

    def least_used(self, amounts: Amounts, near: Mapping[str, int], here: int | None) -> str | None:
        """The least used node with room, if possible one that is near; None if this node, whose load is `here`, is."""
        best = self._policy.choose(amounts, (), "", None)
        if best is None or (here is not None and here <= best.load):
            return None
        for node in nlargest(_NEAR_TRIED, near, key=near.__getitem__):
            there = self._known.get(node)
            beside = None if there is None else there.ranked
            is_used_more = beside is None or beside.load >> _SPREAD_SHIFT > best.load >> _SPREAD_SHIFT
            if beside is not None and not is_used_more and beside.fits(amounts):
                return node
        return str(best.id)

    def fewest_plain(self, share: float) -> str | None:
        """The node that would have the fewest actors without demands for each part of its CPUs, given one more.

        Args:
            share: None is returned unless that is less than this.
        """
        found: _OtherNode | None = None
        least = 0
        for there in self._known.values():
            ranked = there.ranked
            if ranked is None or not there.cpus:
                continue
            its = (there.plain + 1) / there.cpus
            if its < share or (its == share and found is not None and ranked.load < least):
                share, least, found = its, ranked.load, there
        return None if found is None else found.node

    def soon(self, search: Search, near: Mapping[str, int], now: float) -> str | None:
        """A node that will have room soon, if possible one that is near. The same search does not look twice."""
        left = search.left
        if search not in self._searches:
            self._keep_quick([there for there in self._quick if there.ahead(now)])
            left |= {there: None for there in self._quick if there.view is not None}
            self._searches[search] = None
        for node in nlargest(_NEAR_TRIED, near, key=near.__getitem__) if near else ():
            beside = self._known.get(node)
            if beside is not None and beside in left and beside.room(search.amounts, now):
                return node
        while left:
            there, _ = left.popitem()  # until it changes
            if there.room(search.amounts, now):
                left[there] = None
                return there.node
        return None

    def stop_search(self, search: Search) -> None:
        """Nothing with this demand waits any more."""
        self._searches.pop(search, None)

    def check_invariants(self) -> None:
        """Raise AssertionError when the policy does not know what a node has free, or hides a better node."""
        self._policy.check_invariants()
        for node, view in self.views.items():
            assert (node in self._policy) == bool(view.total), f"{node} runs something or not"
            if node in self._policy:
                there = self._known[node]
                used = there.used | {CPU: there.cpus_used}
                for name, total in view.total.items():
                    assert self.free(node, name) + used.get(name, 0) <= total, f"{node} has more of {name} free"

    def _look_again(self, there: _OtherNode) -> None:
        """Let tasks that found no node look at one that may have more room."""
        if there.is_quick:
            for search in self._searches:
                search.left[there] = None

    def _lose(self, node: str) -> None:
        """Forget the report of a node that has left."""
        view = self.views.pop(node, None)
        if view is None:
            return
        there = self._known[node]
        there.view = None
        if self._names.get(view.name) == node:
            del self._names[view.name]
        self._unrank(there)
        for search in self._searches:
            search.left.pop(there, None)
