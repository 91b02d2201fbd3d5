"""`ray.nodes` and the resources of the cluster."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from fastrt.errors import UnsupportedError
from fastrt.ids import NodeID
from fastrt.ray.refusals import refuse
from fastrt.runtime import nodes as runtime_nodes
from fastrt.tasks.labels import NODE_ID
from fastrt.tasks.resources import HEAD, NODE

_ONE_SOCKET = 'all processes of a node meet in its shared memory and at the socket in `init()["address"]`'
_ABSENT = {
    **dict.fromkeys(("NodeManagerPort", "ObjectManagerPort", "ObjectStoreSocketName", "RayletSocketName"), _ONE_SOCKET),
    "MetricsExportPort": "`fastrt metrics` and `fastrt start --metrics-port` serve metrics",
}


class NodeAsDict(dict[str, Any]):
    """A row of `ray.nodes()`: a dict that names the fields of Ray's rows that fastrt has not."""

    def __missing__(self, name: str) -> Any:
        if name in _ABSENT:
            raise UnsupportedError(refuse(f"field {name!r} of nodes()", _ABSENT[name]))
        raise KeyError(name)


def nodes() -> list[dict[str, Any]]:
    """Return the nodes of the cluster, also lost ones, as `fastrt.nodes` does, with Ray's further resources and fields.

    Reading a field that only Ray has, such as "NodeManagerPort", raises an UnsupportedError; `.get` returns None.

    Source:
        The semantics of `ray.nodes`.
    """
    host = platform.node()
    return [
        NodeAsDict(
            {
                **row,
                "NodeID": NodeID.widened(row["NodeID"]).hex(),
                "Labels": {**row["Labels"], NODE_ID: NodeID.widened(row["NodeID"]).hex()},
                "alive": row["Alive"],
                "NodeManagerAddress": _address_in(row["Resources"]) or row["NodeName"],
                "NodeManagerHostname": host if row["IsHere"] else row["NodeName"],
            }
        )
        for row in runtime_nodes.nodes(implied=True, lost=True)
    ]


def cluster_resources() -> dict[str, float]:
    """Return the resources of all nodes together, with those that Ray gives each node.

    Source:
        The semantics of `ray.cluster_resources`.
    """
    return runtime_nodes.cluster_resources(implied=True)


def available_resources() -> dict[str, float]:
    """Return the part of `cluster_resources` that is not in use.

    Source:
        The semantics of `ray.available_resources`.
    """
    return runtime_nodes.available_resources(implied=True)


def _address_in(resources: Mapping[str, float]) -> str:
    """The IP address of the node with these resources; empty: it has no workers, or runs in local mode."""
    found = (name.removeprefix(NODE) for name in resources if name.startswith(NODE) and name != HEAD)
    return next(found, "")
