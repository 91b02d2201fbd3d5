"""Placement groups: resources of one node or several, reserved together for tasks and actors that name the group.

A group consists of bundles; each bundle lies on one node as a whole. A bundle is reserved by a record in the table of
actors, without a process. The record holds its resources as long as it lives, moves to another node when its node is
lost, and ends with the driver or the actor that made it. Tasks of the group demand resources under names that only such
nodes have.
A table of bundles would need a second copy of all that the actors' records have: names, owners, commit points, recovery
after a crash, and the way to another node. It would save only the names' prefix (`GROUP_NAME`) and the flag BARE.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fastrt._core.memory.clients import JOB_BITS
from fastrt._core.tasks import actors
from fastrt._core.tasks.submission import TaskOptions, submit
from fastrt.config import RESOURCE_PARTS, read_amount, read_memory, read_resources
from fastrt.errors import (
    ArgumentError,
    ConfigError,
    FastrtError,
    NameTakenError,
    NotFoundError,
    PlacementGroupNotFoundError,
)
from fastrt.store import client as store_client
from fastrt.store import join, messages
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import serialize
from fastrt.tasks import functions, namespaces, runtime_env
from fastrt.tasks.actor_handle import GROUP_NAME, ActorPlan, find_elsewhere, find_job
from fastrt.tasks.actor_records import kill_in
from fastrt.tasks.labels import is_selector
from fastrt.tasks.options import RETRIES_FOREVER
from fastrt.tasks.resources import (
    CPU,
    GPU,
    MEMORY,
    Amounts,
    Demand,
    Group,
    check_devices,
    export,
    in_words,
    parts_of,
    selecting,
    within,
)

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_RESERVED = "bundle"  # tasks of a group take it
_KNOWN_S = 2.0  # after which every node of the cluster is known
_LOOK_S = 0.05
_BUNDLES_MAX = 512  # a node knows 8,192 actors and bundles
_kept: dict[str, tuple[Store, list[ObjectRef]]] = {}  # references to bundles, by group


@dataclass(frozen=True, eq=False)
class PlacementGroup(Group):
    """Resources that are reserved together. Made by `placement_group`; can be passed to tasks and actors.

    Attributes:
        id: 36 hex digits.
        bundle_specs: the resources of each bundle, by name.
        strategy: how the bundles are spread over nodes.
        name: for `get_placement_group`; empty: none.
        session: the node where it was made.
    """

    id: str
    bundle_specs: list[dict[str, float]]
    strategy: str
    name: str
    session: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlacementGroup) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def bundle_count(self) -> int:
        """The number of bundles."""
        return len(self.bundle_specs)

    def ready(self) -> ObjectRef:
        """Return a reference that becomes the group when everything is reserved, or an error when it never will be.

        Raises:
            ObjectStoreFullError: there is no room for another task.
            NotFoundError: the node where it was made is lost, and the group with it.
        """
        store = store_client.require()
        if self.session != store.client.segment.session:
            return _there(store, self, _ready)
        return store.with_room(0, lambda: _await_group(store, self))

    @property
    def is_empty(self) -> bool:
        """Whether the group has no bundles: never."""
        return False

    def wait(self, timeout: float | None = 30.0, *, timeout_seconds: float | None = None) -> bool:
        """Wait until everything is reserved.

        Args:
            timeout: seconds; None: no limit.
            timeout_seconds: Ray's name for it.
        Returns:
            Whether it is.
        Raises:
            InfeasibleTaskError: it never will be.
            NotFoundError: the group was removed.
        """
        timeout = timeout if timeout_seconds is None else timeout_seconds
        store = store_client.require()
        ref = self.ready()
        if not store.wait([ref], 1, timeout)[0]:
            return False
        return bool(store.get(ref))

    def as_strategy(self, index: int, capture: bool) -> PlacementGroupSchedulingStrategy:
        """Return the strategy of a task that gets its resources from the group; arguments as for the class."""
        return _Option(self, index, capture)

    def inside(self, amounts: Amounts, index: int) -> Amounts:
        """Return the demand of a task that gets its resources from the bundle of that index; -1: from any.

        Raises:
            ValueError: no bundle has that much, or there is no such bundle.
        """
        if not -1 <= index < self.bundle_count:
            raise ValueError(
                f"placement group bundle index {index} is invalid: the group has {self.bundle_count} bundles"
            )
        bundles = [dict(_amounts(spec)) for spec in self.bundle_specs]
        able = bundles if index < 0 else [bundles[index]]
        if not any(all(bundle.get(name, 0) >= parts for name, parts in amounts) for bundle in able):
            which = "no bundle" if index < 0 else f"bundle {index} does not have it, which"
            has = "; ".join(in_words(bundle) for bundle in able)
            raise ValueError(f"{in_words(dict(amounts))} is demanded of a placement group, and {which} has it: {has}")
        return within(amounts, self.id, index)


@dataclass(frozen=True)
class PlacementGroupSchedulingStrategy:
    """Where a task or an actor gets its resources, for `scheduling_strategy=`.

    Attributes:
        placement_group: the group; None: in none, also where the groups of children are captured.
        placement_group_bundle_index: of the bundle; -1: any.
        placement_group_capture_child_tasks: whether the tasks and actors that it starts are in the group, too, in any
            bundle, and the ones that these start; options that say where to run take precedence.
    Source:
        The semantics of `ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy`.
    """

    placement_group: PlacementGroup | None
    placement_group_bundle_index: int = -1
    placement_group_capture_child_tasks: bool = False
    by_option: ClassVar[bool] = False  # whether it was given by the option `placement_group=`

    def __post_init__(self) -> None:
        if self.placement_group is not None and not isinstance(self.placement_group, PlacementGroup):
            raise ArgumentError(f"placement_group is {self.placement_group!r}; it must be made by placement_group()")
        if not isinstance(self.placement_group_capture_child_tasks, bool):
            raise TypeError("placement_group_capture_child_tasks must be True or False")


@dataclass(frozen=True)
class _Option(PlacementGroupSchedulingStrategy):
    by_option: ClassVar[bool] = True


def placement_group(
    bundles: Sequence[Mapping[str, float]],
    strategy: str | None = "PACK",
    name: str = "",
    lifetime: str | None = None,
    bundle_label_selector: Sequence[Mapping[str, str]] | None = None,
) -> PlacementGroup:
    """Reserve resources together. Returns at once; `.ready()` and `.wait()` report when they are reserved.

    It is made on this node; by a task whose program runs on another node on that one.

    Args:
        bundles: the resources of each, all from one node: [{"CPU": 1}, {"CPU": 1, "gpu": 0.5}].
        strategy: "PACK": on as few nodes as possible, "SPREAD": on as many; "STRICT_PACK": on one, "STRICT_SPREAD":
            each on another node, or not at all.
        name: for `get_placement_group`, on every node; in the namespace of the program, as the names of actors.
        lifetime: "detached": to the end of the session; else it ends with the driver or the actor that makes it, and
            one that a task makes with the task's driver.
        bundle_label_selector: for each bundle, which labels its node must have, as `label_selector=` of a task.
    Raises:
        ValueError, TypeError: a bundle, a selector or the strategy is invalid.
        NameTakenError: another group has the name.
        ObjectStoreFullError: there is no room for the records.
    Source:
        The semantics of `ray.util.placement_group`.
    """
    amounts = [_amounts(bundle) for bundle in _checked(bundles)]
    if bundle_label_selector is not None:
        if not isinstance(bundle_label_selector, (list, tuple)) or len(bundle_label_selector) != len(bundles):
            raise ValueError(f"bundle_label_selector must have a selector for each of the {len(bundles)} bundles")
        selectors = [selecting("bundle_label_selector", one) for one in bundle_label_selector]
        amounts = [tuple(sorted(one + selector)) for one, selector in zip(amounts, selectors, strict=True)]
    strategy = strategy or "PACK"
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}; it must be one of {', '.join(_STRATEGIES)}")
    if lifetime not in (None, "detached"):
        raise ValueError(f"lifetime is {lifetime!r}; it must be 'detached' or None")
    same: dict[Any, dict[str, float]] = {}  # equal bundles are one object, which pickle writes once into each record
    for bundle in bundles:
        same.setdefault(frozenset(bundle.items()), {name: float(amount) for name, amount in bundle.items()})
    specs = [same[frozenset(bundle.items())] for bundle in bundles]
    form = _Form(specs, amounts, strategy, name, _stored(name) if name else "", lifetime == "detached")
    store = store_client.require()
    node, job = (store.client.segment.session, 0) if form.detached else _job_here(store)
    if node == store.client.segment.session:
        return _make(store, form, job)
    return _made(node, form, job)


def remove_placement_group(group: PlacementGroup) -> None:
    """Give the group's resources back. Its actors end; its running tasks go on to their end.

    Waiting tasks that were submitted on the node where it was made become errors; those of other nodes wait until they
    are cancelled.

    Raises:
        TypeError: not a group.
        AttachError: the node daemon does not answer.
    Source:
        The semantics of `ray.util.remove_placement_group`.
    """
    if not isinstance(group, PlacementGroup):
        raise TypeError(f"remove_placement_group takes a placement group, not {type(group).__name__}")
    store = store_client.require()
    if group.session != store.client.segment.session:
        with contextlib.suppress(NotFoundError):  # it went with its node
            store.get(_there(store, group, remove_placement_group))
        return
    join.inquire(store.socket_path, messages.RemoveGroup(group.id), messages.GroupRemoved, patient=True)
    _kept.pop(group.id, None)


def placement_group_table(group: PlacementGroup | None = None) -> dict[str, Any]:
    """Return the state of a group of any node, or of all groups that were made on this node, by their ids.

    Returns:
        For each: placement_group_id, strategy, state ("PENDING", "CREATED", "RESCHEDULING" or "REMOVED"), bundles
        (by index), bundles_to_node_id, and stats: scheduling_state ("QUEUED", "SCHEDULING_STARTED", "NO_RESOURCES",
        "INFEASIBLE", "FINISHED" or "REMOVED"), scheduling_attempt (their number), and in milliseconds
        end_to_end_creation_latency_ms (0 until it is ready), scheduling_latency_ms (of the last attempt) and
        highest_retry_delay_ms.
    Raises:
        AttachError: the node daemon does not answer.
    Source:
        The semantics of `ray.util.placement_group_table`.
    """
    store = store_client.require()
    if group is not None and group.session != store.client.segment.session:
        with contextlib.suppress(NotFoundError):
            table: dict[str, Any] = store.get(_there(store, group, placement_group_table))
            return table
    found = groups_of(store)
    if group is None:
        return found
    gone = messages.GroupRow(
        f"{group.id}", group.strategy, "REMOVED", {}, {}, messages.GroupStats("REMOVED", 0, 0, 0, 0)
    )
    return found.get(group.id) or {**row_of(gone), "bundles": dict(enumerate(group.bundle_specs))}


def groups_of(store: Store) -> dict[str, dict[str, Any]]:
    """Return the rows of `placement_group_table` for the groups that were made on a node.

    Raises:
        AttachError: its daemon does not answer.
    """
    rows = join.inquire(store.socket_path, messages.ListGroups(), messages.GroupList, patient=True).groups
    return {row.group: row_of(row) for row in rows}


def names_of_groups(store: Store) -> dict[str, str]:
    """Return the names of a node's groups that have one, by their ids."""
    found: dict[str, str] = {}
    for whole in actors.names(store.client):
        ref = actors.find(store.client, whole) if whole.startswith(GROUP_NAME) else None
        if ref is not None:
            with contextlib.suppress(FastrtError):  # it was removed meanwhile
                found[store.load(ref).group.id] = namespaces.split(whole.removeprefix(GROUP_NAME))[1]
    return found


