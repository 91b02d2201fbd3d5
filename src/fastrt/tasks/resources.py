"""What a task demands: resources, and where it wants to run.

A task that demands one CPU and is content with any place is the common one, and has no demand at all: there is one
worker for each CPU. Every other carries a reference to an object that says it, for the daemon and for other nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastrt._core.objects import functions
from fastrt.config import RESOURCE_PARTS, read_amount, read_resources
from fastrt.errors import ConfigError
from fastrt.foreign_text import read_json
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef

CPU = "CPU"
GPU = "GPU"
SPREAD = "spread"
PACK = "pack"
INSIDE = "@"  # in names of resources that a placement group has, before the group's
_PLACES = ("scheduling", "scheduling_strategy")
OPTIONS = ("num_cpus", "num_gpus", "resources", *_PLACES)
Amounts = tuple[tuple[str, int], ...]  # in parts, see `fastrt.config.RESOURCE_PARTS`; in order of name
ONE_CPU: Amounts = ((CPU, RESOURCE_PARTS),)
_A_BUNDLE = "bundle"  # that a task is in one, also if it takes nothing
_BUNDLE_USE, _BUNDLE_USES = 1, 10_000  # how much of that one task takes, and how many there may be


@dataclass(frozen=True)
class NodeAffinity:
    """A task's wish for one node, for `scheduling_strategy=`.

    Attributes:
        node_id: the node's id, as `fastrt.nodes()` has it, or its name.
        soft: whether another will do when that node is gone, or could never run the task.
    Source:
        The semantics of `ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy`, which is taken, too.
    """

    node_id: str
    soft: bool = False


class Group:
    """Something that has resources of its own to give to tasks: a placement group."""

    def inside(self, amounts: Amounts, index: int) -> Amounts:
        """What a task demands that shall have its resources from here, from the part of that index; -1: any.

        Raises:
            ValueError: it has not that much.
        """
        raise NotImplementedError


class Demand(NamedTuple):
    """What one task demands.

    Attributes:
        amounts: of resources by name.
        strategy: empty, `spread` or `pack`.
        node: the id or name of the only node that will do; empty: any.
        soft: whether others will do when that one cannot.
        bundle: of what is reserved for a placement group: which part of which group it is; see `tasks.placement`. Of a
            task: the group that it waits for, and that is all.
    """

    amounts: Amounts
    strategy: str = ""
    node: str = ""
    soft: bool = False
    bundle: str = ""

    def to_bytes(self) -> bytes:
        """As one node tells another."""
        return json.dumps(self).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Demand:
        """What `to_bytes` wrote.

        Raises:
            ValueError: it did not write that.
        """
        try:
            amounts, strategy, node, soft, bundle = read_json(data, "a demand")
            checked = tuple(sorted((str(name), int(amount)) for name, amount in amounts))
            if any(amount < 0 for _, amount in checked):
                raise ValueError("it demands less than nothing")
            return cls(checked, str(strategy), str(node), bool(soft), str(bundle))
        except (TypeError, ValueError) as exc:
            raise ValueError(f"{data[:100]!r} is no demand: {exc}") from None


def demand_of(options: Mapping[str, Any]) -> Demand | None:
    """Read the options of a remote function that say what its tasks demand.

    Args:
        options: any of OPTIONS; None means "not given".
    Returns:
        The demand; None for one CPU anywhere.
    Raises:
        TypeError: a strategy is none, or two are given.
        ValueError: an amount is out of range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        amounts = read_resources("resources", given.get("resources", {}))
        amounts[CPU] = read_amount("num_cpus", given.get("num_cpus", 1))
        if "num_gpus" in given:
            if GPU in amounts:
                raise ValueError("give num_gpus or a GPU among the resources, not both")
            amounts[GPU] = read_amount("num_gpus", given["num_gpus"])
    except ConfigError as exc:
        raise ValueError(str(exc)) from None
    if "scheduling" in given and "scheduling_strategy" in given:
        raise TypeError("scheduling and scheduling_strategy are two names for one option: give one of them")
    name = "scheduling" if "scheduling" in given else "scheduling_strategy"
    value = given.get(name, "default")
    if group_strategy(given) is not None:
        inside: Amounts = value.placement_group.inside(parts_of(amounts), value.placement_group_bundle_index)
        return Demand(inside)
    demand = Demand(parts_of(amounts), *_strategy(name, value))
    return None if demand == Demand(ONE_CPU) else demand


def group_strategy(options: Mapping[str, Any]) -> Any:
    """What options say of a placement group; None when they name none."""
    for name in _PLACES:
        if isinstance(getattr(options.get(name), "placement_group", None), Group):
            return options[name]
    return None


