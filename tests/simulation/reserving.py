"""Placement groups in the simulator: drivers reserve, use and remove them, and the invariants of reservations.

The invariants: a node never holds more bundles than it has slots, and the tasks in a bundle never take more than it
has; a group of which a driver has read that it is reserved was reserved as a whole; a group that was never whole does
not keep a part of its bundles. What is left at the end, `Node.leftovers` finds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fastrt._core.objects import handles
from fastrt._core.tasks import actors, submission
from fastrt.config import RESOURCE_PARTS
from fastrt.errors import StaleReferenceError
from fastrt.ids import PlacementGroupID
from fastrt.store import messages
from fastrt.tasks.options import RETRIES_FOREVER
from fastrt.tasks.placement_group import PlacementGroup, _record
from fastrt.tasks.resources import Amounts, Demand, export, parts_of, within

from .program import ActorSpec, TaskSpec

if TYPE_CHECKING:
    from .cluster import Cluster
    from .members import Driver, Member
    from .node import Node

SLOT = "slot"
PARTIAL_S = 20.0  # a part of a group may be reserved for so long


class _Reserved(NamedTuple):
    """A placement group, and what keeps its bundles."""

    group: PlacementGroup
    refs: list[Any]


class Bundle(NamedTuple):
    """A bundle that a node holds."""

    group: str
    index: int
    slots: int


class Reserving:
    """The placement groups of one cluster.

    Args:
        cluster: the simulated cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._world = cluster, cluster.world
        self._groups: dict[str, PlacementGroup] = {}  # by key
        self._bundles: dict[tuple[Any, ...], Bundle] = {}  # by node and record
        self._whole: set[str] = set()
        self._partial: dict[str, float] = {}  # since when

    # ---- for drivers ----

    async def reserve(self, driver: Driver, key: str) -> None:
        """Create a placement group, as `fastrt.placement_group` does."""
        spec = self._cluster.program.groups[key]
        id_ = PlacementGroupID.made_on(driver.node.segment.session)
        specs = [{SLOT: slots} for slots in spec.bundles]
        group = PlacementGroup(id_, specs, spec.strategy, "", driver.node.segment.session)
        refs = _record(driver.store, group, [parts_of({SLOT: slots}) for slots in spec.bundles], False)
        driver.groups[key] = _Reserved(group, refs)
        self._groups[key] = group
        self._world.say(f"group {key} is {id_} of {driver.node.host}: {spec}")
        driver.store.tell(messages.ActorsChanged())

    async def reserved(self, driver: Driver, key: str) -> None:
        """Wait until a group is reserved."""
        if key not in driver.groups:
            return
        demand = export(driver.store, Demand((), bundle=driver.groups[key].group.id))
        options = submission.TaskOptions(driver.function, 1, RETRIES_FOREVER, demand=demand)
        ref = submission.submit(driver.client, options, ())
        await driver.ready(ref)
        if driver.store.load(ref, True) != driver.groups[key].group:
            self._world.violation(f"the group {key} is not reserved")
        self.check()
        is_calm = all("slower" in one for one in self._cluster.faults)
        if is_calm and key not in self._whole:
            self._world.violation(f"the driver on {driver.node.host} read that group {key} is reserved, and it is not")

    async def remove(self, driver: Driver, key: str) -> None:
        """Remove a group, as `fastrt.remove_placement_group` does."""
        reserved = driver.groups.pop(key, None)
        if reserved is not None:
            self._world.say(f"{driver.node.host}: the group {key} is removed")
            driver.store.tell(messages.RemoveGroup(reserved.group.id))

    def demand(self, member: Member, spec: TaskSpec | ActorSpec, amounts: Amounts) -> Any:
        """The demand of a task or an actor in a group."""
        return export(member.store, Demand(within(amounts, self._groups[spec.group].id, spec.bundle)))

    # ---- invariants ----

    def _held(self, node: Node) -> list[Bundle]:
        """The bundles that a node holds, by its records."""
        found = []
        for actor, gen in actors.demanding(node.client):
            info = actors.info(node.client, actor)
            if info["bare"] and info["gen"] == gen and info["state"] == actors.LIVE:
                place = node.host, node.segment.session, actor, gen
                if place not in self._bundles:
                    try:
                        ref = handles.acquire(node.client, *info["demand"])
                    except StaleReferenceError:  # it is about to end
                        continue
                    demand = Demand.from_bytes(node.store.load(ref))
                    group, at, *_ = demand.bundle.split("/")
                    self._bundles[place] = Bundle(group, int(at), dict(demand.amounts)[SLOT])
                found.append(self._bundles[place])
        return found

    def check_node(self, node: Node) -> list[Bundle]:
        """Check what a node has reserved, and what its tasks take of that; return the bundles."""
        held = self._held(node) if node.daemons.is_alive else []  # nothing else reads its records here
        if sum(bundle.slots for bundle in held) > node.total.get(SLOT, 0):
            self._world.violation(f"{node.host} has {node.total}, and holds {held}")
        taken: dict[tuple[str, int], float] = {}
        for worker in node.workers:
            spec = self._cluster.program.tasks[worker.number] if worker.task >= 0 and worker.number > 0 else None
            if spec is not None and spec.group and spec.bundle >= 0:
                place = self._groups[spec.group].id, spec.bundle
                taken[place] = taken.get(place, 0) + spec.slots * RESOURCE_PARTS
        for bundle in held:
            if taken.get(bundle[:2], 0) > bundle.slots:
                self._world.violation(f"{node.host}: tasks take {taken[bundle[:2]]} parts of {bundle}")
        return held

    def check(self) -> None:
        """Check all nodes, and which groups are whole."""
        held = [bundle for node in self._cluster.nodes if node.alive for bundle in self.check_node(node)]
        there: dict[str, set[int]] = {}
        for bundle in held:
            there.setdefault(bundle.group, set()).add(bundle.index)
        now = self._world.now
        for key, group in self._groups.items():
            count = len(there.get(group.id, ()))
            if count == group.bundle_count:
                self._whole.add(key)
            if key in self._whole or not count:
                self._partial.pop(key, None)
            elif now - self._partial.setdefault(key, now) > PARTIAL_S and now > self._cluster.calm_at:
                self._world.violation(f"{count} of the {group.bundle_count} bundles of group {key} stay reserved")
