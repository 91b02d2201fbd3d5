"""Demands of tasks and actors: resources, and where to run.

The common task needs one CPU on any node and has no demand at all: there is one worker for each CPU. Every other task
carries a reference to an object with its demand, for the daemon and for other nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from fastrt._core.objects import functions
from fastrt.config import RESOURCE_PARTS, read_amount, read_memory, read_resources
from fastrt.devices import RESOURCES as DEVICES
from fastrt.errors import ArgumentError, ConfigError
from fastrt.foreign_text import SETTINGS_BYTES_MAX, read_json
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.tasks import label_strategy, labels

CPU = "CPU"
GPU = "GPU"
SPREAD = "spread"
PACK = "pack"
INSIDE = "@"  # in names of resources that a placement group has, before the group's
_PLACES = ("scheduling", "scheduling_strategy")
_SELECTOR, _FALLBACK = "label_selector", "fallback_strategy"
MEMORY = "memory"  # in bytes
STORE_MEMORY = "object_store_memory"  # of a node, in bytes; for people: nothing demands it
NODE = "node:"  # each node has 1 of "node:<its IP address>"
HEAD = "node:__internal_head__"  # the node with the head has 1; so does a session without a cluster
OPTIONS = ("num_cpus", "num_gpus", MEMORY, "resources", *_PLACES, _SELECTOR, _FALLBACK)
Amounts = tuple[tuple[str, int], ...]  # in parts, see `fastrt.config.RESOURCE_PARTS`; in order of name
ONE_CPU: Amounts = ((CPU, RESOURCE_PARTS),)
_A_BUNDLE = "bundle"  # every task of a group takes some of it, also if it takes nothing else
_CHOICES_KEPT = 4096
_FEW = 400  # the demand of so many resources, whose names have limits, is never too long
_BUNDLE_USE, _BUNDLE_USES = 1, 10_000  # how much one task takes, and how many tasks there may be


@dataclass(frozen=True)
class NodeAffinity:
    """One node for a task, for `scheduling_strategy=`.

    Attributes:
        node_id: the node's id, as `fastrt.nodes()` has it, or its name.
        soft: whether another node may run the task when that node is gone, or could never run it.
    Source:
        The semantics of `ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy`, which is accepted, too.
    """

    node_id: str
    soft: bool = False


class Group:
    """A placement group: reserved resources for tasks and actors."""

    def inside(self, amounts: Amounts, index: int) -> Amounts:
        """Return the demand of a task that gets its resources from this group, from the bundle of that index; -1: any.

        Raises:
            ValueError: the group does not have that much.
        """
        raise NotImplementedError

    def as_strategy(self, index: int, capture: bool) -> Any:
        """Return the strategy of a task that gets its resources from the group.

        Args:
            index: of the bundle; -1: any.
            capture: whether tasks that it starts are in the group, too.
        Raises:
            TypeError: `capture` is not a bool.
        """
        raise NotImplementedError


class Demand(NamedTuple):
    """The demand of one task or actor.

    Attributes:
        amounts: of resources by name.
        strategy: empty, `spread` or `pack`.
        node: the id or name of the only node that it may run on; empty: any.
        soft: whether it may run on others when that node cannot run it.
        bundle: of a bundle's record: "group/index/count/strategy/job", see `tasks.placement_group`; `job` is the number
            in hexadecimal digits of the job that the group ends with, 0: none. Of a task without amounts: the group
            whose reservation it waits for.
    """

    amounts: Amounts
    strategy: str = ""
    node: str = ""
    soft: bool = False
    bundle: str = ""

    @property
    def bundle_group(self) -> str:
        """The placement group that `bundle` names; empty: none."""
        return self.bundle.split("/")[0]

    def to_bytes(self) -> bytes:
        """Return the demand as bytes, in the form that nodes send to each other."""
        return json.dumps(self).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Demand:
        """Read a demand that `to_bytes` wrote.

        Raises:
            ValueError: the bytes are no demand.
        """
        try:
            amounts, strategy, node, soft, bundle = read_json(data, "a demand", bytes_max=SETTINGS_BYTES_MAX)
            checked = tuple(sorted((str(name), int(amount)) for name, amount in amounts))
            if any(amount < 0 for _, amount in checked):
                raise ValueError("it demands less than nothing")
            return cls(checked, str(strategy), str(node), bool(soft), str(bundle))
        except (TypeError, ValueError) as exc:
            raise ValueError(f"{data[:100]!r} is no demand: {exc}") from None


NOTHING = Demand(())  # of an actor by default


def demand_of(options: Mapping[str, Any]) -> Demand | None:
    """Read the options of a remote function that make the demand of its tasks.

    Args:
        options: any of OPTIONS; None means "not given".
    Returns:
        The demand; None for one CPU anywhere.
    Raises:
        TypeError: a strategy is invalid, or two are given.
        ArgumentError: an amount is no number, or out of range; a TypeError and a ValueError.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        amounts = read_resources("resources", given.get("resources", {}))
        amounts[CPU] = read_amount("num_cpus", given.get("num_cpus", 1))
        if "num_gpus" in given:
            if GPU in amounts:
                raise ValueError("give num_gpus or a GPU among the resources, not both")
            amounts[GPU] = read_amount("num_gpus", given["num_gpus"])
        amounts[MEMORY] = read_memory(MEMORY, given.get(MEMORY, 0))
    except ConfigError as exc:
        raise ArgumentError(str(exc)) from None
    check_devices("num_gpus or resources", amounts)
    if "scheduling" in given and "scheduling_strategy" in given:
        raise TypeError("scheduling and scheduling_strategy are two names for one option: give one of them")
    name = "scheduling" if "scheduling" in given else "scheduling_strategy"
    value = given.get(name, "default")
    selectors = selecting(_SELECTOR, given.get(_SELECTOR), given.get(_FALLBACK, ()))
    if label_strategy.is_strategy(value):
        if selectors:
            raise ArgumentError(f"give {_SELECTOR} or a NodeLabelSchedulingStrategy, not both")
        selectors, value = ((label_strategy.resource_of(name, value), 1),), "default"
    if group_strategy(given) is not None:
        inside: Amounts = value.placement_group.inside(parts_of(amounts), value.placement_group_bundle_index)
        return _of_bounded_length(Demand(tuple(sorted(inside + selectors))))
    demand = Demand(tuple(sorted(parts_of(amounts) + selectors)), *_strategy(name, value))
    return None if demand == Demand(ONE_CPU) else _of_bounded_length(demand)