def _stored(name: str) -> str:
    """Return a group's name as its record has it: with the namespace of the code that runs here."""
    return GROUP_NAME + namespaces.stored(name, None)


def get_placement_group(name: str) -> PlacementGroup:
    """Return the group that was made under that name in this namespace, on any node of the cluster.

    Raises:
        PlacementGroupNotFoundError: there is none.
    Source:
        The semantics of `ray.util.get_placement_group`.
    """
    store = store_client.require()
    whole = _stored(name)
    ref = actors.find(store.client, whole) or find_elsewhere(store, whole)
    if ref is None:
        raise PlacementGroupNotFoundError(f"no placement group has the name {name!r} in this session")
    found: PlacementGroup = store.get(ref).group
    return found


def get_current_placement_group() -> PlacementGroup | None:
    """Return the group of the task or actor that calls this; None where there is none, as in a driver.

    Source:
        The semantics of `ray.util.get_current_placement_group`.
    """
    here = runtime_env.current()
    return None if here is None or here.strategy is None else here.strategy.placement_group


@dataclass(frozen=True)
class _Form:
    """A checked request for a group; `stored` is its name with the namespace, `detached` that it ends with no job."""

    specs: list[dict[str, float]]
    amounts: list[Amounts]
    strategy: str
    name: str
    stored: str
    detached: bool


