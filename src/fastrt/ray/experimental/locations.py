"""`get_object_locations`: the nodes that hold the values of references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastrt._core.repair import inspect
from fastrt.ids import NodeID
from fastrt.runtime.driver import is_initialized
from fastrt.store import client as store_client
from fastrt.store.ref import ObjectRef


def get_object_locations(obj_refs: Sequence[ObjectRef], timeout_ms: int = -1) -> dict[ObjectRef, dict[str, Any]]:
    """Return where the values of references are, as far as this node knows.

    Args:
        obj_refs: references.
        timeout_ms: taken for Ray's sake; this node answers at once.
    Returns:
        For each: node_ids (empty where there is no value yet), object_size (bytes; None where there is no value yet),
        did_spill (whether it is in a file).
    Raises:
        RuntimeError: this process uses no session.
    Source:
        The semantics of `ray.experimental.get_object_locations`.
    """
    if not is_initialized():
        raise RuntimeError("get_object_locations needs a session: call ray.init() first")
    store = store_client.require()
    here = store.client.segment.session
    rows = {row["objref"]: row for row in inspect.objects(store.client)}
    found: dict[ObjectRef, dict[str, Any]] = {}
    for ref in obj_refs:
        row = rows.get(ref.objref)
        if row is None or row["state"] == "pending":
            found[ref] = {"node_ids": [], "object_size": None, "did_spill": False}
        else:
            nodes = [row["node"] or here] if row["state"] == "remote" else [here, *filter(None, [row["node"]])]
            nodes = [NodeID.widened(node).hex() for node in nodes]
            found[ref] = {"node_ids": nodes, "object_size": row["bytes"], "did_spill": row["state"] == "spilled"}
    return found


def get_local_object_locations(obj_refs: Sequence[ObjectRef]) -> dict[ObjectRef, dict[str, Any]]:
    """Return as `get_object_locations`."""
    return get_object_locations(obj_refs)