def _of_bounded_length(demand: Demand) -> Demand:
    count = len(demand.amounts)
    if count > _FEW and len(demand.to_bytes()) > SETTINGS_BYTES_MAX:
        raise ArgumentError(f"the names of {count} resources are too long together for one demand; ask for fewer")
    return demand


def selecting(option: str, selector: Any, fallbacks: Any = ()) -> Amounts:
    """Return what a selector adds to the amounts of a demand; nothing for None, and for one that names no label.

    Args:
        option: name of the selector, for messages.
        selector: wanted values by label.
        fallbacks: `fallback_strategy`: [{"label_selector": a selector}, ...].

    Raises:
        TypeError, ValueError: it is no selector, see `labels.resource_of`, or a fallback is something else.
    """
    if not isinstance(fallbacks, (list, tuple)):
        raise TypeError(f"{_FALLBACK} is {fallbacks!r}; it must be a list such as [{{'{_SELECTOR}': {{...}}}}]")
    for one in fallbacks:
        if not isinstance(one, Mapping) or list(one) != [_SELECTOR]:
            raise ValueError(f"{_FALLBACK} has {one!r}; each must be a dict with the key {_SELECTOR!r}, and no other")
    if selector is None or selector == {}:
        return ()
    return ((labels.resource_of(option, selector, [one[_SELECTOR] for one in fallbacks]), 1),)