def _job_here(store: Store) -> tuple[str, int]:
    """Return where a group is made, and the number there of the job that it ends with; 0: with this process.

    A worker lives on when the program ends whose task it has run, and a task may end long before its program. A driver
    has left before its groups end: tasks that wait for them have been cancelled then, and print no errors.
    """
    session = store.client.segment.session
    job = namespaces.job_here(store) if store.actor_here is None else 0
    if not job >> JOB_BITS:
        return session, job
    found = find_job(store, job)
    if found is None:
        return session, 0
    able = {row.node for row in _nodes(store).others if row.total}  # a node that leaves has none
    return found if found[0] in {session, *able} else (session, 0)


def _make(store: Store, form: _Form, job: int) -> PlacementGroup:
    from fastrt.ids import PlacementGroupID  # here: few programs need it

    if form.name and find_elsewhere(store, form.stored) is not None:
        raise _taken(form.name)
    session = store.client.segment.session
    group = PlacementGroup(PlacementGroupID.made_on(session), form.specs, form.strategy, form.name, session)
    refs = _record(store, group, form.amounts, form.detached, job, form.stored)
    if not (form.detached or job):
        for stale in [known for known, (session_store, _) in _kept.items() if session_store is not store]:
            del _kept[stale]
        _kept[group.id] = store, refs
        store.users.add(_keeper)
    if store.tell is not None:
        store.tell(messages.ActorsChanged())
    return group