def place_given(options: Mapping[str, Any]) -> bool:
    """Whether options say where to run."""
    return any(options.get(name) is not None for name in _PLACES)


def demand_of_actor(options: Mapping[str, Any]) -> Demand | None:
    """Read what an actor takes while it lives: no CPU unless it says so, as it has a process of its own.

    Args:
        options: as for `demand_of`, among others.
    Returns:
        The demand; None for nothing, anywhere.
    Raises:
        TypeError, ValueError: as `demand_of`.
    """
    given = {name: options[name] for name in OPTIONS if options.get(name) is not None}
    demand = demand_of({"num_cpus": 0, **given})
    if demand is None:
        return Demand(ONE_CPU)
    return None if demand == Demand(()) else demand


def export(store: Store, demand: Demand) -> ObjectRef:
    """The object that says what a task demands: one for each demand, among the functions, and for as long as these.

    Of a placement group's it lives as long as it is held.
    """
    data = demand.to_bytes()
    if demand.bundle or group_of(demand):  # one for each group would fill the table: whoever demands it keeps it
        return store.put(data)
    import hashlib  # here: it loads OpenSSL, which most processes never need

    digest = hashlib.blake2b(data, digest_size=16, person=b"demand").digest()
    found: ObjectRef | None = functions.find_function(store.client, digest)
    if found is None:
        found = functions.add_function(store.client, digest, store.put(data), "a demand")
    return found


def parts_of(amounts: Mapping[str, float]) -> Amounts:
    """Amounts as they are counted; those of 0 are left out."""
    counted = ((name, round(amount * RESOURCE_PARTS)) for name, amount in sorted(amounts.items()))
    return tuple((name, parts) for name, parts in counted if parts)


def within(amounts: Amounts, group: str, index: int) -> Amounts:
    """What a task demands that shall have these amounts from a placement group.

    Args:
        amounts: what it would take of a node.
        group: which one.
        index: of the bundle; -1: any.
    """
    wanted = [*amounts, (_A_BUNDLE, _BUNDLE_USE)]
    found = [(f"{name}{INSIDE}{group}", parts) for name, parts in wanted]
    if index >= 0:
        found += [(f"{name}{INSIDE}{group}/{index}", parts) for name, parts in wanted]
    return tuple(sorted(found))


def bundle_name(group: str, index: int) -> str:
    """The resource that a node has exactly while that bundle of a placement group can be used there."""
    return f"{_A_BUNDLE}{INSIDE}{group}/{index}"


def given_by(demand: Demand) -> Amounts:
    """What a node has for tasks of a placement group because this bundle of it is reserved there."""
    if not demand.bundle:
        return ()
    group, index, *_ = demand.bundle.split("/")
    whole = [*demand.amounts, (_A_BUNDLE, _BUNDLE_USES * _BUNDLE_USE)]
    names = (f"{INSIDE}{group}", f"{INSIDE}{group}/{index}")
    return tuple((name + where, parts) for name, parts in whole for where in names)


def group_of(demand: Demand) -> str:
    """The placement group that a task demands something of; empty: none."""
    return next((name.split(INSIDE)[1].split("/")[0] for name, _ in demand.amounts if INSIDE in name), "")


def by_name(amounts: Amounts) -> dict[str, float]:
    """Amounts under the names that the program gave them, wherever they come from: the node or a placement group."""
    found: dict[str, float] = {}
    for name, parts in amounts:
        plain, inside, group = name.partition(INSIDE)
        if "/" not in group and not (inside and plain == _A_BUNDLE):  # what is of one bundle is of its group, too
            found[plain] = parts / RESOURCE_PARTS
    return found


def cpus_of(demand: Demand) -> float:
    """CPUs that a task with this demand has, of its node or of a placement group's bundle."""
    return by_name(demand.amounts).get(CPU, 0.0)


def in_words(amounts: Mapping[str, int]) -> str:
    """Amounts for people: "CPU 2, gpu 0.5"."""
    shown = ((name, parts / RESOURCE_PARTS) for name, parts in sorted(amounts.items()) if INSIDE not in name)
    return ", ".join(f"{name} {amount:g}" for name, amount in shown) or "nothing"


def _strategy(option: str, value: Any) -> tuple[str, str, bool]:
    """(strategy, node, soft) of what the user wrote."""
    if isinstance(value, str) and value:
        word = value.lower()
        if word in (SPREAD, PACK, "default"):
            return "" if word == "default" else word, "", False
        return "", value, False
    node, soft = getattr(value, "node_id", None), getattr(value, "soft", False)
    if isinstance(node, str) and node:
        return "", node, bool(soft)
    raise TypeError(f"{option} is {value!r}; it must be 'spread', 'pack', a node's name or id, or a NodeAffinity")