@lru_cache(_CHOICES_KEPT)
def choices_of(demand: Demand) -> tuple[Demand, ...]:
    """Return the demands that are tried in order: one for each selector of one that has fallbacks, else itself."""
    for name, parts in demand.amounts:
        several = labels.choices(name) if labels.is_selector(name) else []
        if len(several) > 1:
            others = [amount for amount in demand.amounts if amount[0] != name]
            return tuple(demand._replace(amounts=tuple(sorted([*others, (one, parts)]))) for one in several)
    return (demand,)


@lru_cache(_CHOICES_KEPT)
def selectors_of(demand: Demand) -> tuple[str, ...]:
    """Return the resources that stand for selectors of a demand, and for each of their fallbacks."""
    several = {demand, *choices_of(demand)}
    return tuple(dict.fromkeys(name for one in several for name, _ in one.amounts if labels.is_selector(name)))


def group_strategy(options: Mapping[str, Any]) -> Any:
    """Return the strategy of options that name a placement group; None when they name none."""
    for name in _PLACES:
        if isinstance(getattr(options.get(name), "placement_group", None), Group):
            return options[name]
    return None


def place_given(options: Mapping[str, Any]) -> bool:
    """Return whether options say where to run."""
    return any(options.get(name) is not None for name in _PLACES)


def demand_of_actor(options: Mapping[str, Any]) -> Demand | None:
    """Read the demand of an actor while it lives: no CPU by default, as it has a process of its own.

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
    return None if demand == NOTHING else demand


def export(store: Store, demand: Demand) -> ObjectRef:
    """Return the object of a demand. There is one for each different demand; it is kept like a function's object.

    The demand of a placement group's task lives only as long as references to it.
    """
    data = demand.to_bytes()
    if demand.bundle or group_of(demand):  # one for each group would fill the table: its tasks keep it
        return store.put(data)
    import hashlib  # here: it loads OpenSSL, which most processes never need

    digest = hashlib.blake2b(data, digest_size=16, person=b"demand").digest()
    found: ObjectRef | None = functions.find_function(store.client, digest)
    if found is None:
        found = functions.add_function(store.client, digest, store.put(data), "a demand")
    return found


def parts_of(amounts: Mapping[str, float]) -> Amounts:
    """Return amounts in the parts that they are counted in; those of 0 are left out."""
    counted = ((name, round(amount * RESOURCE_PARTS)) for name, amount in sorted(amounts.items()))
    return tuple((name, parts) for name, parts in counted if parts)


def within(amounts: Amounts, group: str, index: int) -> Amounts:
    """Return the amounts that a task demands which gets its resources from a placement group.

    Args:
        amounts: its amounts without a group.
        group: the group's id.
        index: of the bundle; -1: any.
    """
    wanted = [*amounts, (_A_BUNDLE, _BUNDLE_USE)]
    found = [(f"{name}{INSIDE}{group}", parts) for name, parts in wanted]
    if index >= 0:
        found += [(f"{name}{INSIDE}{group}/{index}", parts) for name, parts in wanted]
    return tuple(sorted(found))


def bundle_name(group: str, index: int) -> str:
    """Return the name of the resource that a node has exactly while that bundle of a group can be used there."""
    return f"{_A_BUNDLE}{INSIDE}{group}/{index}"


def given_by(demand: Demand) -> Amounts:
    """Return the amounts that a node has for tasks of a placement group while this bundle is reserved there."""
    if not demand.bundle:
        return ()
    group, index, *_ = demand.bundle.split("/")
    plain = [amount for amount in demand.amounts if not labels.is_selector(amount[0])]
    whole = [*plain, (_A_BUNDLE, _BUNDLE_USES * _BUNDLE_USE)]
    names = (f"{INSIDE}{group}", f"{INSIDE}{group}/{index}")
    return tuple((name + where, parts) for name, parts in whole for where in names)


@lru_cache(_CHOICES_KEPT)
def group_of(demand: Demand) -> str:
    """Return the placement group that a task gets its resources from; empty: none."""
    return next((name.split(INSIDE)[1].split("/")[0] for name, _ in demand.amounts if INSIDE in name), "")


def kind_of(name: str) -> str:
    """Return the resource that an amount's name is of: "GPU" of "GPU", and of "GPU@group/0" in a placement group."""
    return name.partition(INSIDE)[0]