def _made(node: str, form: _Form, job: int) -> PlacementGroup:
    """Have a group made on the node of the driver that it ends with."""
    from fastrt.tasks.remote import RemoteFunction

    made = store_client.require().get(RemoteFunction(_make_here, num_cpus=0, scheduling=node).remote(form, job))
    assert isinstance(made, PlacementGroup)
    return made


def _make_here(form: _Form, job: int) -> PlacementGroup:
    return _make(store_client.require(), form, job)


def _record(
    store: Store, group: PlacementGroup, amounts: Sequence[Amounts], detached: bool, job: int = 0, stored: str = ""
) -> list[ObjectRef]:
    """Make the records of a group's bundles, all or none; return the objects that keep them alive.

    Args:
        store: this process's.
        group: it.
        amounts: what each bundle reserves.
        detached: whether the records also live without references.
        job: whose end ends the group: the records live without references until then; 0: none.
        stored: its name with the namespace.
    """
    refs: list[ObjectRef] = []
    made: list[int] = []
    try:
        for k, one in enumerate(amounts):
            demand = export(store, Demand(one, bundle=f"{group.id}/{k}/{len(amounts)}/{group.strategy}/{job:x}"))
            called = f"placement group {group.name or group.id}"
            plan = ActorPlan(called, group.session, (), None, None, 0, 1, group=group, demand=demand)
            refs.append(store.put_serialized(serialize(plan)))
            named = stored if k == 0 else ""
            actor = actors.create(store.client, refs[k], 0, named, -1, detached or job > 0, demand, True)
            if actor is None:
                raise _taken(group.name)
            made.append(actor)
    except FastrtError:
        for actor in made:
            kill_in(store, actor, "there was no room for all of its placement group")
        if store.tell is not None:
            store.tell(messages.ActorsChanged())
        refs.clear()  # the traceback keeps this frame
        raise
    return refs


class _Keeper:
    """Drops the references to a session's groups when the session ends."""

    def forget(self) -> None:
        _kept.clear()


_keeper = _Keeper()


