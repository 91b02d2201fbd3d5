"""The nodes and resources of the cluster, by the daemon of this machine's node."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fastrt.config import RESOURCE_PARTS
from fastrt.store import client as store_client
from fastrt.store import engine as engines
from fastrt.store import join
from fastrt.store.messages import ListNodes, NodeList, NodeRow
from fastrt.tasks.labels import is_selector
from fastrt.tasks.resources import INSIDE


def nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster, this one first.

    Returns:
        A dict for each: NodeID (for `scheduling=`), NodeName, Alive (True: a node that is lost is not listed),
        Resources and Available (amounts by name), Labels, IsHere. Amounts available on other nodes are a moment old.
    Raises:
        AttachError: the daemon does not answer.
    Source:
        The semantics of `ray.nodes`.
    """
    other = engines.current()
    return other.nodes() if other is not None else nodes_at(store_client.require().socket_path, True)


def nodes_at(socket_path: str, patient: bool = False) -> list[dict[str, Any]]:
    """`nodes` by the daemon at that socket; `patient` as for `join.inquire`.

    Raises:
        AttachError: the daemon does not answer.
    """
    answer = join.inquire(socket_path, ListNodes(), NodeList, patient=patient)
    return [_about(row, k == 0) for k, row in enumerate([answer.here, *answer.others])]


def cluster_resources() -> dict[str, float]:
    """The resources of all nodes together, in amounts by name.

    Raises:
        AttachError: the daemon does not answer.
    Source:
        The semantics of `ray.cluster_resources`.
    """
    return _sum("Resources")


def available_resources() -> dict[str, float]:
    """The part of `cluster_resources` that is not in use, without names whose amount is 0.

    Raises:
        AttachError: the daemon does not answer.
    Source:
        The semantics of `ray.available_resources`.
    """
    return {name: amount for name, amount in _sum("Available").items() if amount}


def _about(row: NodeRow, is_here: bool) -> dict[str, Any]:
    node, name, total, free, labels = row
    # Without the amounts of placement groups, which are part of the node's, and without the marks of selectors.
    amounts = [
        {key: parts / RESOURCE_PARTS for key, parts in parts_of.items() if INSIDE not in key and not is_selector(key)}
        for parts_of in (total, free)
    ]
    about = {"NodeID": node, "NodeName": name, "Alive": True, "IsHere": is_here}
    return {**about, "Resources": amounts[0], "Available": amounts[1], "Labels": dict(labels)}


def _sum(which: str) -> dict[str, float]:
    total: Counter[str] = Counter()
    for node in nodes():
        for name, amount in node[which].items():
            total[name] += round(amount * RESOURCE_PARTS)
    return {name: parts / RESOURCE_PARTS for name, parts in total.items()}
