"""What a task demands: resources, and where it wants to run.

A task that demands one CPU and is content with any place is the common one, and has no demand at all: there is one
worker for each CPU. Every other carries a reference to an object that says it, for the daemon and for other nodes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastrt._core import functions
from fastrt.config import RESOURCE_PARTS, read_amount, read_resources
from fastrt.errors import ConfigError
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef

CPU = "CPU"
GPU = "GPU"
SPREAD = "spread"
PACK = "pack"
OPTIONS = ("num_cpus", "num_gpus", "resources", "scheduling", "scheduling_strategy")
Amounts = tuple[tuple[str, int], ...]  # in parts, see `fastrt.config.RESOURCE_PARTS`; in order of name
ONE_CPU: Amounts = ((CPU, RESOURCE_PARTS),)


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


class Demand(NamedTuple):
    """What one task demands.

    Attributes:
        amounts: of resources by name.
        strategy: empty, `spread` or `pack`.
        node: the id or name of the only node that will do; empty: any.
        soft: whether others will do when that one cannot.
    """

    amounts: Amounts
    strategy: str = ""
    node: str = ""
    soft: bool = False

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
            amounts, strategy, node, soft = json.loads(data)
            checked = tuple(sorted((str(name), int(amount)) for name, amount in amounts))
            if any(amount < 0 for _, amount in checked):
                raise ValueError("it demands less than nothing")
            return cls(checked, str(strategy), str(node), bool(soft))
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
    demand = Demand(parts_of(amounts), *_strategy(name, given.get(name, "default")))
    return None if demand == Demand(ONE_CPU) else demand


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
    """The object that says what a task demands: one for each demand, among the functions, and for as long as these."""
    data = demand.to_bytes()
    digest = hashlib.blake2b(data, digest_size=16, person=b"demand").digest()
    found: ObjectRef | None = functions.find_function(store.client, digest)
    if found is None:
        found = functions.add_function(store.client, digest, store.put(data), "a demand")
    return found


def parts_of(amounts: Mapping[str, float]) -> Amounts:
    """Amounts as they are counted; those of 0 are left out."""
    counted = ((name, round(amount * RESOURCE_PARTS)) for name, amount in sorted(amounts.items()))
    return tuple((name, parts) for name, parts in counted if parts)


def in_words(amounts: Mapping[str, int]) -> str:
    """Amounts for people: "CPU 2, gpu 0.5"."""
    return ", ".join(f"{name} {parts / RESOURCE_PARTS:g}" for name, parts in sorted(amounts.items())) or "nothing"


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