def _await_group(store: Store, group: PlacementGroup) -> ObjectRef:
    """Submit the task that the daemon ends when a group made on this node is reserved.

    The task waits like any task with a demand, so a daemon that takes over finds it. No worker ever runs it.
    """
    function, _ = functions.export(store, "placement_group.ready", _reserved)
    demand = export(store, Demand((), bundle=group.id))
    ref: ObjectRef = submit(store.client, TaskOptions(function, 1, RETRIES_FOREVER, demand=demand), ())
    return ref


def _reserved() -> None:
    """Never called; see `_await_group`."""


def _ready(group: PlacementGroup) -> PlacementGroup:
    group.wait(None)
    return group


def _taken(name: str) -> NameTakenError:
    return NameTakenError(f"a placement group with the name {name!r} is there already; choose another name")


def _there(store: Store, group: PlacementGroup, function: Callable[[PlacementGroup], object]) -> ObjectRef:
    """Call a function with a group on the node where it was made.

    Raises:
        NotFoundError: that node is not in the cluster. A new head gets some time to hear of all nodes.
    """
    from fastrt.tasks.remote import RemoteFunction

    until = time.monotonic() + _KNOWN_S
    while group.session not in [row.node for row in _nodes(store).others]:
        if time.monotonic() > until:
            raise NotFoundError(f"placement group {group.id} was made on node {group.session}, which is lost")
        threading.Event().wait(_LOOK_S)
    there = RemoteFunction(function, num_cpus=0, scheduling=group.session).remote(group)
    assert isinstance(there, ObjectRef)
    return there


def _nodes(store: Store) -> messages.NodeList:
    return join.inquire(store.socket_path, messages.ListNodes(), messages.NodeList, patient=True)


def row_of(row: messages.GroupRow) -> dict[str, Any]:
    """A group as in `placement_group_table`, from the daemon's answer."""
    bundles = {
        int(k): {name: parts / RESOURCE_PARTS for name, parts in amounts.items() if not is_selector(name)}
        for k, amounts in row.bundles.items()
    }
    nodes = {int(k): node for k, node in row.nodes.items()}
    about = {"placement_group_id": row.group, "strategy": row.strategy, "state": row.state}
    stats = {
        "end_to_end_creation_latency_ms": row.stats.total_s * 1000,
        "scheduling_latency_ms": row.stats.placing_s * 1000,
        "scheduling_attempt": row.stats.attempts,
        "highest_retry_delay_ms": row.stats.retry_s * 1000,
        "scheduling_state": row.stats.state,
    }
    return {**about, "bundles": bundles, "bundles_to_node_id": nodes, "stats": stats}


def _checked(bundles: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
    if not isinstance(bundles, (list, tuple)) or not all(isinstance(bundle, Mapping) for bundle in bundles):
        raise ArgumentError(f"bundles is {bundles!r}; it must be a list like [{{'CPU': 1}}]")
    if not 1 <= len(bundles) <= _BUNDLES_MAX:
        raise ValueError(f"there are {len(bundles)} bundles; there must be from 1 to {_BUNDLES_MAX}")
    return bundles


def _amounts(bundle: Mapping[str, float]) -> Amounts:
    """Return the resources of a bundle.

    Raises:
        ValueError: an amount is invalid, or all are 0.
    """
    others = {name: amount for name, amount in bundle.items() if str(name).upper() != CPU and name != MEMORY}
    try:
        amounts = read_resources("bundle", others)
        for name, amount in bundle.items():
            if str(name).upper() == CPU:
                amounts[CPU] = read_amount("bundle['CPU']", amount)
            elif name == MEMORY:
                amounts[MEMORY] = read_memory("bundle['memory']", amount)
    except ConfigError as exc:
        raise ValueError(str(exc)) from None
    check_devices("bundle", amounts)
    if _RESERVED in bundle:
        raise ValueError(f"a bundle is {dict(bundle)!r}; no resource can have the name {_RESERVED!r}")
    if not any(amounts.values()):
        raise ValueError(f"a bundle is {dict(bundle)!r}: it reserves nothing")
    assert GPU not in others or GPU in amounts or not others[GPU]
    return parts_of(amounts)
