"""What the cluster has, as the daemon of this machine's node knows it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fastrt.config import RESOURCE_PARTS
from fastrt.store import client as store_client
from fastrt.store import engine as engines
from fastrt.store import join
from fastrt.store.messages import ListNodes, NodeList, NodeRow
from fastrt.tasks.resources import INSIDE


def nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster, this one first.

    Returns:
        A dict for each: NodeID (for `scheduling=`), NodeName, Alive (True: a node that is lost is not listed),
        Resources and Available (amounts by name), IsHere. What is available elsewhere was so a moment ago.
    Raises:
        AttachError: the daemon does not answer.
    Source:
        The semantics of `ray.nodes`.
    """
    other = engines.current()
    return other.nodes() if other is not None else nodes_at(store_client.require().socket_path, True)


def nodes_at(socket_path: str, patient: bool = False) -> list[dict[str, Any]]:
    """`nodes`, as the daemon at that socket knows them; `patient` as for `attach.inquire`.

    Raises:
        AttachError: the daemon does not answer.
    """
    answer = join.inquire(socket_path, ListNodes(), NodeList, patient=patient)
    return [_about(row, k == 0) for k, row in enumerate([answer.here, *answer.others])]


def cluster_resources() -> dict[str, float]:
    """What all nodes have together, in amounts by name.

    Raises:
        AttachError: the daemon does not answer.
    Source:
        The semantics of `ray.cluster_resources`.
    """
    return _sum("Resources")


def available_resources() -> dict[str, float]:
    """What of `cluster_resources` is not in use; of which there is none is left out.

    Raises:
        AttachError: the daemon does not answer.
    Source:
        The semantics of `ray.available_resources`.
    """
    return {name: amount for name, amount in _sum("Available").items() if amount}


def _about(row: NodeRow, is_here: bool) -> dict[str, Any]:
    node, name, total, free = row
    # Not what placement groups have: that is part of what the node has.
    amounts = [
        {key: parts / RESOURCE_PARTS for key, parts in parts_of.items() if INSIDE not in key}
        for parts_of in (total, free)
    ]
    about = {"NodeID": node, "NodeName": name, "Alive": True, "IsHere": is_here}
    return {**about, "Resources": amounts[0], "Available": amounts[1]}


def _sum(which: str) -> dict[str, float]:
    total: Counter[str] = Counter()
    for node in nodes():
        for name, amount in node[which].items():
            total[name] += round(amount * RESOURCE_PARTS)
    return {name: parts / RESOURCE_PARTS for name, parts in total.items()}