@lru_cache(_CHOICES_KEPT)
def device_amounts(amounts: Amounts) -> Amounts:
    """Return those of some amounts that are of devices such as GPUs."""
    return tuple((name, parts) for name, parts in amounts if kind_of(name) in DEVICES)


def device_parts(amounts: Amounts) -> int:
    """Return how many parts of each of its devices a process with these amounts takes; 0: it has no devices."""
    return max((min(parts, RESOURCE_PARTS) for _, parts in device_amounts(amounts)), default=0)


def check_devices(option: str, amounts: Mapping[str, float]) -> None:
    """Refuse parts of more than one device: a task has whole devices, or a part of one.

    Raises:
        ValueError: an amount of devices is neither whole nor below 1.
    """
    for name, amount in amounts.items():
        if name in DEVICES and amount > 1 and amount != int(amount):
            raise ValueError(f"{option}: {amount} of {name}; it must be a whole number, or less than one device")


def by_name(amounts: Amounts) -> dict[str, float]:
    """Return amounts under the names of the program, for resources of a node and of a placement group."""
    found: dict[str, float] = {}
    for name, parts in amounts:
        plain, inside, group = name.partition(INSIDE)
        if labels.is_selector(name):
            continue
        if "/" not in group and not (inside and plain == _A_BUNDLE):  # a bundle's are its group's, too
            found[plain] = parts / RESOURCE_PARTS
    return found


def cpus_of(demand: Demand) -> float:
    """Return how many CPUs a task with this demand has, of its node or of a placement group's bundle."""
    return by_name(demand.amounts).get(CPU, 0.0)


def in_words(amounts: Mapping[str, int]) -> str:
    """Return amounts as text for messages: "CPU 2, gpu 0.5, memory 512.0 MiB"."""
    plain = [(name, parts) for name, parts in sorted(amounts.items()) if not labels.is_selector(name)]
    shown = (
        ", ".join(f"{name} {shown_amount(name, parts / RESOURCE_PARTS)}" for name, parts in plain if INSIDE not in name)
        or "nothing"
    )
    selectors = [labels.in_words(name) for name in amounts if labels.is_selector(name)]
    return shown + (f" where {'; '.join(selectors)}" if selectors else "")


def lacking(demand: Demand, nodes: Sequence[tuple[str, Mapping[str, int]]]) -> str:
    """Say what a demand asks for that none of some nodes has, and what the nodes have; each is (name, amounts)."""
    named = {name for name, _ in demand.amounts}
    there = "; ".join(
        f"{node}: {in_words({name: n for name, n in total.items() if name in named or not is_implied(name)})}"
        for node, total in nodes
    )
    wanted = in_words(dict(demand.amounts)) + (f" on node {demand.node!r}" if demand.node else "")
    return f"{wanted}, which no node has ({there})"


def is_implied(name: str) -> bool:
    """Whether a resource is one that each node has by itself, under a name of Ray, and that few programs demand."""
    return name == STORE_MEMORY or name.startswith(NODE)


def shown_amount(name: str, amount: float) -> str:
    """Return an amount as text: "2", "0.5"; of memory "512.0 MiB"."""
    return f"{amount / (1 << 20):,.1f} MiB" if name in (MEMORY, STORE_MEMORY) else f"{amount:g}"


def _strategy(option: str, value: Any) -> tuple[str, str, bool]:
    """Return (strategy, node, soft) of the user's option."""
    if getattr(value, "placement_group", value) is None:  # outside of any group
        value = "default"
    if isinstance(value, str) and value:
        word = value.lower()
        if word in (SPREAD, PACK, "default"):
            return "" if word == "default" else word, "", False
        return "", labels.with_own_ids(value), False
    node, soft = getattr(value, "node_id", None), getattr(value, "soft", False)
    if isinstance(node, str) and node:
        return "", labels.with_own_ids(node), bool(soft)
    raise TypeError(f"{option} is {value!r}; it must be 'spread', 'pack', a node's name or id, or a strategy")
