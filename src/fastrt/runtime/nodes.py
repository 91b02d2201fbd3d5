"""The nodes and resources of the cluster, by the daemon of this machine's node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fastrt.config import RESOURCE_PARTS
from fastrt.store import client as store_client
from fastrt.store import engine as engines
from fastrt.store import join
from fastrt.store.messages import (
    DemandList,
    ListDemand,
    ListNodes,
    NodeList,
    NodeRow,
    RequestResources,
    ResourcesRequested,
)
from fastrt.tasks.labels import is_selector, selectors_of
from fastrt.tasks.resources import INSIDE, is_implied

_BUNDLES_MAX, _AMOUNT_MAX = 1000, 1e9


def nodes(implied: bool = False, lost: bool = False) -> list[dict[str, Any]]:
    """The nodes of the cluster, this one first.

    Args:
        implied: with the resources that each node has under names of Ray: `object_store_memory` in bytes,
            `node:<IP address>`, and on the head's node `node:__internal_head__`.
        lost: with the nodes that have left the cluster since this node joined it; at most 1000.
    Returns:
        A dict for each: NodeID (for `scheduling=`), NodeName, Alive (False: a node that has left),
        Resources and Available (amounts by name; memory in bytes), Labels, IsHere. Amounts available on other
        nodes are a moment old.
    Raises:
        AttachError: the daemon does not answer.
    Source:
        The semantics of `ray.nodes`.
    """
    other = engines.current()
    return other.nodes() if other is not None else nodes_at(store_client.require().socket_path, True, implied, lost)


def nodes_at(
    socket_path: str, patient: bool = False, implied: bool = False, lost: bool = False
) -> list[dict[str, Any]]:
    """`nodes` by the daemon at that socket; `patient` as for `join.inquire`, `implied` and `lost` as for `nodes`.

    Raises:
        AttachError: the daemon does not answer.
    """
    answer = join.inquire(socket_path, ListNodes(), NodeList, patient=patient)
    found = [_about(row, k == 0, implied) for k, row in enumerate([answer.here, *answer.others])]
    return found + [{**_about(row, False, implied), "Alive": False} for row in (answer.lost if lost else ())]


def waiting_demand() -> dict[str, Any]:
    """The tasks, actors and placement groups of this node that wait for resources: what further nodes could run.

    The counts are exact at the moment of the call. A task waits on the node where it was submitted until a node has
    room for it, so a cluster with drivers on several nodes has several such lists.

    Returns:
        A dict with

        - tasks: a list of dicts: kind ("task" or "actor"), resources (amounts by name), label_selector,
          fallback_selectors (tried in order), scheduling ("", "spread", "pack" or a node), is_soft (whether another
          node may run it), count, and is_feasible (whether a node that is there could run one when it is idle);
        - placement_groups: a list of dicts: strategy, and bundles (amounts by name) that have no node yet;
        - queued_tasks: how many tasks wait for nothing but a worker;
        - requested: a list of amounts by name, of the last `request_resources`;
        - more: how many tasks and actors with other demands wait, if there are more than 1,000 different ones.
    Raises:
        AttachError: the daemon does not answer.
        NotImplementedError: the engine is not fastrt's.
    """
    if engines.current() is not None:
        raise NotImplementedError("waiting_demand reads the daemon of a fastrt session; another engine has none")
    return demand_at(store_client.require().socket_path, True)


def demand_at(socket_path: str, patient: bool = False) -> dict[str, Any]:
    """`waiting_demand` by the daemon at that socket; `patient` as for `join.inquire`.

    Raises:
        AttachError: the daemon does not answer.
    """
    answer = join.inquire(socket_path, ListDemand(), DemandList, patient=patient)
    groups = []
    for row in answer.groups:
        bundles = [_amounts(parts) for index, parts in sorted(row.bundles.items()) if not row.nodes.get(index)]
        if bundles:
            groups.append({"strategy": row.strategy, "bundles": bundles})
    tasks = [
        {
            "kind": row.kind,
            "resources": _amounts(row.amounts),
            "label_selector": next(iter(_selectors(row.amounts)), {}),
            "fallback_selectors": _selectors(row.amounts)[1:],
            "scheduling": row.node or row.strategy,
            "is_soft": row.soft or not row.node,
            "count": row.waiting,
            "is_feasible": row.is_feasible,
        }
        for row in answer.rows
    ]
    requested = [_amounts(parts) for parts in answer.requested]
    more = {"queued_tasks": answer.queued, "requested": requested, "more": answer.others}
    return {"tasks": tasks, "placement_groups": groups, **more}


def request_resources(bundles: Sequence[Mapping[str, float]]) -> None:
    """Ask for resources that the cluster should have in all, busy or not, in `waiting_demand`.

    Args:
        bundles: amounts by name; they replace those of the last call on this
            node. Empty: none. The node's daemon has them until it ends.
    Raises:
        ValueError: an amount is not a number of at least 0, or there are more than 1,000 bundles.
        AttachError: the daemon does not answer.
    """
    if len(bundles) > _BUNDLES_MAX:
        raise ValueError(f"{len(bundles)} bundles are requested; at most {_BUNDLES_MAX} are allowed")
    parts = []
    for bundle in bundles:
        if not all(isinstance(name, str) and 0 <= amount < _AMOUNT_MAX for name, amount in bundle.items()):
            raise ValueError(f"amounts of resources must be numbers from 0 to {_AMOUNT_MAX:g}, not {dict(bundle)}")
        parts.append({name: round(amount * RESOURCE_PARTS) for name, amount in bundle.items()})
    join.inquire(store_client.require().socket_path, RequestResources(parts), ResourcesRequested, patient=True)


def _selectors(parts_of: Mapping[str, int]) -> list[dict[str, str]]:
    return [one for name in parts_of if is_selector(name) for one in selectors_of(name)]


def _amounts(parts_of: Mapping[str, int]) -> dict[str, float]:
    return {name: parts / RESOURCE_PARTS for name, parts in parts_of.items() if not is_selector(name)}


def cluster_resources(implied: bool = False) -> dict[str, float]:
    """The resources of all nodes together, in amounts by name; `implied` as for `nodes`.

    Raises:
        AttachError: the daemon does not answer.
    Source:
        The semantics of `ray.cluster_resources`.
    """
    return _sum("Resources", implied)


def available_resources(implied: bool = False) -> dict[str, float]:
    """The part of `cluster_resources` that is not in use, without names whose amount is 0; `implied` as for `nodes`.

    Raises:
        AttachError: the daemon does not answer.
    Source:
        The semantics of `ray.available_resources`.
    """
    return {name: amount for name, amount in _sum("Available", implied).items() if amount}


def _about(row: NodeRow, is_here: bool, implied: bool) -> dict[str, Any]:
    node, name, total, free, labels = row
    # Without the amounts of placement groups, which are part of the node's, and without the marks of selectors.
    amounts = [
        {
            key: parts / RESOURCE_PARTS
            for key, parts in parts_of.items()
            if INSIDE not in key and not is_selector(key) and (implied or not is_implied(key))
        }
        for parts_of in (total, free)
    ]
    about = {"NodeID": node, "NodeName": name, "Alive": True, "IsHere": is_here}
    return {**about, "Resources": amounts[0], "Available": amounts[1], "Labels": dict(labels)}


def _sum(which: str, implied: bool) -> dict[str, float]:
    total: Counter[str] = Counter()
    for node in nodes(implied):
        for name, amount in node[which].items():
            total[name] += round(amount * RESOURCE_PARTS)
    return {name: parts / RESOURCE_PARTS for name, parts in total.items()}
